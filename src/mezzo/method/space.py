"""What is trained: a choice over the names, shapes and kinds that an engine lists. It never sees a module."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mezzo.errors import SpaceError, nearest
from mezzo.types import TensorInfo, TrainedTensor

DECAYS = ("all", "matrices", "base")
# Which LoRA factors can be trained. Moving both moves their product, so that scores do not change linearly along a direction.
FACTORS = ("b", "both")
TIED = "this model's head is tied to its embeddings"
USUAL_NOISE_RANK = 8

# The query and value projections by the names model families give them, the first set that exists wins.
# A fused projection (GPT-2, ModernBERT) holds query, key and value in one matrix.
QUERY_VALUE = (
    ("query", "value"),
    ("q_proj", "v_proj"),
    ("q_lin", "v_lin"),
    ("c_attn",),
    ("Wqkv",),
    ("query_key_value",),
    ("qkv_proj",),
)


@dataclass(frozen=True, slots=True)
class Space:
    """A request: which tensors (`kind`, narrowed by `only` and `layers`) and how noise looks on their matrices.

    `kind` is a key of SPACES or a glob over tensor names. `noise_rank` 0 is dense noise, r > 0 low-rank noise on matrices.
    `factors` are those of LoRA that are trained, `tokens` is the length of a prefix. `head`: the model's head is trained beside
    an adapter.
    """

    kind: str = "full"
    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ()
    factors: str = "both"
    tokens: int = 5
    head: bool = False
    only: tuple[str, ...] = ()
    layers: str = ""
    noise_rank: int = 0
    decay: str = "all"

    def __post_init__(self) -> None:
        if self.kind not in SPACES and not _is_pattern(self.kind):
            raise SpaceError(
                f"unknown space {self.kind!r}{nearest(self.kind, SPACES)} (spaces: {', '.join(SPACES)}; "
                f"or a name pattern such as '*.attention.*')"
            )
        if self.rank < 1 or self.noise_rank < 0 or self.tokens < 1:
            raise SpaceError(
                f"ranks must be positive: rank {self.rank}, noise rank {self.noise_rank}, prefix tokens {self.tokens}"
            )
        if self.head and not self.adapter:
            raise SpaceError(f"--train-head goes with --space {' or '.join(ADAPTERS)}, not {self.kind!r}")
        if self.factors not in FACTORS:
            raise SpaceError(f"factors of LoRA are {' or '.join(map(repr, FACTORS))}, not {self.factors!r}")
        if self.decay not in DECAYS:
            raise SpaceError(f"decay is 'all', 'matrices' (skips biases and norms) or 'base', not {self.decay!r}")
        if self.decay == "base" and self.kind != "lora":
            raise SpaceError(
                f"--decay base goes with --space lora, whose B factors are zero at the base; not {self.kind!r}"
            )

    @property
    def adapter(self) -> bool:
        """Whether what is trained is added to the model, whose own weights stay as they are."""
        return self.kind in ADAPTERS

    @property
    def scaling(self) -> float:
        """What LoRA multiplies its product by."""
        return self.alpha / self.rank


def select(space: Space, tensors: Sequence[TensorInfo]) -> tuple[TrainedTensor, ...]:
    """The trained tensors, in the engine's order. Raises SpaceError when the choice is empty."""
    if space.kind in SPACES:
        chosen = SPACES[space.kind].select(space, tensors)
        if space.head:
            chosen += SPACES["head"].select(replace(space, layers=""), tensors)
    else:
        chosen = _select_tensors(space, tensors, lambda t: fnmatch.fnmatchcase(t.name, space.kind))
    if space.only:
        matching = tuple(t for t in chosen if any(fnmatch.fnmatchcase(t.name, pattern) for pattern in space.only))
        if not matching:
            hint = "; --factors both trains A too" if space.kind == "lora" and space.factors == "b" else ""
            raise SpaceError(
                f"no tensor of space {space.kind!r} matches {_quote(space.only)}; it has {_some_names(chosen)}{hint}"
            )
        chosen = matching
    _refuse_noise_rank(space, chosen)
    return chosen


def lora_names(target: str) -> tuple[str, str]:
    """Names of the two LoRA tensors of the linear layer whose weight is `target`."""
    module = target.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def prefix_names(attention: str) -> tuple[str, str]:
    """Names of the trained keys and values of the attention module at a path."""
    return f"{attention}.prefix_key", f"{attention}.prefix_value"


def _select_tensors(
    space: Space, tensors: Sequence[TensorInfo], matches: Callable[[TensorInfo], bool], hint: str = ""
) -> tuple[TrainedTensor, ...]:
    """Tensors of the model itself."""
    selected = [t for t in tensors if matches(t)]
    if not selected:
        raise SpaceError(
            f"space {space.kind!r} selects no tensor of this model; {hint or f'it has {_some_names(tensors)}'}"
        )
    return tuple(
        TrainedTensor(t.name, t.shape, t.kind, rank=_noise_rank(space, t), decay=_has_decay(space, t.kind))
        for t in _filter_layers(space.layers, selected)
    )


