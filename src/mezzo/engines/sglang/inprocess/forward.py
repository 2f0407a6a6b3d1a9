"""A forward of SGLang's own model runner over many token rows at once, without a request for each.

The scheduler must be idle: its request and token pools are borrowed and returned empty. Shared prefixes go through its
RadixAttention tree under a key of their own probe, so that no key or value crosses probes; the tree is emptied before the
weights of the next probes are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mezzo.engines.sglang.internals.scheduler import Internals, ServedProbe, build_batch
from mezzo.engines.token_rows import TokenCounts, TokenRow, common_prefix, shared_prompts
from mezzo.errors import RunFailed
from mezzo.types import Readout

# Tokens of the cache that a forward needs for each of its own, what it shares with others included.
ROOM = 2
BUSY = "SGLang is busy with other requests; a training run needs the engine for itself"


class Forward:
    """Forwards with the borrowed parts of one scheduler."""

    def __init__(self, internals: Internals) -> None:
        self.internals, self.causal = internals, internals.causal
        self.token_counts = TokenCounts()
        self._prefix_cached = False

    def flush(self) -> None:
        """Empty the prefix cache and the pools."""
        self._prefix_cached = False
        if not self.internals.flush():
            raise RunFailed(BUSY)

    def refuse_other_requests(self) -> None:
        """Raise RunFailed if SGLang serves anybody else: its pools are about to be borrowed."""
        if not self.internals.is_idle():
            raise RunFailed(BUSY)

    def fit(self, every: Sequence[TokenRow], rows: int, members: int) -> tuple[int, int]:
        """As many of these rows and probes as one forward has room for. It follows from the rows, so that all workers agree."""
        most = self.internals.free_tokens() // (ROOM * max(len(row.ids) for row in every))
        members = max(1, min(members, most))
        return max(1, min(rows, most // members)), members

    def score(
        self, rows: Sequence[TokenRow], probes: Sequence[ServedProbe], readout: Readout, every: Sequence[TokenRow]
    ) -> Tensor:
        """[probes, rows, words], or [probes, rows] for candidates.

        `every` are the rows of the whole batch: what they all share is computed once and kept for its other forwards.
        """
        self._make_room(len(rows) * len(probes), sum(len(row.ids) for row in rows) * len(probes) * ROOM)
        if self.causal:
            self._cache_prefixes(rows, probes, every)
        if readout.kind == "candidates":
            scores = self._score_candidates(rows, probes, readout.reduce)
        else:
            scores = self._score_words(rows, probes, readout)
        return scores.view(len(probes), len(rows), *scores.shape[1:])

    def _score_words(self, rows: Sequence[TokenRow], probes: Sequence[ServedProbe], readout: Readout) -> Tensor:
        """[probes · rows, words]. The prefix of all rows is in the tree by now: one request per probe finds it for all."""
        reqs = [self.internals.request(rows[0].ids, -1, probe) for probe in probes]
        batch = build_batch(self.internals.scheduler, reqs, [row.ids for row in rows])
        self.token_counts += TokenCounts(sum(batch.prefix_lens), sum(batch.extend_lens))
        output = self._run(batch, tuple(row.position for row in rows) * len(probes), readout)
        # Free its memory while the device is still busy: what comes next in its queue may write there.
        self.internals.free(batch)
        if not self.causal:
            return output.float().cpu()
        scores = output.float().log_softmax(-1) if readout.vocabulary else output
        return scores[:, list(readout.words)].float().cpu()

    def _run(self, batch: Any, positions: tuple[int, ...], readout: Readout) -> Tensor:
        """Next-token logits of a causal model; label-word scores of an encoder, which leave SGLang as embeddings."""
        if self.causal:
            return self.internals.generate(batch)
        from mezzo.engines.sglang.models.encoder import MaskReadout

        model = self.internals.model
        model.mask_readout = MaskReadout(positions, readout.words, readout.vocabulary)
        try:
            return self.internals.embed(batch)
        finally:
            model.mask_readout = None

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
        if sequences > (most := self.internals.most_sequences()):
            raise RunFailed(f"SGLang takes {most} sequences at once, not {sequences}: use a smaller --micro-batch")
        free = self.internals.free_tokens
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
        output, cached = self.internals.extend(sequences, cache)
        for (ids, _, _), count in zip(sequences, cached, strict=True):
            self.token_counts += TokenCounts(count, len(ids) - count)
        return output
