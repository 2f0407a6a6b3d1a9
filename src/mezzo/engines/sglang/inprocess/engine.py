"""SGLang in process: probes are adapters of one batch, and a whole batch is one call into the workers."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from mezzo.engines.arrays import Array
from mezzo.engines.base import Continuations, EngineSpec
from mezzo.engines.microbatch import empty_scores
from mezzo.engines.registry import refuse_space
from mezzo.engines.sglang.adapters import adapter_count
from mezzo.engines.sglang.base import SGLangEngine
from mezzo.engines.sglang.inprocess import launch
from mezzo.engines.sglang.inprocess.channel import Channel
from mezzo.engines.sglang.inprocess.public_weights import PUBLIC_WEIGHTS, PublicLora, PublicMatrices, UploadedProbes
from mezzo.engines.sglang.model_facts import SAMPLE_TOKENS
from mezzo.engines.sglang.requests import (
    adapter_field,
    count_tokens,
    generation_body,
    generation_rows,
    group_texts,
    parse_scores,
    prefix_bodies,
    scoring_body,
)
from mezzo.engines.sglang.tensor_parts import assemble_tensors
from mezzo.engines.sglang.versions import installed_version
from mezzo.engines.token_rows import MIN_SHARED_TOKENS, token_rows, write_scores
from mezzo.errors import ConfigError, ModelError, RunFailed
from mezzo.types import Batch, Generation, Probe, Prompt, Readout, Scores, Update

# How far two ways to the same score may differ.
SAME_SCORES = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.2}


class InProcessEngine(SGLangEngine):
    """The driver of one `sglang.Engine`, whose workers hold the weights."""

    def __init__(self, spec: EngineSpec) -> None:
        _refuse_dtype(spec)
        super().__init__(spec)
        self.adapters = tuple(f"mezzo-{index}" for index in range(adapter_count(spec)))
        self.engine, self.processes = launch.start(spec, self.adapter_shape)
        self.channel = Channel(self.engine.collective_rpc, spec.tp)
        try:
            if self.adapter_shape is not None:
                launch.load_zero_adapters(self.engine, self.adapter_shape, self.facts, self.adapters)
            launch.install_sigquit_handler()
            self.uses_internals = self._check_internals()
            # An encoder has no request that returns label-word scores.
            self.builds_batches = self.uses_internals and (spec.family == "masked" or self._check_built_batches())
        except BaseException:
            self.close()
            raise

    def score(self, batch: Batch, probes: Sequence[Probe]) -> Scores:
        """scores[P, B, C], by one call into the workers where this version of SGLang allows it."""
        return (self._score_in_one_call if self.builds_batches else self.score_by_requests)(batch, probes)

    def score_by_requests(self, batch: Batch, probes: Sequence[Probe]) -> Scores:
        """The same by SGLang's own requests, one for each token row: slower, and without its internals."""
        rows, scores = token_rows(batch), empty_scores(batch, len(probes))
        body = scoring_body(rows, [None] * len(rows), batch.readout)
        for index, probe in enumerate(probes):
            answers = self.request_at([probe], body)
            self.token_counts += count_tokens(answers)
            write_scores(scores, index, rows, parse_scores(rows, answers, batch.readout))
        return scores

    def _check_internals(self) -> bool:
        """Whether SGLang's processes take the trained tensors, and a probe that they write scores like an uploaded adapter."""
        self.uses_internals = True
        self.__dict__.pop("public_weights", None)  # those of an earlier check
        try:
            self.channel.call("open", spec=self.spec, facts=self.facts, adapters=self.adapters)
            problem = self._difference_of_slots() if self.adapter_shape is not None else ""
        except launch.WorkerDied:
            raise
        except RunFailed as error:
            problem = (str(error).splitlines() or [""])[0]
        if problem and self.spec.family == "masked":
            raise ModelError(f"SGLang {installed_version()} is not as mezzo knows it ({problem}): use --engine torch")
        if problem:
            version, how = installed_version(), "using its public interface, which is slower"
            print(f"SGLang {version} is not as mezzo knows it ({problem}): {how}", file=sys.stderr)
        return not problem

    def _difference_of_slots(self) -> str:
        """What is wrong with the tensors in SGLang's processes, or with the adapters that they write; empty if nothing is."""
        if self.digest() != self.facts.initial_digest:
            return "its copy of the trained tensors differs from the checkpoint's"
        if self.spec.family == "masked":
            return ""
        probe, counts, batch = Probe(((0, 0.01),)), self.token_counts, _sample_batches()[0]
        base, written = (self.score_by_requests(batch, [each]) for each in (Probe(), probe))
        self.uses_internals = False
        uploaded = self.score_by_requests(batch, [probe])
        self.uses_internals, self.token_counts = True, counts
        self.uploads.unload()
        del self.public_weights
        difference, effect = np.abs(written - uploaded).max(), np.abs(uploaded - base).max()
        return "" if difference <= 0.1 * effect else f"adapters that are written in place differ by {difference:.2g}"

    def _check_built_batches(self) -> bool:
        """Whether batches that mezzo builds score like SGLang's own requests; how they are built depends on its internals."""
        counts, tolerance = self.token_counts, SAME_SCORES[self.spec.dtype]
        try:
            differences = [
                float(
                    np.abs(self._score_in_one_call(batch, [Probe()]) - self.score_by_requests(batch, [Probe()])).max()
                )
                for batch in _sample_batches()
            ]
            problem = "" if max(differences) < tolerance else f"scores differ by {max(differences):.2g}"
        except launch.WorkerDied:
            raise
        except RunFailed as error:
            problem = (str(error).splitlines() or [""])[0]
        self.token_counts = counts
        if problem:
            version = installed_version()
            print(f"SGLang {version} does not take mezzo's batches ({problem}): using its requests", file=sys.stderr)
        return not problem

    def _score_in_one_call(self, batch: Batch, probes: Sequence[Probe]) -> Scores:
        scores, token_counts = self.channel.call(
            "score",
            batch=batch,
            probes=tuple(probes),
            rows=self.micro_batch.rows,
            members=min(self.micro_batch.members, len(self.adapters)),
        )
        self.token_counts += token_counts
        return scores

    def apply(self, updates: Sequence[Update]) -> None:
        refuse_space("sglang", self.space)
        if self.uses_internals:
            self.channel.pending_updates += updates
        else:
            self.public_weights.apply(updates)

    def generate(self, batch: Batch, probes: Sequence[Probe], generation: Generation) -> Continuations:
        """Continuations of the complete prompts by SGLang's own requests, of as many probes at once as it holds adapters."""
        if self.spec.family == "masked":
            raise ModelError("a masked language model does not generate text")
        found: Continuations = []
        for first in range(0, len(probes), len(self.adapters)):
            members = probes[first : first + len(self.adapters)]
            adapters = [None] * len(members)  # they are named later
            shared = prefix_bodies(generation_rows(batch.prompts, generation.draws), adapters)
            body = generation_body(batch.prompts, members, generation, adapters)
            answers = self.request_at(members, *shared, body)
            self.token_counts += count_tokens(answers)
            found += group_texts([tuple(answer["output_ids"]) for answer in answers], len(batch), generation.draws)
        return found

    def request_at(self, probes: Sequence[Probe], *bodies: Mapping[str, Any]) -> list[Any]:
        """SGLang's answers to the last of these requests. Each has the same number of rows at each probe, one probe after the
        other; the prefix cache is emptied before the first and after the last."""
        answers: Any = ()
        with launch.noticing_death():
            names = self._serve_probes(probes)
            for body in bodies:
                rows = len(body["input_ids"]) // len(probes)
                answers = self.engine.generate(**body, **adapter_field([name for name in names for _ in range(rows)]))
        while self.uses_internals and not self.channel.call("flush_cache"):  # the last request may not be finished yet
            time.sleep(0.005)
        launch.install_sigquit_handler()
        return list(answers)

    def _serve_probes(self, probes: Sequence[Probe]) -> list[str | None]:
        """Have SGLang hold the probes as adapters; their names, None for its own weights."""
        if self.adapter_shape is None:
            return [None for _ in probes]
        if not self.uses_internals:
            return self.uploads.load(self.public_weights.adapters(probes))
        written = self.channel.call("write_probes", probes=tuple(probes))
        return [name if held else None for name, held in zip(self.adapters, written, strict=False)]

    def state(self) -> dict[str, Array]:
        if not self.uses_internals:
            return self.public_weights.state() if self.adapter_shape is not None else {}
        return assemble_tensors(self.trained, self.channel.call_all("state"))

    def load_state(self, tensors: Mapping[str, Array]) -> None:
        super().load_state(tensors)
        if self.uses_internals:
            self.channel.call_all("load", tensors=dict(tensors))
        else:
            self.public_weights.load(tensors)

    @cached_property
    def public_weights(self) -> PublicLora | PublicMatrices:
        return PUBLIC_WEIGHTS[self.space.kind](self.engine, self.spec, self.facts)

    @cached_property
    def uploads(self) -> UploadedProbes:
        assert self.adapter_shape is not None
        return UploadedProbes(self.engine, self.adapter_shape)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {
            "device": "cpu" if launch.runs_on_cpu(self.spec.device) else "cuda",
            "sglang": installed_version(),
            "threads": launch.thread_limit(self.spec) or os.cpu_count() or 1,
            "tp": self.spec.tp,
            "uses_internals": self.uses_internals,
            "builds_batches": self.builds_batches,
        }

    def close(self) -> None:
        self.channel.close()
        launch.stop(self.engine, self.processes)


def _sample_batches() -> tuple[Batch, Batch]:
    """Label words of prompts of different lengths, and candidates of prompts that have their beginning in common."""
    words = Readout("words", words=SAMPLE_TOKENS[:2], vocabulary=True)
    prompts = [Prompt(SAMPLE_TOKENS[:length], label=0) for length in (8, 5, 3)]
    beginning, candidates = SAMPLE_TOKENS * MIN_SHARED_TOKENS, (SAMPLE_TOKENS[:1], SAMPLE_TOKENS[1:3])
    longer = [Prompt((*beginning[: 2 * MIN_SHARED_TOKENS], last), label=0, candidates=candidates) for last in (5, 6)]
    return Batch(tuple(prompts), words), Batch(tuple(longer), Readout("candidates"))


def _refuse_dtype(spec: EngineSpec) -> None:
    if spec.dtype != "float32" and launch.runs_on_cpu(spec.device):
        raise ConfigError(
            f"on a CPU the sglang engine computes in float32: leave out --dtype {spec.dtype}, or use --engine torch"
        )
