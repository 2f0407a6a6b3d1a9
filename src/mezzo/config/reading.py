"""From values of any source (the command line, a TOML or YAML file, keyword arguments, a journal) to a checked RunConfig."""

from __future__ import annotations

import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mezzo.config.hints import similar_options
from mezzo.config.option import Option
from mezzo.config.run_config import OPTIONS, RunConfig
from mezzo.engines.registry import ENGINES
from mezzo.errors import ConfigError
from mezzo.untrusted import read_settings

# Scores divided by less than this may overflow.
LEAST_TEMPERATURE = 1e-3

TYPES: dict[str, Any] = typing.get_type_hints(RunConfig)
TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
# What is converted to each type; `float` takes what Python's does.
ACCEPTED: dict[type, Any] = {str: (str, Path), int: (str, int), float: object}
BOOLEANS = {"true": True, "false": False, "1": True, "0": False}


def is_switch(name: str) -> bool:
    """Whether an option is true or false: its flag takes no value."""
    return bool in (TYPES[name], *typing.get_args(TYPES[name]))


def from_mapping(values: Mapping[str, Any]) -> RunConfig:
    """A RunConfig from flat keys or from group tables, each value converted and checked."""
    config = RunConfig(**flatten(values))
    for name, option in OPTIONS.items():
        option.check(getattr(config, name))
    _check_combinations(config)
    return config


def _check_combinations(config: RunConfig) -> None:
    engine = ENGINES[config.engine]
    owners = {name: owner for owner, info in ENGINES.items() for name in info.options}
    for name, owner in owners.items():
        if name not in engine.options and getattr(config, name) != OPTIONS[name].default:
            raise ConfigError(
                f"{OPTIONS[name].flag} belongs to the {owner} engine: add --engine {owner}, or leave it out"
            )
    if config.workers and not engine.workers:
        raise ConfigError(f"workers cannot run the {config.engine} engine: leave --workers out")
    if config.url and config.workers:
        raise ConfigError(
            "workers start engines of their own: name all servers in --url instead, they share each batch"
        )
    if config.splits_layers:
        _check_several_devices(config)
    if config.offload and config.quantize:
        raise ConfigError("a quantised base is small enough to stay on the device: give --quantize or --offload")
    if config.draws > 1 and not config.temperature:
        raise ConfigError("--draws are all the same at temperature 0: add --temperature 1")
    if config.top_p < 1 and not config.temperature:
        raise ConfigError("--top-p says what is drawn from, and temperature 0 draws nothing: add --temperature 1")
    if 0 < config.temperature < LEAST_TEMPERATURE:
        raise ConfigError(f"--temperature {config.temperature:g} is too small: 0 takes the likeliest tokens")
    if config.ray_address and not config.workers:
        raise ConfigError("--ray-address says where workers run: add --workers N")


def _check_several_devices(config: RunConfig) -> None:
    if config.engine != "torch":
        raise ConfigError("several devices belong to the torch engine: sglang splits a model with --tp N")
    if config.workers:
        raise ConfigError("a worker has one device: leave --workers out, or name one --device")
    if config.offload or config.quantize:
        option = "--offload" if config.offload else "--quantize"
        raise ConfigError(f"{option} is for one device: leave it out, or name one --device")


def from_file(path: Path, given: Collection[str] = ()) -> dict[str, Any]:
    """The options of a TOML or YAML file, or of the `config.json` of a run (or its folder): that run again, in a new folder.

    A file may come from a stranger: values that run code or contact other machines are refused, unless the option is among
    the `given` ones, whose values are not taken from the file.
    """
    path = path / "config.json" if path.is_dir() else path
    values = _read_table(path)
    if path.suffix == ".json":
        values = {name: value for name, value in values.items() if value is not None and name != "out"}
    flat = {name: value for name, value in flatten(values).items() if name not in given}
    for option in unnamed_options(flat, given):
        raise ConfigError(
            f"{path}: {option.name} is not taken from a file, which may come from a stranger: "
            f"give {f'{option.flag} {option.placeholder}'.strip()} beside it if you trust it"
        )
    return flat


def unnamed_options(values: Mapping[str, Any], given: Collection[str]) -> list[Option]:
    """The options that only the user may set to these values, which run code or contact other machines, and did not."""
    known = {name: value for name, value in values.items() if name in OPTIONS and name not in given}
    return [OPTIONS[name] for name, value in known.items() if OPTIONS[name].unsafe(convert(name, value))]


def _read_table(path: Path) -> dict[str, Any]:
    try:
        values = read_settings(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        kind = {".json": "JSON", ".yaml": "YAML", ".yml": "YAML"}.get(path.suffix, "TOML")
        raise ConfigError(f"{path} is not valid {kind}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no options: a configuration is an object of names and values")
    return values


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Converted values by option. A group table and an option may share a name, as `task` and `space` do."""
    flat: dict[str, Any] = {}
    groups = {option.group for option in OPTIONS.values()}
    for key, value in values.items():
        is_table = key in groups and isinstance(value, Mapping)
        for word, inner in value.items() if is_table else [(key, value)]:
            name = known_name(word, key if is_table else "")
            flat[name] = convert(name, inner)
    return flat


def known_name(word: str, group: str = "") -> str:
    """The option's name; ConfigError where there is none, or it belongs to another group."""
    name = word.replace("-", "_")
    shown = f"{group}.{word}" if group else word
    if name not in OPTIONS:
        hints = [f"{name}={value!r}" if value else repr(name) for name, value in similar_options(name, OPTIONS)]
        hint = f"; did you mean {' or '.join(hints)}?" if hints else ""
        raise ConfigError(f"unknown option {shown!r}{hint}")
    if group and OPTIONS[name].group != group:
        raise ConfigError(f"unknown option {shown!r}: {name} belongs to the table [{OPTIONS[name].group}]")
    return name


def convert(name: str, value: Any) -> Any:
    """A value as its option's type: text of the command line is parsed, types of TOML and Python are checked."""
    kind = TYPES[name]
    arms = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if value is None and type(None) in arms:
        return None
    target = next(arm for arm in arms if arm is not type(None))
    words = OPTIONS[name].words
    if isinstance(value, str) and value in words:
        return value
    if target is str and value == "" and OPTIONS[name].default != "":
        raise ConfigError(f"{name} is empty: give a value, or leave it out")
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{name} holds a NUL character")
    try:
        return _convert(value, target)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        wanted = " or ".join((TYPE_NAMES.get(target, "a list of words"), *words))
        raise ConfigError(f"{name} must be {wanted}, not {value!r}") from None


def _convert(value: Any, target: Any) -> Any:
    if typing.get_origin(target) is tuple:
        if isinstance(value, Mapping):
            return tuple(f"{key}={word}" for key, word in value.items())
        return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else tuple(map(str, value))
    if target is bool:
        return value if isinstance(value, bool) else BOOLEANS[value.lower()]
    if target is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, ACCEPTED[target]):
        raise TypeError
    return target(value)
