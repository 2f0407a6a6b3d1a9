"""What SGLang cannot train is refused before anything starts, with a message that says what to do instead."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import threading
import types
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch

from mezzo import api
from mezzo.engines import open_engine, refuse_space
from mezzo.engines.base import EngineSpec
from mezzo.engines.hf_hub import locate
from mezzo.engines.sglang import model_facts
from mezzo.engines.sglang.adapters import adapter_shape
from mezzo.engines.sglang.inprocess import launch
from mezzo.engines.sglang.internals import processes
from mezzo.engines.sglang.model_facts import read_model_facts
from mezzo.engines.sglang.server.engine import ServerEngine
from mezzo.engines.sglang.server.loader import LOADER
from mezzo.engines.sglang.server.replica import Replica
from mezzo.engines.sglang.versions import refuse_version
from mezzo.errors import ConfigError, ModelError, SpaceError
from mezzo.method.space import Space
from mezzo.runs.defaults import apply_defaults
from tests.sglang.conftest import MODEL, spec_of
from tests.sglang.servers import free_port


def test_processes_of_sglang_get_as_many_cores_as_omp_num_threads_says(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    for threads, said, cores in ((None, "2", "0,1"), (3, "2", "0,1,2"), (None, "", None)):
        monkeypatch.setenv("OMP_NUM_THREADS", said)
        spec = spec_of(Space("lora"), threads=threads)
        assert launch._environment_variables(spec, cpu=True).get("SGLANG_CPU_OMP_THREADS_BIND") == cores


def test_graphs_are_for_generated_texts_and_given_up_where_sglang_does_not_start_with_them(monkeypatch, capsys):
    tried = []

    def start(**arguments):
        tried.append(arguments)
        if not arguments["disable_cuda_graph"]:
            raise RuntimeError("Capture failed\nand why")

    monkeypatch.setitem(sys.modules, "sglang", types.SimpleNamespace(Engine=start))
    spec = spec_of(Space("lora"), device="cuda")
    launch.start(spec, None)
    launch.start(dataclasses.replace(spec, population=64), None)
    graphs = ("disable_cuda_graph", "disable_overlap_schedule")
    assert [[each[name] for name in graphs] for each in tried] == [[True, True], [False, False], [True, True]]
    assert tried[1]["cuda_graph_max_bs_decode"] == tried[1]["max_running_requests"] == 64 * spec.rows
    assert "without CUDA graphs, which is slower: SGLang could not start: Capture failed\n" in capsys.readouterr().err
    monkeypatch.setenv("MEZZO_SGLANG_OPTIONS", '{"disable_cuda_graph": true, "lora_backend": "csgmv"}')
    launch.start(dataclasses.replace(spec, population=64), None)
    assert tried[3]["disable_cuda_graph"] and tried[3]["lora_backend"] == "csgmv" and len(tried) == 4
    for wrong in ("[1]", "{"):
        monkeypatch.setenv("MEZZO_SGLANG_OPTIONS", wrong)
        with pytest.raises(ConfigError, match="MEZZO_SGLANG_OPTIONS"):
            launch.start(spec, None)


@pytest.fixture(scope="module")
def opt(tmp_path_factory):
    from transformers import OPTConfig, OPTForCausalLM

    folder = tmp_path_factory.mktemp("opt")
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=32,
        max_position_embeddings=32,
        word_embed_proj_dim=16,
    )
    OPTForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("targets", [("v_proj",), ("q_proj",), ("k_proj", "o_proj")])
def test_lora_on_value_alone_is_refused(targets):
    with pytest.raises(SpaceError, match="--targets q_proj,v_proj"):
        read_model_facts(spec_of(Space("lora", targets=targets)))


def test_opt_feed_forward_layers_are_refused(opt):
    with pytest.raises(SpaceError, match=r"fc1.*--targets q_proj,v_proj"):
        read_model_facts(EngineSpec(opt, "causal", Space("lora", targets=("q_proj", "v_proj", "fc1")), rows=4))
    with pytest.raises(SpaceError, match=r"fc1, fc2, out_proj.*--only"):
        read_model_facts(EngineSpec(opt, "causal", Space("matrices", noise_rank=2), rows=4))
    assert read_model_facts(EngineSpec(opt, "causal", Space("lora"), rows=4)).trained


def test_matrices_need_low_rank_noise_that_fits():
    with pytest.raises(SpaceError, match="--noise lowrank"):
        read_model_facts(spec_of(Space("matrices")))
    with pytest.raises(SpaceError, match="lower --noise-rank"):
        read_model_facts(spec_of(Space("matrices", noise_rank=256)))


def test_matrices_get_low_rank_noise_by_default():
    noise = {
        engine: apply_defaults(api.resolve({"engine": engine, "space": "matrices"}), "masked").noise
        for engine in ("sglang", "torch")
    }
    assert noise == {"sglang": "lowrank", "torch": "rademacher"}


def test_default_space_of_masked_model_is_one_that_sglang_trains():
    """On the torch engine its default is the head."""
    spaces = {engine: apply_defaults(api.resolve({"engine": engine}), "masked").space for engine in ("sglang", "torch")}
    assert spaces == {"sglang": "lora", "torch": "head"}


def test_sglang_options_need_the_sglang_engine():
    with pytest.raises(ConfigError, match="--engine sglang"):
        api.resolve({"tp": 2})
    with pytest.raises(ConfigError, match="--engine sglang"):
        api.resolve({"url": "http://localhost:30000"})
    with pytest.raises(ConfigError, match="all servers in --url"):
        api.resolve({"engine": "sglang", "url": "http://localhost:30000", "workers": 2})


@pytest.mark.sglang
def test_messages_that_nobody_takes_do_not_hold_up_the_next_engine(tmp_path):
    import zmq

    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(f"ipc://{tmp_path}/nobody")
    socket.send(b"a message")
    processes.drop_messages()
    ending = threading.Thread(target=context.destroy, daemon=True)
    ending.start()
    ending.join(10)
    assert not ending.is_alive()


@pytest.mark.sglang
def test_16_bit_on_a_cpu_is_refused():
    with pytest.raises(ConfigError, match="leave out --dtype bfloat16"):
        open_engine("sglang", spec_of(Space("lora"), dtype="bfloat16", device="cpu"))


@pytest.mark.sglang
def test_space_that_adapters_cannot_reach_is_refused_before_training(tmp_path):
    with pytest.raises(SpaceError, match="--space lora"):
        refuse_space("sglang", Space("full"))
    with pytest.raises(SpaceError, match=r"--space lora or matrices.*--engine torch for 'full'"):
        api.finetune("mezzo/llama-mini", engine="sglang", space="full", out=tmp_path / "run")
    with pytest.raises(SpaceError, match="--targets q_proj,v_proj"):
        api.finetune(
            "mezzo/llama-mini",
            task="sst-2",
            train=str(_write_data(tmp_path)),
            dev=str(_write_data(tmp_path)),
            engine="sglang",
            targets="v_proj",
            out=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def _write_data(folder):
    path = folder / "tiny.jsonl"
    path.write_text(
        "".join(json.dumps({"text": t, "label": y}) + "\n" for t, y in (("good", "positive"), ("bad", "negative")))
    )
    return path


# ---- servers, by the options they report


@contextlib.contextmanager
def http_server(body: bytes):
    """A program that answers every GET with `body`: not SGLang, or a server with the wrong options."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


