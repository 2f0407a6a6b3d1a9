"""Scores of token rows by a server: the log-probabilities of a causal model, or what a masked one has at its mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mezzo.engines.sglang.model_facts import SAMPLE_TOKENS, MaskDecoder, ModelFacts, sample_tokens
from mezzo.engines.sglang.requests import (
    count_tokens,
    encoding_body,
    parse_embeddings,
    parse_scores,
    prefix_bodies,
    scoring_body,
)
from mezzo.engines.sglang.server.replica import Replica
from mezzo.engines.token_rows import TokenCounts, TokenRow
from mezzo.errors import ModelError
from mezzo.types import Readout

# How far a server's log-probabilities may differ from the checkpoint's.
LOGPROB_TOLERANCE, LOGPROB_TOLERANCE_16_BIT = 1e-3, 0.2


def score_rows(
    replica: Replica,
    rows: Sequence[TokenRow],
    adapters: Sequence[str | None],
    readout: Readout,
    decoder: MaskDecoder | None,
) -> tuple[list[Any], TokenCounts]:
    """The values of all rows under the first adapter, then under the second."""
    every, names = [row for _ in adapters for row in rows], [adapter for adapter in adapters for _ in rows]
    if decoder is not None:
        _refuse_other_positions(rows, decoder.mask_token)
        size = decoder.weight.shape[1]
        vectors, count = replica.encode(
            encoding_body(every, names), lambda found: (parse_embeddings(found, size), count_tokens(found))
        )
        return decoder.scores(vectors, readout), count
    counts = [replica.generate(body, count_tokens) for body in prefix_bodies(rows, adapters)]
    body = scoring_body(every, names, readout)
    scores, count = replica.generate(body, lambda found: (parse_scores(every, found, readout), count_tokens(found)))
    return scores, sum(counts, count)


def _refuse_other_positions(rows: Sequence[TokenRow], mask_token: int) -> None:
    """Raise ModelError unless each row is read at its first mask: a server reads nowhere else."""
    if any(mask_token not in row.ids or row.ids.index(mask_token) != row.position for row in rows):
        raise ModelError(
            "a server reads a masked model at the first mask of a prompt: leave out --url for other places"
        )


def score_tolerance(replica: Replica) -> float:
    """How far a server's log-probabilities may differ from others of the same weights."""
    return LOGPROB_TOLERANCE if replica.info.dtype == "float32" else LOGPROB_TOLERANCE_16_BIT


def refuse_other_model(replica: Replica, facts: ModelFacts) -> None:
    """Raise ModelError if the server holds other weights than the checkpoint."""
    logprobs = sample_logprobs(replica, None, facts.decoder)
    if not all(abs(a - b) <= score_tolerance(replica) for a, b in zip(logprobs, facts.sample_logprobs, strict=True)):
        raise ModelError(
            f"the server at {replica.url} serves another model than the run's ({replica.info.model_path}); start it "
            f"with: {replica.command}"
        )


def sample_logprobs(replica: Replica, adapter: str | None, decoder: MaskDecoder | None) -> list[float]:
    """Log-probabilities of SAMPLE_TOKENS that the checkpoint's are compared with."""
    prompt, readout = sample_tokens(decoder), Readout("words", words=SAMPLE_TOKENS, vocabulary=True)
    rows = [TokenRow(prompt, example=0, position=len(prompt) - 1)]
    (found,), _ = score_rows(replica, rows, [adapter], readout, decoder)
    return [float(each) for each in found]
