"""The part of the engine that runs inside each of SGLang's scheduler processes and answers the driver's calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mezzo.engines import token_rows as token_rows_module
from mezzo.engines.arrays import Array
from mezzo.engines.base import EngineSpec
from mezzo.engines.microbatch import empty_scores
from mezzo.engines.sglang.inprocess.forward import Forward
from mezzo.engines.sglang.inprocess.weights import WEIGHTS, WorkerWeights
from mezzo.engines.sglang.internals.scheduler import Internals, ServedProbe
from mezzo.engines.sglang.model_facts import ModelFacts
from mezzo.engines.sglang.tensor_parts import TensorPart
from mezzo.engines.token_rows import TokenCounts, token_rows, write_scores
from mezzo.errors import RunFailed
from mezzo.types import Batch, Probe, Scores, Update

# The methods that the driver may call.
CALLS = ("open", "score", "write_probes", "state", "load", "flush_cache", "resident_adapters", "set_min_shared_tokens")


class Worker:
    """One rank of the engine; lives as long as its scheduler. The driver calls its public methods."""

    def __init__(self, scheduler: Any) -> None:
        self.internals = Internals(scheduler)
        self.rank = self.internals.rank
        self.forward = Forward(self.internals)
        self.weights: WorkerWeights | None = None

    @torch.no_grad()
    def handle(self, method: str, values: Mapping[str, Any], updates: Sequence[Update]) -> Any:
        """Apply the pending updates, then call a method of this worker."""
        if updates:
            self._trained().apply(updates)
        if method not in CALLS:
            raise ValueError(f"{method!r} is not a call of mezzo")
        return getattr(self, method)(**values)

    def open(self, spec: EngineSpec, facts: ModelFacts, adapters: Sequence[str]) -> None:
        """Create the trained tensors. In a space that SGLang cannot train, there are none and the base model is scored."""
        if spec.space.kind in WEIGHTS:
            slots = self.internals.adapter_slots(adapters)
            slots.refuse_padding((*facts.trained, *facts.frozen))
            self.weights = WEIGHTS[spec.space.kind](spec, facts, self.internals.device, slots)

    def score(self, batch: Batch, probes: Sequence[Probe], rows: int, members: int) -> tuple[Scores, TokenCounts]:
        """scores[P, B, C] and the tokens they took; a forward has at most `rows` token rows at `members` probes."""
        every, scores = token_rows(batch, self.forward.causal), empty_scores(batch, len(probes))
        self.forward.token_counts = TokenCounts()
        rows, members = self.forward.fit(every, rows, members)
        try:
            for first in range(0, len(probes), members):
                if first:
                    self.forward.flush()  # the same slots are about to hold other probes
                served_probes = self._serve_probes(probes[first : first + members])
                for start in range(0, len(every), rows):
                    unit = every[start : start + rows]
                    values = self.forward.score(unit, served_probes, batch.readout, every).numpy()
                    for index in range(len(served_probes)):
                        write_scores(scores, first + index, unit, values[index])
        finally:
            self.forward.flush()  # a failed forward must not leave SGLang's pools half full either
        return scores, self.forward.token_counts

    def write_probes(self, probes: Sequence[Probe]) -> list[str | None]:
        """Write the probes into the adapter slots for SGLang's own requests; return the adapter id of each."""
        self.forward.flush()
        return self._write_probes(probes)

    def state(self) -> list[TensorPart]:
        return [] if self.weights is None else self.weights.state()

    def load(self, tensors: Mapping[str, Array]) -> None:
        self._trained().load(tensors)

    def resident_adapters(self) -> list[str]:
        """Names of the adapters in SGLang's pool."""
        return self._trained().slots.resident_names()

    def set_min_shared_tokens(self, count: int) -> None:
        """Compute the beginning that all prompts have in common only once from this many tokens on."""
        token_rows_module.MIN_SHARED_TOKENS = count

    def _trained(self) -> WorkerWeights:
        if self.weights is None:
            raise RunFailed("SGLang's processes hold no trained tensors")
        return self.weights

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False while requests are still running."""
        return self.internals.flush()

    def _write_probes(self, probes: Sequence[Probe]) -> list[str | None]:
        return [None for _ in probes] if self.weights is None else self.weights.write_probes(probes)

    def _serve_probes(self, probes: Sequence[Probe]) -> list[ServedProbe]:
        """Write the probes into the adapter slots, and give each a key of its own in the prefix cache."""
        self.forward.refuse_other_requests()
        return [ServedProbe(adapter, f"mezzo-{i}-") for i, adapter in enumerate(self._write_probes(probes))]
