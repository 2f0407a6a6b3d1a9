"""SGLang servers by URL: the factors stay here, the probes are uploaded as adapters, several servers share each batch."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mezzo.engines.base import EngineSpec, Unit
from mezzo.engines.hub import locate
from mezzo.engines.liveness import check_alive
from mezzo.engines.sglang import launch, requests
from mezzo.engines.sglang.facts import SAMPLE, Facts, facts_of, fresh
from mezzo.engines.sglang.forward import Count
from mezzo.engines.sglang.pieces import digest_of, fitting
from mezzo.engines.sglang.replica import Replica
from mezzo.engines.sglang.rows import Row, rows_of
from mezzo.engines.sglang.support import module_of, refuse_space
from mezzo.engines.sglang.weights import members
from mezzo.engines.torch.noise import NoiseSource
from mezzo.engines.torch.population import Population
from mezzo.errors import ConfigError, ModelError, RunFailed, SpaceError
from mezzo.types import Batch, Probe, Readout, Scores, Update

Array = npt.NDArray[np.generic]
SAME_MODEL = {"float32": 1e-3}
"""How far a server's log-probabilities may lie from the checkpoint's, by its dtype; 16-bit ones are rounded."""
ROUNDED = 0.2


class ServerEngine:
    """LoRA on servers that someone else started. They must have been started with LoRA, and serve the run's model."""

    def __init__(self, spec: EngineSpec) -> None:
        if spec.space.kind != "lora":
            raise SpaceError(
                f"over --url the sglang engine trains LoRA, not {spec.space.kind!r}: use --space lora, or leave --url out "
                "and let mezzo start SGLang itself"
            )
        if spec.tp != 1:
            raise ConfigError("--tp is the server's own option: give it to sglang.launch_server instead")
        facts = facts_of(spec)
        adapter = launch.adapter_of(spec, facts.trained)
        assert adapter is not None
        self.spec, self.space, self.facts, self.adapter = spec, spec.space, facts, adapter
        self.trained, self.base_digest = facts.trained, facts.base_digest
        self.unit = Unit(rows=spec.rows, members=launch.MEMBERS)
        self.count = Count()
        self.replicas = [Replica(url, locate(spec.model), adapter) for url in spec.urls]
        for replica in self.replicas:
            _refuse_other_model(replica, facts)
        self.population = Population(
            [(t, fresh(t, spec.seed)) for t in facts.trained],
            NoiseSource(spec.noise_kind, torch.device("cpu")),
            {t.name: fresh(t, spec.seed) for t in facts.frozen},
        )
        self.modules = tuple(dict.fromkeys(module_of(t.name) for t in facts.trained))
        self._name, self._number = f"mezzo-{uuid.uuid4().hex[:8]}", 0
        self._pool = ThreadPoolExecutor(len(self.replicas))

    # ---- the contract

    def score(self, batch: Batch, probes: Sequence[Probe]) -> Scores:
        """scores[P, B, C]: the two signs as adapters of one batch, a share of the examples to each server."""
        rows, scores = rows_of(batch), requests.empty_scores(batch, len(probes))
        shares = [rows[index :: len(self.replicas)] for index in range(len(self.replicas))]
        for first in range(0, len(probes), launch.MEMBERS):
            with self._lent(probes[first : first + launch.MEMBERS]) as adapters:
                asked = [
                    self._pool.submit(self._ask, replica, share, adapters, batch.readout)
                    for replica, share in zip(self.replicas, shares, strict=True)
                    if share
                ]
                for share, future in zip((s for s in shares if s), asked, strict=True):
                    values, count = future.result()
                    self.count = self.count + count
                    for index in range(len(adapters)):
                        start = index * len(share)
                        requests.put(scores, first + index, share, values[start : start + len(share)])
        return scores

    def check(self, batch: Batch, eps: float) -> None:
        refuse_space(self.space)
        check_alive(self, batch, eps)

    @torch.no_grad()
    def apply(self, updates: Sequence[Update]) -> None:
        self.population.replay(updates)

    def generate(self, batch: Batch, probes: Sequence[Probe], max_new_tokens: int) -> list[list[tuple[int, ...]]]:
        """Greedy continuations, by the first server."""
        body = requests.continuation(batch, max_new_tokens)
        texts = []
        for probe in probes:
            with self._lent([probe]) as adapters:
                answers = self.replicas[0].generate({**body, "lora_path": adapters * len(batch)})
            texts.append([tuple(answer["output_ids"]) for answer in answers])
        return texts

    def state(self) -> dict[str, Array]:
        return {t.name: self.population.value(t.name).numpy().copy() for t in self.trained}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Array]) -> None:
        for name, value in fitting(self.trained, tensors).items():
            self.population.value(name).copy_(torch.from_numpy(np.ascontiguousarray(value)))

    def digest(self) -> str:
        return digest_of(self.state())

    def describe(self) -> dict[str, Any]:
        return {
            "engine": "sglang",
            "device": ", ".join(replica.url for replica in self.replicas),
            "sglang": str(self.replicas[0].info["version"]),
            "tp": self.replicas[0].ranks,
            "parameters": self.facts.parameters,
            "trained_parameters": sum(int(np.prod(t.shape)) for t in self.trained),
            "cached_tokens": self.count.cached,
            "computed_tokens": self.count.computed,
        }

    def close(self) -> None:
        self._pool.shutdown()

    # ---- adapters and questions

    @contextmanager
    def _lent(self, probes: Sequence[Probe]) -> Iterator[list[str]]:
        """The probes as adapters on every server, for as long as the block runs."""
        self._number += 1
        names = [f"{self._name}-{self._number}-{index}" for index in range(len(probes))]
        tensors: list[dict[str, torch.Tensor]] = [{} for _ in probes]
        for module, downs, ups in members(self.population, self.modules, probes):
            for index in range(len(probes)):
                tensors[index][f"base_model.model.{module}.lora_A.weight"] = downs[index].clone()
                tensors[index][f"base_model.model.{module}.lora_B.weight"] = ups[index].clone()
        for replica in self.replicas:
            for name, values in zip(names, tensors, strict=True):
                replica.load(name, values, self.adapter)
        try:
            yield names
        finally:
            for replica in self.replicas:
                for name in names:
                    with suppress(RunFailed):  # a lost server has lost its adapters too
                        replica.unload(name)

    @staticmethod
    def _ask(
        replica: Replica, rows: Sequence[Row], adapters: Sequence[str], readout: Readout
    ) -> tuple[list[Any], Count]:
        """The values of all rows under the first adapter, then under the second."""
        first = [answer for body in requests.prefixes(rows, adapters) for answer in replica.generate(body)]
        every = [row for _ in adapters for row in rows]
        answers = replica.generate(requests.request(every, [a for a in adapters for _ in rows], readout))
        return requests.scores_of(every, answers, readout), requests.counted([*first, *answers])


def _refuse_other_model(replica: Replica, facts: Facts) -> None:
    """The trained adapter would fit nothing if the server held other weights than the checkpoint."""
    rows = [Row(SAMPLE, -1, 0, (0, 0))]
    readout = Readout("words", words=SAMPLE)
    (found,) = requests.scores_of(rows, replica.generate(requests.request(rows, [None], readout)), readout)
    allowed = SAME_MODEL.get(str(replica.info.get("dtype")), ROUNDED)
    if max(abs(a - b) for a, b in zip(found, facts.sample, strict=True)) > allowed:
        raise ModelError(
            f"the server at {replica.url} serves another model than the run's ({replica.info['model_path']}); start it "
            f"with: {replica.command}"
        )
    replica.begun = True
