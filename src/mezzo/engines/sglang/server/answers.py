"""What a server says about itself and its weights, checked: every function fails on values of another shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAX_RANKS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """The options that a server was started with, as far as they matter to a run."""

    version: str
    model_path: str
    dtype: str
    ranks: int
    lora: bool
    lora_rank: int | None
    lora_targets: tuple[str, ...]
    loras_per_batch: int | None
    loaders: tuple[str, ...]


def parse_info(info: Any) -> ServerInfo:
    return ServerInfo(
        version=_text(info["version"]),
        model_path=_text(info["model_path"]),
        dtype=str(info.get("dtype")),
        ranks=_count(info.get("tp_size") or 1, MAX_RANKS),
        lora=bool(info.get("enable_lora")),
        lora_rank=_count(info["max_lora_rank"]) if info.get("max_lora_rank") else None,
        lora_targets=tuple(_text(name) for name in info.get("lora_target_modules") or ["all"]),
        loras_per_batch=_count(info["max_loras_per_batch"]) if info.get("max_loras_per_batch") else None,
        loaders=tuple(_text(name) for name in info.get("custom_weight_loader") or ()),
    )


def parse_weight_version(answer: Any) -> str:
    return _text(answer["weight_version"])


def parse_rows(answer: Any, count: int) -> list[dict[str, Any]]:
    """The answers to a request of `count` rows."""
    rows = answer if isinstance(answer, list) else [answer]
    if len(rows) != count or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{len(rows)} answers to {count} rows")
    return rows


def parse_tokens(row: Any, at_most: int) -> tuple[int, ...]:
    """The generated tokens of one row."""
    tokens = tuple(_count(token, 2**31 - 1, at_least=0) for token in row["output_ids"])
    if len(tokens) > at_most:
        raise ValueError(f"{len(tokens)} tokens where {at_most} were asked for")
    return tokens


def refuse_failure(answer: Any) -> None:
    """Fail if the server says that it could not do what it was asked for."""
    if isinstance(answer, dict) and answer.get("success") is False:
        raise ValueError(str(answer.get("error_message") or answer.get("message") or "no reason given"))


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 4096:
        raise TypeError(f"{str(value)[:40]!r} is not a name")
    return value


def _count(value: Any, at_most: int = 2**31 - 1, at_least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not at_least <= value <= at_most:
        raise ValueError(f"{str(value)[:40]!r} is not a count")
    return value
