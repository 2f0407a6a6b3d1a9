"""One forward of SGLang's own model runner over many sequences at once, without a request for each.

The scheduler must be idle: its request and token pools are borrowed and given back empty. Shared prefixes go through its
RadixAttention tree under a key of their own probe, so that no key or value crosses a probe; the tree is emptied before the
weights of the next probes are written.
"""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mezzo.engines.sglang.inprocess.batch_layout import give_back, laid_out
from mezzo.engines.sglang.rows import Row, common_prefix, shared_prompts
from mezzo.errors import RunFailed
from mezzo.types import Readout

BUSY = "SGLang is busy with requests of others; a training run needs the engine for itself"


@dataclass(frozen=True, slots=True)
class Member:
    """A probe as SGLang serves it: an adapter (None: the base weights) and its own corner of the prefix cache."""

    adapter: str | None
    key: str


@dataclass
class Count:
    """Tokens as SGLang counts them: taken from the prefix cache, and computed."""

    cached: int = 0
    computed: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.cached + other.cached, self.computed + other.computed)


class Forward:
    """Borrowed parts of one scheduler."""

    def __init__(self, scheduler: Any, share: bool = True) -> None:
        from sglang.srt.mem_cache.common import release_kv_cache
        from sglang.srt.sampling.sampling_params import SamplingParams

        self.scheduler = scheduler
        self.runner = scheduler.tp_worker.model_runner
        self.causal = bool(scheduler.is_generation)
        self.share = share
        self.count = Count()
        self._ready = 0
        self._number = 0
        self._nothing = SamplingParams(max_new_tokens=0, temperature=0)
        """What all sequences generate."""
        # The option is `checkpoint` in new versions and `is_insert` in old ones: whether the tree keeps the tokens.
        keep = "checkpoint" if "checkpoint" in inspect.signature(release_kv_cache).parameters else "is_insert"
        self._release: Any = lambda req, kept: release_kv_cache(req, scheduler.tree_cache, **{keep: kept})

    def flush(self) -> None:
        """Empty the prefix cache and the pools."""
        self._ready = 0
        if not self.scheduler.flush_cache(empty_cache=False):
            raise RunFailed(BUSY)

    def refuse_company(self) -> None:
        """Nobody else may be served while the pools are borrowed."""
        if not self.scheduler.is_fully_idle():
            raise RunFailed(BUSY)

    @torch.no_grad()
    def scores(self, rows: Sequence[Row], members: Sequence[Member], readout: Readout, every: Sequence[Row]) -> Tensor:
        """[members, rows, words], or [members, rows] for candidates, of one unit. `every` are the rows of the batch it
        belongs to: what they all share is computed once and kept for its other units."""
        self._make_room(len(rows) * len(members), sum(len(row.ids) for row in rows) * len(members) * 2)
        if self.causal and self.share:
            self._prepare(rows, members, every)
        if readout.kind == "candidates":
            found = self._candidates(rows, members, readout.reduce)
        else:
            found = self._at_once(rows, members, readout)
        return found.view(len(members), len(rows), *found.shape[1:])

    def _at_once(self, rows: Sequence[Row], members: Sequence[Member], readout: Readout) -> Tensor:
        """[members · rows, words]. What all rows share is in the tree by now, so that a member's first row finds it for all."""
        reqs = [self._request(rows[0].ids, -1, member) for member in members]
        batch = laid_out(self.scheduler, reqs, [row.ids for row in rows])
        self.count.cached += sum(batch.prefix_lens)
        self.count.computed += sum(batch.extend_lens)
        output = self._run(batch, tuple(row.position for row in rows) * len(members), readout)
        give_back(batch)  # while the device is still busy: what comes next in its queue may write there
        if not self.causal:
            return output.float().cpu()
        scores = output.float().log_softmax(-1) if readout.vocabulary else output
        return scores[:, list(readout.words)].float().cpu()

    def _run(self, batch: Any, positions: tuple[int, ...], readout: Readout) -> Tensor:
        """One forward: next-token logits, or of an encoder, whose scores leave SGLang as embeddings, those of its words."""
        if self.causal:
            output = self.scheduler.tp_worker.forward_batch_generation(batch, is_verify=True).logits_output
            return output.next_token_logits  # type: ignore[no-any-return]
        from mezzo.engines.sglang.models.roberta import Look

        self.runner.model.look = Look(positions, readout.words, readout.vocabulary)
        try:
            found = self.scheduler.tp_worker.forward_batch_embedding(batch)
        finally:
            self.runner.model.look = None
        output = found[0] if isinstance(found, tuple) else found
        return torch.as_tensor(output.embeddings if hasattr(output, "embeddings") else output)

    def _prepare(self, rows: Sequence[Row], members: Sequence[Member], every: Sequence[Row]) -> None:
        """Fill the tree: first what the whole batch shares, then the prompts of this unit's candidates."""
        prefix = common_prefix(every)
        if prefix and not self._ready:
            self._extend([(prefix, -1, m) for m in members], kept=True)
            self._ready = len(prefix)
        if prompts := shared_prompts(rows, len(prefix)):
            self._extend([(ids, -1, m) for m in members for ids in prompts], kept=True)

    def _make_room(self, sequences: int, tokens: int) -> None:
        """Allocating must never evict: a tree node that a sequence was just matched to would go."""
        if sequences > (most := self.scheduler.req_to_token_pool.size):
            raise RunFailed(f"SGLang takes {most} sequences at once, not {sequences}: use a smaller --micro-batch")
        free = self.scheduler.token_to_kv_pool_allocator.available_size
        if free() < tokens:
            self.flush()
        if free() < tokens:
            raise RunFailed(
                f"a unit of work needs up to {tokens} tokens of SGLang's cache, which holds {free()}: use a smaller --micro-batch"
            )

    def _candidates(self, rows: Sequence[Row], members: Sequence[Member], reduce: str) -> Tensor:
        """[members · rows]: the mean or sum of the log-probabilities of each candidate's tokens."""
        work = [(row.ids, row.start, member) for member in members for row in rows]
        output = self._extend(work, kept=False)
        counts = [len(ids) - start for ids, start, _ in work]  # each ends with an entry for the unknown next token
        pieces = torch.split(torch.as_tensor(output.input_token_logprobs).float().cpu(), counts)
        reduced = torch.Tensor.mean if reduce == "mean" else torch.Tensor.sum
        return torch.stack([reduced(piece[:-1]) for piece in pieces])

    def _extend(self, work: Sequence[tuple[tuple[int, ...], int, Member]], kept: bool) -> Any:
        """A forward of sequences that each find their own beginning in the tree and, if `kept`, stay there."""
        reqs = [self._request(ids, start, member) for ids, start, member in work]
        output = self.scheduler.tp_worker.forward_batch_generation(self._batch(reqs), is_verify=True).logits_output
        self._finished(reqs, kept)
        return output

    def _finished(self, reqs: Sequence[Any], kept: bool) -> None:
        """Give the sequences' memory back; SGLang has counted what it took from its cache."""
        allocator = self.scheduler.token_to_kv_pool_allocator
        allocator.free_group_begin()  # one operation for all of them
        for req in reqs:
            self.count.cached += req.cached_tokens
            self.count.computed += len(req.origin_input_ids) - req.cached_tokens
            self._release(req, kept)
        allocator.free_group_end()

    def _request(self, ids: tuple[int, ...], start: int, member: Member) -> Any:
        from sglang.srt.managers.schedule_batch import Req

        self._number += 1
        req = Req(
            rid=f"mezzo-{self._number}",
            origin_input_text="",
            origin_input_ids=array("q", ids),
            sampling_params=self._nothing,
            return_logprob=start >= 0,
            lora_id=member.adapter,
            extra_key=member.key,
            vocab_size=self.runner.model_config.vocab_size,
        )
        req.logprob_start_len = start
        req.init_next_round_input(self.scheduler.tree_cache)
        if hasattr(req, "set_extend_range"):  # up to 0.5.17
            req.set_extend_range(len(req.prefix_indices), len(ids))
        else:
            req.extend_end = len(ids)
        return req

    def _batch(self, reqs: list[Any]) -> Any:
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        scheduler = self.scheduler
        batch = ScheduleBatch.init_new(
            reqs,
            scheduler.req_to_token_pool,
            scheduler.token_to_kv_pool_allocator,
            scheduler.tree_cache,
            scheduler.model_config,
            False,
            scheduler.spec_algorithm,
        )
        batch.prepare_for_extend()
        if batch.input_ids is None:
            batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
            batch.prefill_input_ids_cpu = None
        return batch
