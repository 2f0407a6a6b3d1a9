"""What every engine promises: scores at probes, updates in place, and the trained tensors' state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from mezzo.method.noise import Kind
from mezzo.method.space import Space
from mezzo.types import (
    Batch,
    DeviceStep,
    Family,
    Generation,
    GradientStep,
    MicroBatch,
    Probe,
    Prompt,
    Question,
    Scores,
    TrainedTensor,
    Update,
)

# Token ids by probe, example and draw.
Continuations: TypeAlias = list[list[list[tuple[int, ...]]]]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """All that an engine needs to start, as values: the same request goes to any engine, here or on a worker."""

    model: str
    family: Family
    space: Space
    rows: int
    fewer_rows: bool = False
    """The engine may lower `rows` where short micro-batches, which pad less, are faster."""
    many_probes: bool = False
    """Questions have many probes: the engine may take more of them, and fewer rows, in one forward."""
    population: int = 0
    """Probes of a step at which texts are generated, token by token: as many as possible share a forward."""
    draws_texts: bool = False
    """Texts are drawn, not greedy."""
    classes: int = 0
    noise_kind: Kind = "rademacher"
    seed: int = 0
    pad_id: int = 0
    cache_mb: float = 0
    """Memory for what frozen layers below the first trained one make of each example."""
    prefix_ids: tuple[int, ...] = ()
    """A text of as many tokens as a prefix has, whose activations it starts from."""
    device: str = "auto"
    dtype: str = "float32"
    threads: int | None = None
    remote_code: bool = False
    offload: bool = False
    """Keep the frozen layers in host memory and copy each to the device when it runs."""
    gradients: bool = False
    """The engine will be asked for gradients, so that every operation of its forward must have one."""
    quantize: str | None = None
    """Keep the frozen base in `8bit` or `4bit`."""
    tp: int = 1
    urls: tuple[str, ...] = ()
    exclusive_server: bool = False
    """The servers have no other clients, so that their own weights may be changed."""
    server_timeout: float = 600.0
    """Seconds to wait for a server when none answers."""


class Engine(Protocol):
    """Answers one question: the scores of each example's candidates, at each probe."""

    micro_batch: MicroBatch
    trained: tuple[TrainedTensor, ...]
    base_digest: str

    @property
    def pipeline(self) -> StepPipeline | None:
        """The fast path, where the engine has one."""

    def score(self, batch: Batch, probes: Sequence[Probe]) -> Scores:
        """scores[P, B, C] at each probe; leaves no trace in the weights."""

    def check(self, batch: Batch, eps: float) -> None:
        """Before step 1: raise ModelError or SpaceError where training could not be right."""

    def apply(self, updates: Sequence[Update]) -> None:
        """Move the weights, one update after the other."""

    def generate(self, batch: Batch, probes: Sequence[Probe], generation: Generation) -> Continuations:
        """Continuations of each prompt at each probe, up to an end token."""

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        """A copy of the trained tensors."""

    def load_state(self, tensors: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Put the trained tensors where a snapshot had them."""

    def digest(self) -> str:
        """SHA-256 of the trained tensors' names, shapes and bits."""

    def describe(self) -> dict[str, Any]:
        """What the run folder should remember of the engine: device, versions, parameters."""

    def close(self) -> None: ...


class ExportableEngine(Protocol):
    """What an export needs of an engine."""

    space: Space

    def adapter_tensors(self) -> dict[str, npt.NDArray[np.generic]]:
        """The trained tensors, and the frozen one of every pair of which only one is trained."""
        ...

    def module_tensors(self, path: str) -> dict[str, npt.NDArray[np.generic]]:
        """All tensors of the model's module at a path, trained or not."""
        ...

    @property
    def stores_transposed(self) -> bool:
        """True where weights of linear layers are stored as (in, out)."""
        ...

    def merged_model(self) -> Any:
        """A plain Hugging Face model with what was trained in its weights."""
        ...


@runtime_checkable
class GradientEngine(Protocol):
    """What an engine has besides, where it can compute gradients."""

    def descend(self, step: GradientStep) -> tuple[float, float]:
        """Move the weights by a step of AdamW, whose moments the engine keeps; the loss before it, and the gradient's norm."""


@runtime_checkable
class FeatureEngine(Protocol):
    """What an engine has besides, where it can show the hidden states that the LM head reads."""

    def features(self, prompts: Sequence[Prompt]) -> npt.NDArray[np.float32]:
        """[B, width]: what the last layer of the LM head reads at each prompt's position."""


@runtime_checkable
class ResettableEngine(Protocol):
    """What an engine has besides, where starting it again would take long."""

    def reset(self) -> bool:
        """Put the trained tensors back to the base model; False where they are then not what they should be."""


@runtime_checkable
class ReportingEngine(Protocol):
    """What an engine has besides, where servers that it uses may be lost and come back."""

    report: Callable[[str], None]


@runtime_checkable
class Workers(Protocol):
    """What an engine made of workers does besides: it replays instead of loading weights, and keeps statistics."""

    def attach_run(
        self, snapshot_folder: str, report: Callable[[str], None], requested_count: Callable[[], int | None]
    ) -> None:
        """Connect the engine to a run: its snapshots, where to report lost workers, and how many workers it asks for."""

    def replay_journal(self, updates: Sequence[Update], marks: Mapping[int, str], snapshot_folder: str | None) -> None:
        """Move every worker to where these updates lead from the base model."""

    def step_stats(self) -> dict[str, Any]:
        """Metrics of the last step: bytes transferred, and the share of time that workers waited."""

    def run_stats(self) -> dict[str, Any]:
        """The same for the whole run, and how many workers were lost or rebuilt."""


class StepPipeline(Protocol):
    """The fast path of an engine whose device works while the host prepares what comes next."""

    def run(
        self, step: DeviceStep, following: Callable[[], DeviceStep | None] | None
    ) -> npt.NDArray[np.float64] | None:
        """Run a step on the device and return the losses of its pair; the weights are then moved. `following` gives the
        next step, which may have been started when this returns. None: the device cannot run this step; score it instead.

        The caller computes the update from these losses, records it and passes it to `apply`, which then moves nothing but
        checks that it equals the device's own update.
        """

    def prefetch(self, question: Callable[[], Question]) -> None:
        """Announce the question after the next one: it is prepared while the device is busy."""
