"""Bodies of SGLang's `/generate` requests, and what their answers say: for servers, and for text generation in process."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mezzo.engines.base import Continuations
from mezzo.engines.draws import draw_key
from mezzo.engines.token_rows import TokenCounts, TokenRow, common_prefix, shared_prompts
from mezzo.types import Generation, Probe, Prompt, Readout

Answers = Sequence[Mapping[str, Any]]
# Beyond any log-probability, and within float32.
LARGEST_NUMBER = 1e30
# The logit processor that makes draws, as SGLang wants it: a pickle, here of a name alone, so that a client need not have SGLang.
SAMPLER = json.dumps({"callable": b"cmezzo.engines.sglang.sampler\nSampler\n.".hex()})


def scoring_body(rows: Sequence[TokenRow], adapters: Sequence[str | None], readout: Readout) -> dict[str, Any]:
    """The request that scores several rows, each under its adapter."""
    words = readout.kind == "words"
    body: dict[str, Any] = {
        "input_ids": [list(row.ids) for row in rows],
        # A label word is read as the next token; candidates are part of the prompt, so that nothing is generated.
        "sampling_params": {"max_new_tokens": 1 if words else 0, "temperature": 0},
        "return_logprob": True,
        **adapter_field(adapters),
    }
    if words:
        return body | {"token_ids_logprob": [list(readout.words)] * len(rows)}
    return body | {"logprob_start_len": [row.logprob_start for row in rows]}


def encoding_body(rows: Sequence[TokenRow], adapters: Sequence[str | None]) -> dict[str, Any]:
    """The request for the embeddings of several rows, each under its adapter."""
    return {"input_ids": [list(row.ids) for row in rows], **adapter_field(adapters)}


def prefix_bodies(rows: Sequence[TokenRow], adapters: Sequence[str | None]) -> list[dict[str, Any]]:
    """Requests to send first, one after the other, so that what the rows share is computed once under each adapter."""
    prefix = common_prefix(rows)
    waves = [[prefix] if prefix else [], shared_prompts(rows, len(prefix))]
    return [
        {
            "input_ids": [list(ids) for _ in adapters for ids in wave],
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            **adapter_field([adapter for adapter in adapters for _ in wave]),
        }
        for wave in waves
        if wave
    ]


def generation_rows(prompts: Sequence[Prompt], draws: int) -> list[TokenRow]:
    """The complete prompts as rows, so that what they share is found: their beginnings, and each prompt among its draws."""
    return [
        TokenRow(prompt.ids, index, logprob_start=len(prompt.ids) - 1)
        for index, prompt in enumerate(prompts)
        for _ in range(draws)
    ]


def generation_body(
    prompts: Sequence[Prompt], probes: Sequence[Probe], generation: Generation, adapters: Sequence[str | None]
) -> dict[str, Any]:
    """The request for continuations of the complete prompts, by probe, prompt and draw. Each probe has an adapter."""
    draws = range(generation.draws)
    sampling: dict[str, Any] = {"max_new_tokens": generation.max_new_tokens, "temperature": 0}
    sampling |= {"stop_token_ids": list(generation.stop_ids)} if generation.stop_ids else {}
    body: dict[str, Any] = {
        "input_ids": [list(prompt.ids) for _ in probes for prompt in prompts for _ in draws],
        "sampling_params": sampling,
        **adapter_field([adapter for adapter in adapters for _ in prompts for _ in draws]),
    }
    if not generation.temperature:
        return body
    said = {"count": generation.max_new_tokens, "temperature": generation.temperature, "top_p": generation.top_p}
    # The numbers themselves are made where they are used.
    keys = [draw_key(generation, probe, p.ids, draw) for probe in probes for p in prompts for draw in draws]
    params = [sampling | {"custom_params": said | {"seed": seed, "name": name}} for seed, name in keys]
    return body | {"sampling_params": params, "custom_logit_processor": SAMPLER}


def group_texts(texts: Sequence[tuple[int, ...]], prompts: int, draws: int) -> Continuations:
    """The answers to such a request, by probe, prompt and draw."""
    drawn = [list(texts[first : first + draws]) for first in range(0, len(texts), draws)]
    return [drawn[first : first + prompts] for first in range(0, len(drawn), prompts)]


def adapter_field(adapters: Sequence[str | None]) -> dict[str, list[str | None]]:
    """The adapter of each row. SGLang without LoRA does not accept this field, not even an empty one."""
    return {"lora_path": list(adapters)} if any(adapters) else {}


def parse_scores(rows: Sequence[TokenRow], answers: Answers, readout: Readout) -> list[Any]:
    """The log-probabilities of each row's label words, or one number for its candidate."""
    scores: list[Any] = []
    for row, answer in zip(rows, answers, strict=True):
        meta = answer["meta_info"]
        if readout.kind == "words":
            by_id = {int(token): value for value, token, *_ in meta["output_token_ids_logprobs"][0]}
            scores.append([_parse_number(by_id[word]) for word in readout.words])
        else:
            expected = row.ids[row.logprob_start + 1 :]
            found = meta["input_token_logprobs"][-len(expected) :]
            if [token for _, token, *_ in found] != list(expected):
                raise ValueError("log-probabilities of other tokens")
            values = [_parse_number(value) for value, *_ in found]
            scores.append(sum(values) / (len(values) if readout.reduce == "mean" else 1))
    return scores


def parse_embeddings(answers: Answers, size: int) -> list[list[float]]:
    """The embedding of each row, of `size` numbers."""
    embeddings = [[_parse_number(value) for value in answer["embedding"]] for answer in answers]
    if any(len(embedding) != size for embedding in embeddings):
        raise ValueError(f"an embedding of another size than {size}")
    return embeddings


def _parse_number(value: Any) -> float:
    """A log-probability. SGLang's JSON has null for one that is not a number."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > LARGEST_NUMBER:
        raise ValueError(f"{str(value)[:40]!r} is not a log-probability")
    return float(value)


def count_tokens(answers: Answers) -> TokenCounts:
    """Cached and computed tokens, by SGLang's own counters."""
    cached = sum(int(answer["meta_info"].get("cached_tokens", 0)) for answer in answers)  # an encoder has none
    return TokenCounts(cached, sum(int(answer["meta_info"]["prompt_tokens"]) for answer in answers) - cached)