def _lora(space: Space, tensors: Sequence[TensorInfo]) -> tuple[TrainedTensor, ...]:
    linear = {t.name.removesuffix(".weight"): t for t in tensors if t.linear}
    targets = space.targets or _default_targets(linear)
    matched = linear if targets == ("all-linear",) else {m: t for m, t in linear.items() if _targets_match(m, targets)}
    if not matched:
        leaves = sorted({module.rsplit(".", 1)[-1] for module in linear})
        raise SpaceError(f"LoRA targets {_quote(targets)} match no linear layer; this model has {', '.join(leaves)}")
    chosen: list[TrainedTensor] = []
    for info in _filter_layers(space.layers, list(matched.values())):
        out, inner = reversed(info.shape) if info.transposed else info.shape
        if space.rank > min(out, inner):
            raise SpaceError(
                f"rank {space.rank} is more than {info.name} has ({min(out, inner)}); choose a smaller --rank"
            )
        name_a, name_b = lora_names(info.name)
        if space.factors == "both":
            chosen.append(TrainedTensor(name_a, (space.rank, inner), "lora_A", decay=_has_decay(space, "lora_A")))
        chosen.append(TrainedTensor(name_b, (out, space.rank), "lora_B"))
    return tuple(chosen)


def _prefix(space: Space, tensors: Sequence[TensorInfo]) -> tuple[TrainedTensor, ...]:
    chosen = _filter_layers(space.layers, [t for t in tensors if t.kind == "prefix"])
    return tuple(TrainedTensor(t.name, (t.shape[0], space.tokens, t.shape[1]), "prefix") for t in chosen)


@dataclass(frozen=True, slots=True)
class SpaceKind:
    """A space that has a name."""

    select: Callable[[Space, Sequence[TensorInfo]], tuple[TrainedTensor, ...]]
    adapter: bool = False
    """It adds tensors to a frozen model, which may be quantized. They have small dimensions, so that their noise is dense."""


SPACES: dict[str, SpaceKind] = {
    "full": SpaceKind(partial(_select_tensors, matches=lambda t: True)),
    "matrices": SpaceKind(partial(_select_tensors, matches=lambda t: t.kind == "matrix")),
    "lora": SpaceKind(_lora, adapter=True),
    "prefix": SpaceKind(_prefix, adapter=True),
    "head": SpaceKind(partial(_select_tensors, matches=lambda t: t.kind == "head", hint=TIED)),
}
ADAPTERS = tuple(name for name, kind in SPACES.items() if kind.adapter)


def _default_targets(linear: Iterable[str]) -> tuple[str, ...]:
    leaves = {module.rsplit(".", 1)[-1] for module in linear}
    for names in QUERY_VALUE:
        if leaves.issuperset(names):
            return names
    raise SpaceError(
        f"cannot tell query and value apart in this model; name LoRA targets among {', '.join(sorted(leaves))}"
    )


def _targets_match(module: str, targets: Iterable[str]) -> bool:
    return any(
        module == target
        or module.endswith("." + target)
        or (_is_pattern(target) and fnmatch.fnmatchcase(module, target))
        for target in targets
    )


def _filter_layers(layers: str, tensors: list[TensorInfo]) -> list[TensorInfo]:
    """Tensors of the layers a Python slice names; an open end keeps the head, which comes after the last layer."""
    if not layers:
        return tensors
    depth = 1 + max((t.layer for t in tensors), default=-1)
    try:
        start, stop = (int(part) if part else None for part in layers.split(":"))
        chosen = set(range(depth)[start:stop])
    except ValueError:
        raise SpaceError(f"layers are a slice such as '4:' or '2:5', not {layers!r}") from None
    kept = [t for t in tensors if t.layer in chosen or (stop is None and t.kind == "head")]
    if not kept:
        raise SpaceError(f"layers {layers!r} select nothing; this model has layers 0 to {depth - 1}")
    return kept


def _noise_rank(space: Space, tensor: TensorInfo) -> int:
    """Vectors and matrices thinner than the rank keep dense noise."""
    return space.noise_rank if len(tensor.shape) == 2 and min(tensor.shape) > space.noise_rank else 0


def _refuse_noise_rank(space: Space, chosen: Sequence[TrainedTensor]) -> None:
    """Low-rank noise that is low-rank nowhere was not meant. The usual rank may meet nothing but a head of two classes."""
    ranks = [min(t.shape) for t in chosen if len(t.shape) == 2 and t.kind not in ("lora_A", "lora_B")]
    if space.noise_rank > USUAL_NOISE_RANK and ranks and space.noise_rank >= max(ranks):
        raise SpaceError(
            f"noise of rank {space.noise_rank} fits no trained matrix; lower --noise-rank below {max(ranks)}, "
            "or use --noise rademacher"
        )


def _has_decay(space: Space, kind: str) -> bool:
    if space.decay == "base":  # the one kind that is zero where the model is as it came
        return kind == "lora_B"
    return space.decay == "all" or kind not in ("bias", "norm")


def _is_pattern(text: str) -> bool:
    """A glob, or a dotted name that stands for itself."""
    return any(sign in text for sign in "*?[.")


def _quote(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _some_names(tensors: Sequence[TensorInfo] | Sequence[TrainedTensor], count: int = 3) -> str:
    names = [t.name for t in tensors]
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")
