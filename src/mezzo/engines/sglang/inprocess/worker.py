"""The part of the engine that runs inside each of SGLang's scheduler processes and answers the driver's calls."""

from __future__ import annotations

import cProfile
import io
import pstats
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mezzo.engines.sglang.inprocess.adapter_slots import AdapterSlots
from mezzo.engines.sglang.inprocess.forward import Forward, ServedProbe
from mezzo.engines.sglang.inprocess.weights import WEIGHTS, WorkerPlan, WorkerWeights
from mezzo.engines.sglang.tensor_parts import Array, TensorPart
from mezzo.engines.sglang.token_rows import TokenCounts, empty_scores, token_rows, write_scores
from mezzo.types import Batch, Probe, Scores, Update


class Worker:
    """One rank of the engine; lives as long as its scheduler. The driver calls the public methods by name."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.rank = int(scheduler.tp_group.rank_in_group)
        self.forward = Forward(scheduler)
        self.weights: WorkerWeights | None = None

    def handle(self, function: str, values: Mapping[str, Any], updates: Sequence[Update] = ()) -> Any:
        """Apply the pending updates, then call a method of this worker."""
        self._apply(updates)
        return getattr(self, function)(**values)

    def open(self, plan: WorkerPlan) -> None:
        """Create the trained tensors. In a space that SGLang cannot train, there are none and the base model is scored."""
        runner = self.scheduler.tp_worker.model_runner
        if plan.space in WEIGHTS:
            slots = AdapterSlots(runner.lora_manager, plan.adapters)
            self.weights = WEIGHTS[plan.space](plan, slots, torch.device(runner.device))

    @torch.no_grad()
    def score(
        self, batch: Batch, probes: Sequence[Probe], rows: int, members: int, share_prefixes: bool = True
    ) -> tuple[Scores, TokenCounts]:
        """scores[P, B, C] and the tokens they took; a forward has `rows` token rows at `members` probes."""
        every, scores = token_rows(batch, self.forward.causal), empty_scores(batch, len(probes))
        self.forward.share_prefixes, self.forward.token_counts = share_prefixes, TokenCounts()
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

    def score_base(self, batch: Batch, rows: int) -> Scores:
        """The scores of the base model under no adapter, to measure what a bare scoring call costs."""
        weights, self.weights = self.weights, None
        try:
            return self.score(batch, (Probe(),), rows, 1)[0]
        finally:
            self.weights = weights

    def profile(self, function: str, values: Mapping[str, Any], kernels: bool = False) -> str:
        """A profile of another function: of the host, or of the device's kernels."""
        if kernels:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as device_profile:
                self.handle(function, values)
            return str(device_profile.key_averages().table(sort_by="cuda_time_total", row_limit=40))
        profile, text = cProfile.Profile(), io.StringIO()
        profile.runcall(self.handle, function, values)
        for order in ("cumtime", "tottime"):
            pstats.Stats(profile, stream=text).sort_stats(order).print_stats(80)
        return text.getvalue()

    def resident_adapters(self) -> list[str]:
        """Names of the adapters in SGLang's pool."""
        manager = self.scheduler.tp_worker.model_runner.lora_manager
        return [manager.lora_refs[uid].lora_name for uid in manager.memory_pool.uid_to_buffer_id if uid is not None]

    def write_probes(self, probes: Sequence[Probe]) -> list[str | None]:
        """Write the probes into the adapter slots for SGLang's own requests; return the adapter id of each."""
        self.forward.flush()
        return self._write_probes(probes)

    def state(self) -> list[TensorPart]:
        return [] if self.weights is None else self.weights.state()

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Array]) -> None:
        assert self.weights is not None
        self.weights.load(tensors)

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False while requests are still running."""
        return bool(self.scheduler.flush_cache(empty_cache=False))

    @torch.no_grad()
    def _apply(self, updates: Sequence[Update]) -> None:
        for update in updates:
            if not update.empty:
                assert self.weights is not None
                self.weights.apply(update)

    def _write_probes(self, probes: Sequence[Probe]) -> list[str | None]:
        return [None for _ in probes] if self.weights is None else self.weights.write_probes(probes)

    def _serve_probes(self, probes: Sequence[Probe]) -> list[ServedProbe]:
        """Write the probes into the adapter slots, and give each a key of its own in the prefix cache."""
        self.forward.refuse_other_requests()
        return [ServedProbe(adapter, f"mezzo-{i}-") for i, adapter in enumerate(self._write_probes(probes))]