OPTIONS = {
    "version": "0.5.23",
    "model_path": "m",
    "enable_lora": True,
    "max_lora_rank": 8,
    "lora_target_modules": ["q_proj", "k_proj", "v_proj"],
    "max_loras_per_batch": 4,
    "dtype": "float32",
    "custom_weight_loader": [LOADER],
}
UNSUITABLE = {
    "no LoRA": ({"enable_lora": None}, "without LoRA.*--enable-lora"),
    "version": ({"version": "0.4.6"}, "0.4.6 is not supported"),
    "rank": ({"max_lora_rank": 2}, "rank 2.*--max-lora-rank 8"),
    "targets": ({"lora_target_modules": ["o_proj"]}, "no adapters on k_proj, q_proj, v_proj"),
    "one adapter": ({"max_loras_per_batch": 1}, "two are needed"),
    "no loader": ({"custom_weight_loader": []}, f"--custom-weight-loader {LOADER}"),
    "dtype": ({"dtype": "auto"}, "'auto'.*--dtype float32"),
}


@pytest.fixture(scope="module")
def shape():
    spec = spec_of(Space("lora"))
    return adapter_shape(spec.space, read_model_facts(spec).trained)


@pytest.mark.parametrize("case", UNSUITABLE)
def test_server_with_unsuitable_options_is_refused(shape, case):
    changes, message = UNSUITABLE[case]
    with http_server(json.dumps({**OPTIONS, **changes}).encode()) as url, pytest.raises(ConfigError, match=message):
        Replica(url, "m", shape, loader=LOADER).connect()


