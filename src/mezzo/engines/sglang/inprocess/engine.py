"""SGLang in process: probes are adapters of one batch, and a whole batch is one call into the workers."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mezzo.engines.base import EngineSpec
from mezzo.engines.hf_hub import load_config
from mezzo.engines.liveness import check_alive
from mezzo.engines.sglang.facts import facts_of, stored_as
from mezzo.engines.sglang.inprocess import launch
from mezzo.engines.sglang.inprocess.channel import Channel
from mezzo.engines.sglang.inprocess.forward import Count
from mezzo.engines.sglang.inprocess.weights import Plan
from mezzo.engines.sglang.rows import rows_of
from mezzo.engines.sglang.server import requests
from mezzo.engines.sglang.support import refuse_space
from mezzo.engines.sglang.tensor_parts import assembled, digest_of, fitting
from mezzo.engines.sglang.versions import check_version
from mezzo.errors import ConfigError, ModelError
from mezzo.types import Batch, MicroBatch, Probe, Scores, Update

Array = npt.NDArray[np.generic]


class SGLangEngine:
    """One `sglang.Engine`, its workers' weights and the channel to them."""

    pipeline = None

    def __init__(self, spec: EngineSpec) -> None:
        _refuse_model(spec)
        facts = facts_of(spec)
        self.spec, self.space, self.facts = spec, spec.space, facts
        self.trained, self.base_digest = facts.trained, facts.base_digest
        self.micro_batch = MicroBatch(rows=spec.rows, members=launch.MEMBERS)
        self.share_prefixes = True
        self.count = Count()
        self.adapters = tuple(f"mezzo-{index}" for index in range(launch.MEMBERS))
        adapter = launch.adapter_of(spec, facts.trained)
        self.engine, self.processes = launch.start(spec, adapter)
        self.channel = Channel(self.engine.collective_rpc, spec.tp)
        try:
            if adapter is not None:
                launch.load_slots(self.engine, adapter, facts, self.adapters)
            launch.watch_workers()
            plan = Plan(spec.space.kind, facts.trained, facts.frozen, spec.noise_kind, spec.seed, self.adapters)
            self.channel.call("open", plan=plan)
            if adapter is not None and self.digest() != facts.start:
                raise ModelError(
                    "SGLang's copy of the trained tensors differs from the checkpoint's; it cannot be trained"
                )
        except BaseException:
            self.close()
            raise

    # ---- the contract

    def score(self, batch: Batch, probes: Sequence[Probe]) -> Scores:
        """scores[P, B, C], by one call into the workers."""
        if batch.readout.kind == "head":
            raise ModelError(
                "SGLang serves no classification head; use --readout words or candidates, or --engine torch"
            )
        members = min(self.micro_batch.members, len(self.adapters))
        scores, count = self.channel.call(
            "score",
            batch=batch,
            probes=tuple(probes),
            rows=self.micro_batch.rows,
            members=members,
            share=self.share_prefixes,
        )
        self.count = self.count + count
        return scores  # type: ignore[no-any-return]

    def check(self, batch: Batch, eps: float) -> None:
        """Refuse a space that SGLang cannot perturb, or that no perturbation can train."""
        refuse_space(self.space)
        check_alive(self, batch, eps)

    def apply(self, updates: Sequence[Update]) -> None:
        refuse_space(self.space)
        self.channel.ahead += updates

    def generate(self, batch: Batch, probes: Sequence[Probe], max_new_tokens: int) -> list[list[tuple[int, ...]]]:
        """Greedy continuations of the whole prompts, by SGLang's own requests."""
        if self.spec.family == "masked":
            raise ModelError("a masked language model does not generate text")
        body = requests.continuation(batch, max_new_tokens)
        return [[tuple(answer["output_ids"]) for answer in self._requested(probe, **body)] for probe in probes]

    def score_by_requests(self, batch: Batch, probes: Sequence[Probe]) -> Scores:
        """The same scores through a request for each sequence, as servers are asked. Causal models only."""
        rows, scores = rows_of(batch), requests.empty_scores(batch, len(probes))
        for index, probe in enumerate(probes):
            answers = self._requested(probe, **requests.request(rows, [None] * len(rows), batch.readout))
            requests.put(scores, index, rows, requests.scores_of(rows, answers, batch.readout))
        return scores

    def residents(self) -> list[str]:
        """Names of the adapters that SGLang holds ready."""
        return list(self.channel.call("residents"))

    def _requested(self, probe: Probe, **body: Any) -> list[Any]:
        """Answers to requests at a probe, whose adapter is written first and whose cache is emptied before and after."""
        placed = self.channel.call("place", probes=(probe,))
        adapters = [self.adapters[0] if placed[0] else None] * len(body["input_ids"])
        answers = self.engine.generate(**body, lora_path=adapters)
        while not self.channel.call("idle"):  # the last request may still be on its way out
            time.sleep(0.005)
        launch.watch_workers()
        return list(answers)

    def state(self) -> dict[str, Array]:
        return assembled(self.trained, self.channel.call_all("state"))

    def load_state(self, tensors: Mapping[str, Array]) -> None:
        self.channel.call_all("load", tensors=fitting(self.trained, tensors))

    def digest(self) -> str:
        return digest_of(self.state(), stored_as(self.spec))

    def describe(self) -> dict[str, Any]:
        return {
            "engine": "sglang",
            "device": "cpu" if launch.on_cpu(self.spec.device) else "cuda",
            "dtype": self.spec.dtype,
            "sglang": check_version(),
            "threads": self.spec.threads or os.cpu_count() or 1,
            "tp": self.spec.tp,
            "parameters": self.facts.parameters,
            "trained_parameters": sum(int(np.prod(t.shape)) for t in self.trained),
            "cached_tokens": self.count.cached,
            "computed_tokens": self.count.computed,
        }

    def close(self) -> None:
        self.channel.close()
        launch.stop(self.engine, self.processes)


def _refuse_model(spec: EngineSpec) -> None:
    if spec.dtype != "float32" and launch.on_cpu(spec.device):
        raise ConfigError(
            f"on a CPU the sglang engine computes in float32: leave out --dtype {spec.dtype}, or use --engine torch"
        )
    if spec.family == "masked":
        architectures = getattr(load_config(spec.model, spec.remote_code), "architectures", None) or ()
        if "RobertaForMaskedLM" not in architectures:
            raise ModelError(
                f"of masked language models the sglang engine serves RobertaForMaskedLM, not {', '.join(architectures)}; "
                "use --engine torch"
            )
    if spec.classes:
        raise ModelError("SGLang serves no classification head; use --readout words or candidates, or --engine torch")
