"""vLLM in process: probes are adapters of one call, whose slots are written from seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mezzo.engines.arrays import Array
from mezzo.engines.base import Continuations, Engine, EngineSpec
from mezzo.engines.liveness import check_alive
from mezzo.engines.lora_factors import LoraFactors
from mezzo.engines.microbatch import check_state, empty_scores
from mezzo.engines.token_rows import TokenCounts, TokenRow, token_rows, write_scores
from mezzo.engines.torch import catalog
from mezzo.engines.vllm import launch
from mezzo.engines.vllm.adapter_slots import AdapterSlots
from mezzo.engines.vllm.model_facts import read_model_facts
from mezzo.engines.vllm.support import installed_version, refuse_readout
from mezzo.errors import ModelError, RunFailed
from mezzo.types import Batch, Generation, MicroBatch, Probe, Readout, Scores, Update

# Probes of one call, each an adapter: a pair, or as many directions as share it.
ADAPTERS = 16


class VLLMEngine(Engine):
    """The driver of one `vllm.LLM`. The trained factors are here; vLLM's slots hold the probes of the current call."""

    pipeline = None

    def __init__(self, spec: EngineSpec) -> None:
        self.spec, self.space, self.facts = spec, spec.space, read_model_facts(spec)
        self.trained, self.base_digest = self.facts.trained, self.facts.base_digest
        self.micro_batch = MicroBatch(rows=spec.rows, members=ADAPTERS)
        self.token_counts = TokenCounts()
        tensors = (*self.facts.trained, *self.facts.frozen)
        self.llm = launch.start(spec, tensors, ADAPTERS)
        try:
            self.adapters = launch.load_zero_adapters(self.llm, spec, tensors, ADAPTERS)
            ((self.slots, device),) = self.llm.apply_model(self._find_slots)
            self.slots.refuse_missing(tensors)
            self.factors = LoraFactors(spec, self.facts.trained, self.facts.frozen, device)
            self._try_a_prompt()
        except BaseException:
            self.close()
            raise

    def _find_slots(self, model: Any) -> tuple[AdapterSlots, torch.device]:
        ids = [request.lora_int_id for request in self.adapters]
        return AdapterSlots(model.lora_manager, ids, self.space.scaling), next(model.parameters()).device

    def _try_a_prompt(self) -> None:
        """Raise ModelError where vLLM has started, but has no kernel for what the model computes."""
        try:
            self._request([Probe()], [(0, 0)], _scoring_parameters(Readout("words", words=(0,))))
        except Exception as error:
            raise ModelError(f"vLLM cannot run this model: {launch.first_line(error)}") from None
        self.token_counts = TokenCounts()

    def score(self, batch: Batch, probes: Sequence[Probe]) -> Scores:
        """scores[P, B, C]: as many probes as there are adapters are one call of vLLM, which batches them itself."""
        refuse_readout(batch.readout)
        rows, scores = token_rows(batch), empty_scores(batch, len(probes))
        sampling = _scoring_parameters(batch.readout)
        for first in range(0, len(probes), self.micro_batch.members):
            members = probes[first : first + self.micro_batch.members]
            answers = self._request(members, [row.ids for row in rows], sampling)
            for index, found in enumerate(answers):
                values = [_read_score(row, answer, batch.readout) for row, answer in zip(rows, found, strict=True)]
                write_scores(scores, first + index, rows, values)
        return scores

    def _request(self, probes: Sequence[Probe], prompts: Sequence[Sequence[int]], sampling: Any) -> list[list[Any]]:
        """vLLM's answers to the prompts at each probe. What it cached of the prompts before belongs to other weights."""
        if not self.llm.reset_prefix_cache():
            raise RunFailed("vLLM did not empty its prefix cache; the run can be resumed")
        self.slots.write(self.factors.at_probes(probes))
        answers = self.llm.generate(
            [{"prompt_token_ids": list(ids)} for _ in probes for ids in prompts],
            sampling,
            lora_request=[self.adapters[member] for member in range(len(probes)) for _ in prompts],
            use_tqdm=False,
        )
        for answer in answers:
            cached = answer.num_cached_tokens or 0
            self.token_counts += TokenCounts(cached, len(answer.prompt_token_ids) - cached)
        return [answers[start : start + len(prompts)] for start in range(0, len(answers), len(prompts))]

    def check(self, batch: Batch, eps: float) -> None:
        """Refuse a space whose perturbation changes no score."""
        check_alive(self, batch, eps)

    def apply(self, updates: Sequence[Update]) -> None:
        self.factors.apply(updates)

    def generate(self, batch: Batch, probes: Sequence[Probe], generation: Generation) -> Continuations:
        """Greedy continuations of the complete prompts."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=generation.max_new_tokens,
            temperature=0,
            detokenize=False,
            stop_token_ids=[*self.facts.end_tokens, *generation.stop_ids],
        )
        found: Continuations = []
        for first in range(0, len(probes), len(self.adapters)):
            members = probes[first : first + len(self.adapters)]
            answers = self._request(members, [prompt.ids for prompt in batch.prompts], sampling)
            found += [[[tuple(answer.outputs[0].token_ids)] for answer in each] for each in answers]
        return found

    def state(self) -> dict[str, Array]:
        return self.factors.arrays()

    def load_state(self, tensors: Mapping[str, Array]) -> None:
        check_state(self.trained, tensors)
        self.factors.load(tensors)

    def digest(self) -> str:
        population = self.factors.population
        return catalog.digest_of((name, population.value(name)) for name in population.trained)

    def describe(self) -> dict[str, Any]:
        return {
            "engine": "vllm",
            "vllm": installed_version(),
            "device": self.factors.population.source.device.type,
            "threads": torch.get_num_threads(),
            "dtype": self.spec.dtype,
            "parameters": self.facts.parameters,
            "trained_parameters": sum(int(np.prod(t.shape)) for t in self.trained),
            "cached_tokens": self.token_counts.cached,
            "computed_tokens": self.token_counts.computed,
        }

    def close(self) -> None:
        launch.stop(self.llm)


def _scoring_parameters(readout: Readout) -> Any:
    """A label word is read as the next token; candidates are part of the prompt, whose own tokens are read."""
    from vllm import SamplingParams

    words = readout.kind == "words"
    read = {"logprob_token_ids": list(readout.words)} if words else {"prompt_logprobs": 0}
    return SamplingParams(max_tokens=1, temperature=0, detokenize=False, **read)


def _read_score(row: TokenRow, answer: Any, readout: Readout) -> Any:
    """The log-probabilities of a row's label words, or one number for its candidate."""
    if readout.kind == "words":
        (by_token,) = answer.outputs[0].logprobs
        return [by_token[word].logprob for word in readout.words]
    start = row.logprob_start + 1
    tokens = zip(row.ids[start:], answer.prompt_logprobs[start:], strict=True)
    values = [by_token[token].logprob for token, by_token in tokens]
    return sum(values) / (len(values) if readout.reduce == "mean" else 1)