@pytest.mark.parametrize(
    ("changes", "loader"),
    [({}, LOADER), ({"custom_weight_loader": [], "dtype": "auto"}, "")],
    ids=["matrices", "lora, which changes no weight of the server"],
)
def test_server_with_suitable_options_is_accepted(shape, changes, loader):
    options = {**OPTIONS, **changes}
    with http_server(json.dumps(options).encode()) as url:
        replica = Replica(url, "m", shape, loader=loader)
        replica.connect()
    assert (replica.info.dtype, list(replica.info.loaders)) == (options["dtype"], options["custom_weight_loader"])


def test_another_program_on_the_port_is_refused(shape):
    for body in (b"<html>hello</html>", b'{"name": "something else"}'):
        with http_server(body) as url, pytest.raises(ConfigError, match=r"not an SGLang server.*port.*--port"):
            Replica(url, "m", shape).connect()


def test_missing_server_and_malformed_url_are_refused(shape):
    with pytest.raises(ConfigError, match=r"no server answers.*sglang\.launch_server"):
        Replica(f"http://127.0.0.1:{free_port()}", "m", shape).connect()
    with pytest.raises(ConfigError, match="is not a URL"):
        Replica("localhost:30000", "m", shape).connect()


def test_missing_server_is_noticed_before_the_weights_are_read(monkeypatch):
    monkeypatch.setattr(model_facts, "load_model", None)
    with pytest.raises(ConfigError, match=r"no server answers.*--lora-target-modules k_proj q_proj v_proj"):
        ServerEngine(spec_of(Space("lora"), urls=(f"http://127.0.0.1:{free_port()}",)))


def test_checkpoint_of_another_dtype_gives_the_facts_of_the_torch_engine(tmp_path):
    """It is read in the dtype of its file; what is computed from it is not in that dtype."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(locate(MODEL), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    for dtype in ("float32", "bfloat16"):
        spec = EngineSpec(str(tmp_path), "causal", Space("lora"), rows=4, dtype=dtype, device="cpu")
        torch_engine = open_engine("torch", spec)
        facts = read_model_facts(dataclasses.replace(spec, urls=("http://127.0.0.1:1",)))
        assert facts.base_digest == torch_engine.base_digest and facts.initial_digest == torch_engine.digest()
        with torch.no_grad():
            logits = model.float()(input_ids=torch.tensor([model_facts.SAMPLE_TOKENS])).logits[0, -1]
        expected = logits.log_softmax(-1)[list(model_facts.SAMPLE_TOKENS)]
        torch.testing.assert_close(torch.tensor(facts.sample_logprobs), expected)


def test_server_of_a_masked_model_has_to_be_started_for_it():
    """It serves mezzo's own model, and SGLang's command line has no word for one of its modules."""
    spec = EngineSpec("mezzo/roberta-mini", "masked", Space("lora"), rows=4)
    with http_server(json.dumps(OPTIONS).encode()) as url, pytest.raises(ConfigError) as refused:
        ServerEngine(dataclasses.replace(spec, urls=(url,)))
    assert "does not serve a masked model as mezzo reads one" in str(refused.value)
    assert '\'{"architectures": ["EncoderForMaskedLM"], "mask_token_id": 4}\'' in str(refused.value)
    matrices, dense = Space("matrices", noise_rank=4), Space("lora", targets=("query", "value", "dense"))
    for space, option in ((matrices, "--only"), (dense, "--targets")):
        with http_server(json.dumps(OPTIONS).encode()) as url, pytest.raises(SpaceError, match=f"{option}.*out --url"):
            ServerEngine(dataclasses.replace(spec, urls=(url,), space=space, exclusive_server=True))


def test_heads_and_ranks_are_refused_over_url():
    urls = ("http://127.0.0.1:1",)
    with pytest.raises(ModelError, match="no classification head"):
        ServerEngine(spec_of(Space("lora"), urls=urls, classes=2))
    with pytest.raises(ConfigError, match="server's own option"):
        ServerEngine(spec_of(Space("lora"), urls=urls, tp=2))


# ---- versions


@pytest.mark.parametrize("version", ["0.4.9", "0.5.16", "0.5.24", "0.6.0", "main"])
def test_unsupported_version_is_refused(version):
    with pytest.raises(ConfigError, match="pip install sglang=="):
        refuse_version(version)


@pytest.mark.parametrize("version", ["0.5.23", "0.5.17.post1"])
def test_supported_version_is_accepted(version):
    assert refuse_version(version) is None
