"""What may be asked for, as far as it can be said without looking at a model or data: bounds and choices of the options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mezzo.errors import ConfigError, nearest

AT_LEAST_ONE = (
    *("micro_batch", "tp", "threads", "workers", "k", "max_length", "train_limit", "eval_limit", "max_new_tokens"),
    *("rank", "prefix_tokens", "noise_rank", "steps", "batch_size", "samples", "eval_every"),
)
POSITIVE = ("eps", "time_limit", "alpha", "worker_timeout")
NOT_NEGATIVE = (
    *("lr", "weight_decay", "clip", "warmup", "patience", "demonstrations"),
    *("snapshot_minutes", "check_workers", "cache_mb"),
)
SEEDS = ("seed", "data_seed")
MOST = {
    "samples": 4096,
    "batch_size": 2**20,
    "threads": 1024,
    "tp": 1024,
    "demonstrations": 1024,
    "max_new_tokens": 65536,
}
"""Where a slip, or a stranger's configuration, would exhaust the machine. Ranks and lengths are held to the model's own."""

CHOICES: dict[str, tuple[str, ...]] = {
    "engine": ("torch", "sglang"),
    "quantize": ("8bit", "4bit"),
    "dtype": ("float32", "bfloat16", "float16"),
    "readout": ("auto", "words", "head", "candidates"),
    "noise": ("rademacher", "gaussian", "lowrank"),
    "schedule": ("constant", "linear", "cosine"),
    "decay": ("all", "matrices"),
    "id_order": ("hub", "lm-bff"),
    "backend": ("gloo", "nccl"),
    "track": ("tensorboard", "wandb", "trackio"),
}


def check(config: Any) -> None:
    """Raise ConfigError for the first option that cannot be meant."""
    for name in AT_LEAST_ONE:
        _hold(config, name, lambda value: value >= 1, "must be at least 1")
    for name, most in MOST.items():
        _hold(config, name, lambda value, most=most: value <= most, f"must be at most {most}")  # type: ignore[misc]
    for name in POSITIVE:
        _hold(config, name, lambda value: 0 < value < float("inf"), "must be positive")
    for name in NOT_NEGATIVE:
        _hold(config, name, lambda value: 0 <= value < float("inf"), "must not be negative")
    for name in SEEDS:
        _hold(config, name, lambda value: 0 <= value < 2**63, "must lie between 0 and 2^63")
    _check_together(config)
    for name, choices in CHOICES.items():
        value = getattr(config, name)
        for word in value if isinstance(value, tuple) else (value,):
            if word is not None and word not in choices:
                raise ConfigError(f"{name} is one of {', '.join(choices)}, not {word!r}{nearest(word, choices)}")
    pairs("columns", config.columns, "text=body,label=stars")


def _hold(config: Any, name: str, holds: Callable[[Any], bool], rule: str) -> None:
    value = getattr(config, name)
    if value is not None and not holds(value):
        raise ConfigError(f"{name} {rule}, not {value}")


def _check_together(config: Any) -> None:
    if config.engine != "sglang" and (config.url or config.tp != 1):
        raise ConfigError("--url and --tp belong to SGLang: add --engine sglang")
    if config.url and config.workers:
        raise ConfigError(
            "--workers start engines of their own: name all servers in --url instead, they share each batch"
        )
    if config.engine != "torch" and config.quantize:
        raise ConfigError("--quantize belongs to the torch engine; a server loads its model as it was told to")
    if config.ray_address and not config.workers:
        raise ConfigError("--ray-address says where workers run: add --workers N")


def pairs(name: str, words: tuple[str, ...], example: str) -> dict[str, str]:
    """An option of `key=value` pairs as a dict."""
    split = [word.partition("=") for word in words]
    if not all(key.strip() and value.strip() for key, _, value in split):
        raise ConfigError(f"{name} are pairs such as {example}, not {','.join(words)!r}")
    return {key.strip(): value.strip() for key, _, value in split}
