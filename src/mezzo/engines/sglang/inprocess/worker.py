"""What runs inside each of SGLang's scheduler processes: the answers to the engine's calls."""

from __future__ import annotations

import cProfile
import io
import pstats
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mezzo.engines.sglang.inprocess.adapter_slots import Slots
from mezzo.engines.sglang.inprocess.forward import Count, Forward, Member
from mezzo.engines.sglang.inprocess.weights import WEIGHTS, Plan, Weights
from mezzo.engines.sglang.matrices import Array, Piece
from mezzo.engines.sglang.rows import rows_of
from mezzo.engines.sglang.server.requests import empty_scores, put
from mezzo.types import Batch, Probe, Scores, Update


class Worker:
    """One rank's share of the engine; lives as long as its scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.rank = int(scheduler.tp_group.rank_in_group)
        self.forward = Forward(scheduler)
        self.weights: Weights | None = None

    def work(self, function: str, values: Mapping[str, Any], ahead: Sequence[Update] = ()) -> Any:
        """Apply the updates that came along, then answer."""
        self._apply(ahead)
        return _FUNCTIONS[function](self, **values)

    def open(self, plan: Plan) -> None:
        """Make the trained tensors. Without a plan's kind, the base model is only scored."""
        runner = self.scheduler.tp_worker.model_runner
        if plan.kind in WEIGHTS:
            slots = Slots(runner.lora_manager, plan.adapters)
            self.weights = WEIGHTS[plan.kind](plan, slots, torch.device(runner.device))

    @torch.no_grad()
    def score(
        self, batch: Batch, probes: Sequence[Probe], rows: int, members: int, share: bool = True
    ) -> tuple[Scores, Count]:
        """scores[P, B, C], and the tokens it took; `rows` examples at `members` probes in one forward."""
        every, out = rows_of(batch, self.forward.causal), empty_scores(batch, len(probes))
        self.forward.share, self.forward.count = share, Count()
        try:
            for first in range(0, len(probes), members):
                if first:
                    self.forward.flush()  # the same slots are about to hold other probes
                chunk = self._placed(probes[first : first + members])
                for start in range(0, len(every), rows):
                    unit = every[start : start + rows]
                    scores = self.forward.scores(unit, chunk, batch.readout, every).numpy()
                    for index in range(len(chunk)):
                        put(out, first + index, unit, scores[index])
        finally:
            self.forward.flush()  # a failed forward must not leave SGLang's pools half full either
        return out, self.forward.count

    def score_base(self, batch: Batch, rows: int) -> Scores:
        """The model as it came, under no adapter: what a bare scoring call costs."""
        held, self.weights = self.weights, None
        try:
            return self.score(batch, (Probe(),), rows, 1)[0]
        finally:
            self.weights = held

    def profile(self, work: str, values: Mapping[str, Any], kernels: bool = False) -> str:
        """Where the time of another function goes: on the host, or in the device's kernels."""
        if kernels:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
                self.work(work, values)
            return str(found.key_averages().table(sort_by="cuda_time_total", row_limit=40))
        profile, text = cProfile.Profile(), io.StringIO()
        profile.runcall(self.work, work, values)
        for order in ("cumtime", "tottime"):
            pstats.Stats(profile, stream=text).sort_stats(order).print_stats(80)
        return text.getvalue()

    def residents(self) -> list[str]:
        """Names of the adapters in SGLang's pool."""
        manager = self.scheduler.tp_worker.model_runner.lora_manager
        return [manager.lora_refs[uid].lora_name for uid in manager.memory_pool.uid_to_buffer_id if uid is not None]

    def place(self, probes: Sequence[Probe]) -> list[str | None]:
        """Write the probes into the adapter slots, for requests to use."""
        self.forward.flush()
        return [None for _ in probes] if self.weights is None else self.weights.place(probes)

    @torch.no_grad()
    def _apply(self, updates: Sequence[Update]) -> None:
        for update in updates:
            if not update.empty:
                assert self.weights is not None
                self.weights.apply(update)

    def state(self) -> list[Piece]:
        return [] if self.weights is None else self.weights.state()

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Array]) -> None:
        assert self.weights is not None
        self.weights.load(tensors)

    def idle(self) -> bool:
        return bool(self.scheduler.flush_cache(empty_cache=False))

    def _placed(self, probes: Sequence[Probe]) -> list[Member]:
        """Write the probes into the adapter slots, each with a key of its own in a prefix cache that holds nothing of ours."""
        self.forward.refuse_company()
        adapters = [None for _ in probes] if self.weights is None else self.weights.place(probes)
        return [Member(adapter, f"mezzo-{index}-") for index, adapter in enumerate(adapters)]


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "open": Worker.open,
    "score": Worker.score,
    "place": Worker.place,
    "state": Worker.state,
    "load": Worker.load,
    "idle": Worker.idle,
    "residents": Worker.residents,
    "score_base": Worker.score_base,
    "profile": Worker.profile,
}
