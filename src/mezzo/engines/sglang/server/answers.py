"""What a server says about itself and its weights, checked: every function fails on values of another shape."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from mezzo.engines.sglang.module_names import ENCODER

MAX_RANKS = 1024
DISAGREE = "the ranks disagree"
DTYPES = ("float32", "bfloat16", "float16")


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
    logit_processors: bool
    """Requests may bring logit processors."""
    mask_token: int | None
    """Where this package's own encoder is read, if it is served."""
    process: str
    """What differs between two starts of a server with the same options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightStatus:
    """What mezzo's loader on a server says of its weights."""

    noise: str
    version: str
    """The loader's name of the weights; empty: as the server read them."""
    owner: str
    """The client whose orders it carried out last."""
    base_name: str
    moved: tuple[str, ...]
    error: str
    silent_seconds: float
    """How long ago the owner was heard of."""
    makes_adapters: bool
    """It makes adapters from seeds."""
    sampler: str
    """What its logit processor for draws is called; empty: it has none."""


@dataclass(frozen=True, slots=True)
class PartDigest:
    """The digest of one rank's rows and columns of a matrix."""

    name: str
    rows: tuple[int, int]
    cols: tuple[int, int]
    dtype: str
    digest: str


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
        logit_processors=info.get("enable_custom_logit_processor") is True,
        mask_token=_mask_token(info.get("json_model_override_args")),
        process=str((info.get("startup_time"), info.get("random_seed")))[:1000],
    )


def _mask_token(settings: Any) -> int | None:
    settings = json.loads(settings) if isinstance(settings, str) else settings or {}
    is_encoder = settings.get("architectures") == [ENCODER]
    return _place(settings["mask_token_id"]) if is_encoder and "mask_token_id" in settings else None


def parse_loader_answer(answer: Any) -> list[Any]:
    """The answer of mezzo's loader, one value for each rank: JSON, whose bytes SGLang sends as the values of a weight."""
    ranks = json.loads(bytes(_count(int(byte), 255, at_least=0) for byte in answer))
    for rank in ranks:
        if isinstance(rank, dict) and set(rank) == {"error"}:
            raise ValueError(_text(rank["error"]))
    return list(ranks)


def parse_status(answer: Any) -> WeightStatus:
    """What the ranks agree on; their disagreement is an error, and no version that a client could expect."""
    ranks = [
        WeightStatus(
            **{name: _text(rank[name]) for name in ("noise", "version", "owner", "base_name", "error")},
            moved=tuple(_text(name) for name in rank["moved"]),
            silent_seconds=float(rank["silent_seconds"]),
            makes_adapters=rank["makes_adapters"] is True,
            sampler=_text(rank.get("sampler", "")),
        )
        for rank in parse_loader_answer(answer)
    ]
    errors = [rank.error for rank in ranks if rank.error]
    agree = len({rank.version for rank in ranks}) == 1
    return replace(
        ranks[0],
        version=ranks[0].version if agree else DISAGREE,
        error=errors[0] if errors else "" if agree else DISAGREE,
        moved=tuple(dict.fromkeys(name for rank in ranks for name in rank.moved)),
    )


def parse_digests(answer: Any) -> list[PartDigest]:
    return [
        PartDigest(
            _text(name),
            (_place(rows[0]), _place(rows[1])),
            (_place(cols[0]), _place(cols[1])),
            _choice(dtype, DTYPES),
            _text(digest),
        )
        for rank in parse_loader_answer(answer)
        for name, rows, cols, dtype, digest in rank
    ]


def parse_adapter_names(answer: Any) -> list[str]:
    """The adapters in the list of models that a server offers."""
    return [_text(model["id"]) for model in answer["data"] if model.get("parent")]


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


def _choice(value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{str(value)[:40]!r} is none of {', '.join(choices)}")
    return str(value)


def _place(value: Any) -> int:
    return _count(value, at_least=0)


def _count(value: Any, at_most: int = 2**31 - 1, at_least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not at_least <= value <= at_most:
        raise ValueError(f"{str(value)[:40]!r} is not a count")
    return value
