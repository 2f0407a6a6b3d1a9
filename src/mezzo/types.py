"""The values that travel between the parts: small, frozen, free of tensors of weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

# scores[probe, example, candidate], on the host. Defined up to one constant per (probe, example).
Scores = npt.NDArray[np.float32]
FLOAT32_MAX = float(np.finfo(np.float32).max)


Family = Literal["masked", "causal"]


@dataclass(frozen=True, slots=True)
class Example:
    """One row of data: its fields by column name, and its label's index (-1: unlabelled)."""

    fields: Mapping[str, Any]
    label: int = -1


@dataclass(frozen=True, slots=True)
class Prompt:
    """An encoded example. `position` is where the words readout looks (the mask; the last token of a causal prompt).
    `right` are the right candidates where there may be several; `label`, the one that is trained, is one of them."""

    ids: tuple[int, ...]
    label: int = -1
    position: int = -1
    candidates: tuple[tuple[int, ...], ...] = ()
    segments: tuple[int, ...] = ()
    answers: tuple[str, ...] = ()
    right: tuple[int, ...] = ()
    row: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """All fields of the row of data, where a reward may ask for them."""


@dataclass(frozen=True, slots=True)
class Readout:
    """How an engine turns hidden states into candidate scores.

    `words`: rows `words` of the LM head at each prompt's `position`; as log-probabilities of the whole vocabulary if
    `vocabulary`. `head`: the logits of a classification head with `classes` outputs. `candidates`: log-probability
    of each prompt's candidate continuations, summed or averaged over their tokens.
    """

    kind: Literal["words", "head", "candidates"]
    words: tuple[int, ...] = ()
    vocabulary: bool = False
    classes: int = 0
    reduce: Literal["mean", "sum"] = "mean"


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts that are scored together, the same for every probe of a step."""

    prompts: tuple[Prompt, ...]
    readout: Readout

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        return np.array([prompt.label for prompt in self.prompts], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """How work is cut: examples and probes in one forward, and the multiple that lengths are padded to. A group of examples of
    which more than the share `waste` would be padding is halved, short ones apart from long ones.

    Fixed before step 1 and kept in the journal's header, so that scores do not depend on who computes a unit.
    """

    rows: int
    members: int = 2
    pad_to: int = 1
    waste: float = 1.0


@dataclass(frozen=True, slots=True)
class Probe:
    """A point in weight space: θ + Σ scale·z(seed). No terms: θ itself."""

    terms: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Update:
    """A move in weight space: θ ← keep·θ − Σ coef·z(seed). `keep` and every coef are exact float32 values."""

    terms: tuple[tuple[int, float], ...] = ()
    keep: float = 1.0

    def __post_init__(self) -> None:
        for value in (self.keep, *(coef for _, coef in self.terms)):
            if value != float(np.float32(value)):  # not an assertion: values of a journal come here too
                raise ValueError(f"{value!r} is not a float32 value")

    @property
    def empty(self) -> bool:
        return self.keep == 1.0 and all(coef == 0.0 for _, coef in self.terms)


@dataclass(frozen=True, slots=True)
class Slope:
    """One directional derivative estimate: along z(seed), the loss changes by `value` per unit step."""

    seed: int
    value: float


@dataclass(frozen=True, slots=True)
class Generation:
    """How text is generated: greedily at temperature 0, else drawn from the smallest set of tokens with the probability `top_p`.

    A draw is a function of (seed, direction of the probe, prompt, number of the draw): it does not depend on the prompts beside
    it nor on the sign, so that the texts of a pair of probes differ only by their weights.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    draws: int = 1
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a text, beside the model's own."""


# A reward may be no larger than this, nor smaller than its negative: what is computed of them must stay finite.
LARGEST_REWARD = 1_000_000


@dataclass(frozen=True, slots=True)
class Rewards:
    """Rewards of generated texts: values[probe, example, draw], higher is better. Of `failed` of them there was none, and a
    configured value stands in. The texts have so many `tokens` together."""

    values: npt.NDArray[np.float64]
    failed: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Question:
    """What a method asks of an engine: scores of a batch at probes, or with `generation` their continuations."""

    batch: Batch
    probes: tuple[Probe, ...]
    generation: Generation | None = None


@dataclass(frozen=True, slots=True)
class GradientStep:
    """What the gradient baseline asks of an engine: a step of AdamW on the cross-entropy of a batch. The answer is the loss
    before it and the gradient's norm; the weights are then moved."""

    batch: Batch
    lr: float
    weight_decay: float = 0.0


@dataclass(frozen=True, slots=True)
class PairRule:
    """From the mean cross-entropies of a ± pair to its update: (up − down) / spread is the slope; clipped to ±`clip` where
    that is positive and times `rate`, it is the coefficient. `keep` is a float32 value. A coefficient above `largest`, which the
    weights can hold, is not used: the step moves nothing."""

    spread: float
    rate: float
    clip: float
    keep: float
    largest: float = FLOAT32_MAX


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A step that a device can run by itself: score a ± pair of probes, compute the losses and update by the rule."""

    batch: Batch
    probes: tuple[Probe, ...]
    rule: PairRule


TensorKind = Literal["matrix", "embedding", "norm", "bias", "head", "lora_A", "lora_B", "prefix", "other"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor an engine could train, as `space` sees it: `layer` is its depth in the stack (-1: outside it)."""

    name: str
    shape: tuple[int, ...]
    kind: TensorKind
    layer: int = -1
    linear: bool = False
    """True when the tensor is the weight of a linear layer, so that LoRA can attach to it: (out, in)."""
    transposed: bool = False
    """True when that weight is stored as (in, out), as GPT-2 does."""


@dataclass(frozen=True, slots=True)
class TrainedTensor:
    """A tensor that is trained, and how its noise looks: rank 0 is dense, r > 0 is U·Vᵀ/√r with ±1 factors."""

    name: str
    shape: tuple[int, ...]
    kind: TensorKind
    rank: int = 0
    decay: bool = True


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What the journal keeps of a step. `losses` are per probe; a skipped step has no terms and says why. `notes` are the
    figures by which a method decided, and from which it rebuilds what it remembers."""

    step: int
    losses: tuple[float, ...]
    slopes: tuple[float, ...]
    update: Update
    lr: float
    skipped: str = ""
    notes: Mapping[str, float] = field(default_factory=dict)
