"""What the vLLM engine does not run is refused in a line, before vLLM is imported."""

from __future__ import annotations

import pytest

from mezzo import api
from mezzo.engines import open_engine
from mezzo.engines.base import EngineSpec
from mezzo.engines.vllm import support
from mezzo.engines.vllm.model_facts import read_model_facts
from mezzo.errors import ConfigError, ModelError, SpaceError
from mezzo.method.space import Space
from mezzo.types import Readout
from tests.sglang.conftest import spec_of


def test_masked_models_heads_and_other_spaces_are_refused():
    with pytest.raises(ModelError, match="causal models; use --engine torch"):
        support.refuse_spec(EngineSpec("mezzo/roberta-mini", "masked", Space("lora"), rows=4))
    with pytest.raises(ModelError, match="no classification head"):
        support.refuse_spec(spec_of(Space("lora"), classes=2))
    for space in ("full", "matrices", "head", "prefix", "*norm*"):
        with pytest.raises(SpaceError, match="--space lora"):
            support.refuse_spec(spec_of(Space(space)))
    with pytest.raises(ConfigError, match="rank 512 at most"):
        support.refuse_spec(spec_of(Space("lora", rank=513)))
    support.refuse_spec(spec_of(Space("lora")))


def test_untested_architectures_are_refused(monkeypatch):
    monkeypatch.setattr(support, "ARCHITECTURES", ("opt",))
    with pytest.raises(ModelError, match=r"'llama' models are not tested.*--engine torch \(tested: opt\)"):
        support.refuse_spec(spec_of(Space("lora")))


def test_an_adapter_on_the_lm_head_is_refused():
    """By the space itself; vLLM would leave it out of the log-probabilities of prompts."""
    with pytest.raises(SpaceError, match="match no linear layer"):
        read_model_facts(spec_of(Space("lora", targets=("lm_head",))))


def test_many_label_words_are_refused():
    support.refuse_readout(Readout("words", words=tuple(range(128))))
    with pytest.raises(ModelError, match="128 words at most, not 129"):
        support.refuse_readout(Readout("words", words=tuple(range(129))))


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.0", "main"])
def test_other_versions_are_refused(version):
    with pytest.raises(ConfigError, match="pip install 'vllm=="):
        support.refuse_version(version)
    support.refuse_version("0.32.1")


def test_missing_vllm_is_named(monkeypatch):
    def none(package: str) -> str:
        raise support.importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(support.importlib.metadata, "version", none)
    with pytest.raises(ConfigError, match=r"not installed: scripts/vllm_env/build\.sh"):
        open_engine("vllm", spec_of(Space("lora")))


def test_model_that_is_not_trained_is_not_refused_for_its_space(monkeypatch):
    """vLLM runs it with adapters of zeros: it is not opened in the space `full`, as it is on other engines."""
    monkeypatch.setattr(support, "SUPPORTED", "none")
    monkeypatch.setattr(support.importlib.metadata, "version", lambda package: "0.32.0")
    with pytest.raises(ConfigError, match="not supported: this engine"):
        api.evaluate(model="mezzo/llama-mini", task="reviews", engine="vllm")


def test_options_of_other_engines_and_workers_are_refused():
    for option in ({"tp": 2}, {"url": "http://localhost:1"}, {"quantize": "4bit"}, {"temperature": 1.0}):
        with pytest.raises(ConfigError, match="belongs to the"):
            api.resolve({"engine": "vllm", **option})
    with pytest.raises(ConfigError, match="workers cannot run the vllm engine"):
        api.resolve({"engine": "vllm", "workers": 2})


@pytest.mark.vllm
def test_other_devices_and_types_are_refused():
    with pytest.raises(ConfigError, match="runs on cpu, not on cuda"):
        open_engine("vllm", spec_of(Space("lora"), device="cuda"))
    with pytest.raises(ConfigError, match="leave out --dtype bfloat16"):
        open_engine("vllm", spec_of(Space("lora"), dtype="bfloat16"))
