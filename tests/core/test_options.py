"""Options have complete metadata, and the registries of engines, spaces and noise declare what each can do."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest

from mezzo import api
from mezzo.cli.parser import COMMANDS, GROUPS, build_parser, given_options
from mezzo.config import OPTIONS, RunConfig, convert, from_file, from_mapping, option_names
from mezzo.config.reading import TYPES
from mezzo.engines import ENGINES, open_engine
from mezzo.engines.base import Engine
from mezzo.engines.registry import EngineInfo, refuse_space
from mezzo.engines.sglang.inprocess.weights import WEIGHTS
from mezzo.errors import ConfigError, SpaceError
from mezzo.method import noise
from mezzo.method.objectives import OBJECTIVES
from mezzo.method.space import ADAPTERS, SPACES, Space, select
from mezzo.runs.resolve import resolve_setup
from mezzo.signal import DEFAULT
from mezzo.types import TensorInfo

# ---- options


@pytest.mark.parametrize("name", OPTIONS)
def test_option_has_complete_metadata(name):
    option, text = OPTIONS[name], str(TYPES[name])
    assert option.name == name
    assert option.help and not option.help.endswith(".")
    assert option.group in GROUPS
    assert set(option.commands) <= set(COMMANDS) - {"train"}
    assert convert(name, option.default) == option.default == getattr(RunConfig(), name)
    if "int" in text or "float" in text:
        assert option.positive or option.at_least is not None, "a number has bounds"
    for choice in option.values:
        assert choice in option.help, "the help text names every choice"
    if option.values and not option.open_choices:
        assert option.default in (None, (), *option.values)
    if option.pairs:
        assert "tuple" in text and option.split_pairs(tuple(option.pairs.split(",")))
        assert option.pairs in option.help
    if (option.contacts or option.runs_code) and "bool" not in text:
        assert option.placeholder
    assert not option.unsafe(option.default)


def test_any_option_is_set_by_name():
    parse = lambda *words: given_options(build_parser().parse_args(["train", *words]))  # noqa: E731
    found = parse("--set", "lr=1e-3", "--set", "words=negative=bad,positive=good", "--set", "batch-size=4", "--k", "2")
    assert found == {"lr": 1e-3, "words": ("negative=bad", "positive=good"), "batch_size": 4, "k": "2"}
    for words, message in {
        ("lr",): "--set takes NAME=VALUE",
        ("=3",): "--set takes NAME=VALUE",
        ("learning_rate=1",): "unknown option 'learning_rate'; did you mean 'lr'",
        ("lr=fast",): "lr must be a number",
        ("k=3", "--k", "2"): "k is given twice, by --k and by --set",
    }.items():
        with pytest.raises(ConfigError, match=message):
            parse("--set", *words)


def test_yaml_is_a_configuration_too(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: mezzo/llama-mini\nmethod:\n  lr: 1e-3\n  steps: 20\ntargets: [query, value]\n")
    found = from_file(file)
    assert found == {"model": "mezzo/llama-mini", "lr": 1e-3, "steps": 20, "targets": ("query", "value")}
    for text, message in {
        "lr: [": "is not valid YAML",
        "lr: !!python/object/apply:os.getcwd []": "is not valid YAML",
        "a: &a [1]\nb: *a\n": "it has an alias",
        "method: {learning_rate: 1}": "did you mean 'lr'",
        "- lr": "holds no options",
        "remote_code: true": "remote_code is not taken from a file",
    }.items():
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            from_file(file)


def test_aliases_are_unique_and_differ_from_option_names():
    aliases = [alias for option in OPTIONS.values() for alias in option.aliases]
    assert len(aliases) == len(set(aliases))
    assert not set(aliases) & set(OPTIONS)


REQUIRED = {"export": ["run", "adapter"], "verify": ["run"], "report": ["run"], "workers": ["run"]}


@pytest.mark.parametrize("name", COMMANDS)
def test_command_has_the_options_that_declare_it(name):
    parsed = set(vars(build_parser().parse_args([name, *REQUIRED.get(name, [])])))
    options = set(OPTIONS) if name == "train" else set(option_names(commands=name))
    arguments = {argument.name.lstrip("-").replace("-", "_") for argument in COMMANDS[name].arguments}
    assert parsed & set(OPTIONS) - arguments == options
    assert not options & arguments


def test_option_names_filters_by_metadata():
    assert option_names(runs_code=None, contacts=None) == tuple(n for n in OPTIONS if n not in UNSAFE)
    assert "steps" in option_names(resumable=True, per_model=True)
    assert option_names(commands="bench", resumable=True) == ("device", "threads")


UNSAFE: dict[str, tuple[Any, Any]] = {
    "model": ("somebody/model", "mezzo/roberta-mini"),
    "train": ("hub:somebody/data", "data.jsonl"),
    "dev": ("hub:somebody/data", None),
    "test": ("hub:somebody/data", None),
    "track": (("tensorboard", "wandb"), ("tensorboard",)),
    "url": (("http://host",), ()),
    "remote_code": (True, False),
    "ray_address": ("host:6379", "auto"),
    "objective": ("module:function", "accuracy"),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_values_that_run_code_or_contact_hosts_are_unsafe(name):
    unsafe, safe = UNSAFE[name]
    assert OPTIONS[name].unsafe(unsafe)
    assert not OPTIONS[name].unsafe(safe)


@pytest.mark.parametrize("name", [n for n, o in OPTIONS.items() if o.positive or o.at_least is not None])
def test_numbers_outside_the_bounds_are_refused(name):
    option = OPTIONS[name]
    outside = [0 if option.positive else option.at_least - 1]
    outside += [option.at_most + 1] if option.at_most else []
    outside += [math.inf, math.nan] if "float" in str(TYPES[name]) else []
    for value in outside:
        with pytest.raises(ConfigError, match=f"{name} must be"):
            option.check(value)


# ---- engines


def test_engine_options_are_refused_by_other_engines():
    values = {"tp": 2, "url": ("http://host",), "quantize": "8bit"}
    for name, value in values.items():
        owners = [engine for engine, info in ENGINES.items() if name in info.options]
        assert len(owners) == 1
        for engine in ENGINES:
            if engine in owners:
                assert getattr(from_mapping({"engine": engine, name: value}), name) == value
            else:
                with pytest.raises(ConfigError, match=f"belongs to the {owners[0]} engine"):
                    from_mapping({"engine": engine, name: value})


@pytest.mark.parametrize("name", ENGINES)
def test_engines_declare_spaces_and_options_that_exist(name):
    info = ENGINES[name]
    assert set(info.low_rank_spaces) <= set(info.spaces or SPACES) <= set(SPACES)
    assert set(info.options) <= set(OPTIONS)


def test_sglang_trains_what_it_declares():
    info = ENGINES["sglang"]
    assert set(WEIGHTS) == set(info.spaces)
    for space in (*SPACES, "*attention*"):
        if not info.trains(space):
            with pytest.raises(SpaceError, match="--space lora"):
                refuse_space("sglang", Space(space, noise_rank=8))
            continue
        refuse_space("sglang", Space(space, noise_rank=8))
        if space in info.low_rank_spaces:
            with pytest.raises(SpaceError, match="--noise lowrank"):
                refuse_space("sglang", Space(space))
        else:
            refuse_space("sglang", Space(space))


def test_engines_that_declare_it_generate():
    from mezzo.engines.sglang.inprocess.engine import InProcessEngine
    from mezzo.engines.sglang.server.engine import ServerEngine
    from mezzo.engines.torch.engine import TorchEngine

    for name, classes in {"torch": [TorchEngine], "sglang": [InProcessEngine, ServerEngine]}.items():
        for cls in classes:
            assert ENGINES[name].generates == callable(getattr(cls, "generate", None))
            assert all(
                hasattr(cls, method) for method, _ in inspect.getmembers(Engine, inspect.isfunction) if method[0] != "_"
            )


def test_workers_and_generation_are_refused_for_engines_without_them(monkeypatch):
    monkeypatch.setitem(ENGINES, "small", EngineInfo(factory="x:y", workers=False, generates=False))
    with pytest.raises(ConfigError, match="workers cannot run the small engine"):
        from_mapping({"engine": "small", "workers": 2})
    with pytest.raises(ConfigError, match="the small engine does not produce"):
        resolve_setup(api.resolve({"engine": "small", "model": "mezzo/llama-mini", "task": "squad"}))


def test_unknown_engine_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'torch'"):
        from_mapping({"engine": "troch"})
    with pytest.raises(ConfigError, match="did you mean 'torch'"):
        open_engine("troch", None)  # type: ignore[arg-type]


# ---- noise and spaces


def test_unknown_noise_is_refused_everywhere():
    with pytest.raises(ConfigError, match="did you mean 'gaussian'"):
        noise.get_noise("gausian")
    with pytest.raises(ConfigError, match="unknown noise None"):
        noise.get_noise(None)
    for draw in (noise.dense, noise.stream_bytes):
        with pytest.raises(ConfigError, match="no dense noise 'cauchy'"):
            draw("cauchy", 1, "w", 0, 8)


def test_noise_choices_declare_kind_and_low_rank():
    kinds = {name: (choice.kind, choice.low_rank) for name, choice in noise.NOISES.items()}
    assert kinds["rademacher"] == ("rademacher", False)
    assert kinds["gaussian"] == ("gaussian", False)
    assert kinds["lowrank"] == ("rademacher", True)
    assert {kind for kind, _ in kinds.values()} == set(noise.KINDS)


TENSORS = (
    TensorInfo("m.0.query.weight", (16, 16), "matrix", 0, linear=True),
    TensorInfo("m.0.value.weight", (16, 16), "matrix", 0, linear=True),
    TensorInfo("m.0.norm.bias", (16,), "bias", 0),
    TensorInfo("m.0.prefix_key", (2, 8), "prefix", 0),
    TensorInfo("head.weight", (4, 16), "head", -1, linear=True),
)


@pytest.mark.parametrize("name", SPACES)
def test_only_adapter_spaces_add_tensors(name):
    model_tensors = tuple(t for t in TENSORS if t.kind != "prefix" or name == "prefix")
    trained = select(Space(name), model_tensors)
    shapes = {t.name: t.shape for t in TENSORS}
    added = [t for t in trained if shapes.get(t.name) != t.shape]
    assert bool(added) == Space(name).adapter == (name in ADAPTERS)
    assert not added or len(added) == len(trained)


def test_help_lists_every_objective():
    assert all(f"{name}," in OPTIONS["objective"].help for name in OBJECTIVES)
    assert DEFAULT in str(next(a.settings["help"] for a in COMMANDS["signal"].arguments if a.name == "--objectives"))
