"""A forward of SGLang's own model runner over many token rows at once, without a request for each.

The scheduler must be idle: its request and token pools are borrowed and returned empty. Shared prefixes go through its
RadixAttention tree under a key of their own probe, so that no key or value crosses probes; the tree is emptied before the
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

from mezzo.engines.sglang.inprocess.batch_layout import build_batch
from mezzo.engines.token_rows import TokenCounts, TokenRow, common_prefix, shared_prompts
from mezzo.errors import RunFailed
from mezzo.types import Readout

BUSY = "SGLang is busy with other requests; a training run needs the engine for itself"


@dataclass(frozen=True, slots=True)
class ServedProbe:
    """A probe as SGLang serves it: an adapter (None: the base weights) and a key in the prefix cache."""

    adapter: str | None
    cache_key: str


class Forward:
    """Forwards with the borrowed parts of one scheduler."""

    def __init__(self, scheduler: Any) -> None:
        from sglang.srt.mem_cache.common import release_kv_cache
        from sglang.srt.sampling.sampling_params import SamplingParams

        self.scheduler = scheduler
        self.runner = scheduler.tp_worker.model_runner
        self.causal = bool(scheduler.is_generation)
        self.token_counts = TokenCounts()
        self._prefix_cached = False
        self._requests = 0
        self._generate_nothing = SamplingParams(max_new_tokens=0, temperature=0)
        # The option is `checkpoint` in new versions and `is_insert` in old ones: whether the tree keeps the tokens.
        keep = "checkpoint" if "checkpoint" in inspect.signature(release_kv_cache).parameters else "is_insert"
        self._release: Any = lambda req, cache: release_kv_cache(req, scheduler.tree_cache, **{keep: cache})

    def flush(self) -> None:
        """Empty the prefix cache and the pools."""
        self._prefix_cached = False
        if not self.scheduler.flush_cache(empty_cache=False):
            raise RunFailed(BUSY)

    def refuse_other_requests(self) -> None:
        """Raise RunFailed if SGLang serves anybody else: its pools are about to be borrowed."""
        if not self.scheduler.is_fully_idle():
            raise RunFailed(BUSY)

    def score(
        self, rows: Sequence[TokenRow], probes: Sequence[ServedProbe], readout: Readout, every: Sequence[TokenRow]
    ) -> Tensor:
        """[probes, rows, words], or [probes, rows] for candidates.

        `every` are the rows of the whole batch: what they all share is computed once and kept for its other forwards.
        """
        self._make_room(len(rows) * len(probes), sum(len(row.ids) for row in rows) * len(probes) * 2)
        if self.causal:
            self._cache_prefixes(rows, probes, every)
        if readout.kind == "candidates":
            scores = self._score_candidates(rows, probes, readout.reduce)
        else:
            scores = self._score_words(rows, probes, readout)
        return scores.view(len(probes), len(rows), *scores.shape[1:])

    def _score_words(self, rows: Sequence[TokenRow], probes: Sequence[ServedProbe], readout: Readout) -> Tensor:
        """[probes · rows, words]. The prefix of all rows is in the tree by now: one request per probe finds it for all."""
        reqs = [self._request(rows[0].ids, -1, probe) for probe in probes]
        batch = build_batch(self.scheduler, reqs, [row.ids for row in rows])
        self.token_counts += TokenCounts(sum(batch.prefix_lens), sum(batch.extend_lens))
        output = self._run(batch, tuple(row.position for row in rows) * len(probes), readout)
        # Free its memory while the device is still busy: what comes next in its queue may write there.
        batch.token_to_kv_pool_allocator.free(batch.out_cache_loc)
        if not self.causal:
            return output.float().cpu()
        scores = output.float().log_softmax(-1) if readout.vocabulary else output
        return scores[:, list(readout.words)].float().cpu()

    def _run(self, batch: Any, positions: tuple[int, ...], readout: Readout) -> Tensor:
        """Next-token logits of a causal model; label-word scores of an encoder, which leave SGLang as embeddings."""
        if self.causal:
            output = self.scheduler.tp_worker.forward_batch_generation(batch, is_verify=True).logits_output
            return output.next_token_logits
        from mezzo.engines.sglang.models.roberta import MaskReadout

        self.runner.model.mask_readout = MaskReadout(positions, readout.words, readout.vocabulary)
        try:
            result = self.scheduler.tp_worker.forward_batch_embedding(batch)
        finally:
            self.runner.model.mask_readout = None
        output = result[0] if isinstance(result, tuple) else result
        return torch.as_tensor(output.embeddings if hasattr(output, "embeddings") else output)

    def _cache_prefixes(
        self, rows: Sequence[TokenRow], probes: Sequence[ServedProbe], every: Sequence[TokenRow]
    ) -> None:
        """Fill the tree: first with what the whole batch shares, then with the prompts of these rows' candidates."""
        prefix = common_prefix(every)
        if prefix and not self._prefix_cached:
            self._extend([(prefix, -1, probe) for probe in probes], cache=True)
            self._prefix_cached = True
        if prompts := shared_prompts(rows, len(prefix)):
            self._extend([(ids, -1, probe) for probe in probes for ids in prompts], cache=True)

    def _make_room(self, sequences: int, tokens: int) -> None:
        """Free memory in advance: an allocation must never evict a tree node that a row was just matched to."""
        if sequences > (most := self.scheduler.req_to_token_pool.size):
            raise RunFailed(f"SGLang takes {most} sequences at once, not {sequences}: use a smaller --micro-batch")
        free = self.scheduler.token_to_kv_pool_allocator.available_size
        if free() < tokens:
            self.flush()
        if free() < tokens:
            raise RunFailed(
                f"one forward needs up to {tokens} tokens of SGLang's cache, which holds {free()}: use a smaller --micro-batch"
            )

    def _score_candidates(self, rows: Sequence[TokenRow], probes: Sequence[ServedProbe], reduce: str) -> Tensor:
        """[probes · rows]: the mean or sum of the log-probabilities of each candidate's tokens."""
        sequences = [(row.ids, row.logprob_start, probe) for probe in probes for row in rows]
        output = self._extend(sequences, cache=False)
        counts = [len(ids) - start for ids, start, _ in sequences]  # each ends with an entry for the unknown next token
        logprobs = torch.split(torch.as_tensor(output.input_token_logprobs).float().cpu(), counts)
        reduction = torch.Tensor.mean if reduce == "mean" else torch.Tensor.sum
        return torch.stack([reduction(values[:-1]) for values in logprobs])

    def _extend(self, sequences: Sequence[tuple[tuple[int, ...], int, ServedProbe]], cache: bool) -> Any:
        """A forward of (tokens, logprob_start, probe), each matched against the tree and, with `cache`, kept in it."""
        reqs = [self._request(ids, start, probe) for ids, start, probe in sequences]
        output = self.scheduler.tp_worker.forward_batch_generation(self._batch(reqs), is_verify=True).logits_output
        allocator = self.scheduler.token_to_kv_pool_allocator
        allocator.free_group_begin()  # one operation for all of them
        for req in reqs:
            self.token_counts += TokenCounts(req.cached_tokens, len(req.origin_input_ids) - req.cached_tokens)
            self._release(req, cache)
        allocator.free_group_end()
        return output

    def _request(self, ids: tuple[int, ...], logprob_start: int, probe: ServedProbe) -> Any:
        from sglang.srt.managers.schedule_batch import Req

        self._requests += 1
        req = Req(
            rid=f"mezzo-{self._requests}",
            origin_input_text="",
            origin_input_ids=array("q", ids),
            sampling_params=self._generate_nothing,
            return_logprob=logprob_start >= 0,
            lora_id=probe.adapter,
            extra_key=probe.cache_key,
            vocab_size=self.runner.model_config.vocab_size,
        )
        req.logprob_start_len = logprob_start
        req.init_next_round_input(self.scheduler.tree_cache)
        if hasattr(req, "set_extend_range"):  # up to 0.5.17
            req.set_extend_range(len(req.prefix_indices), len(ids))
        else:
            req.extend_end = len(ids)
        return req

    def _batch(self, reqs: list[Any]) -> Any:
        """SGLang's own way to a batch."""
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
