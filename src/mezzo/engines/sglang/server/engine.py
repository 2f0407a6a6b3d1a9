"""SGLang servers by URL: the probes are uploaded as adapters, several servers share each batch."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mezzo.engines.base import EngineSpec
from mezzo.engines.hf_hub import locate
from mezzo.engines.liveness import check_alive
from mezzo.engines.sglang.facts import SAMPLE, Facts, facts_of, stored_as
from mezzo.engines.sglang.inprocess import launch
from mezzo.engines.sglang.inprocess.forward import Count
from mezzo.engines.sglang.rows import Row, rows_of
from mezzo.engines.sglang.server import requests
from mezzo.engines.sglang.server.loader import LOADER
from mezzo.engines.sglang.server.replica import Replica
from mezzo.engines.sglang.server.weights import ServedBase, ServedLora, ServedMatrices
from mezzo.engines.sglang.support import refuse_space
from mezzo.engines.sglang.tensor_parts import digest_of, fitting
from mezzo.errors import ConfigError, ModelError, RunFailed
from mezzo.types import Batch, MicroBatch, Probe, Readout, Scores, Update

Array = npt.NDArray[np.generic]
SAME_MODEL = {"float32": 1e-3}
"""How far a server's log-probabilities may lie from the checkpoint's, by its dtype; 16-bit ones are rounded."""
ROUNDED = 0.2


class ServerEngine:
    """Servers that someone else started. They must have been started with LoRA, and serve the run's model."""

    pipeline = None

    def __init__(self, spec: EngineSpec) -> None:
        if spec.family != "causal":
            raise ModelError("over --url the sglang engine trains causal models; leave --url out for a masked one")
        if spec.tp != 1:
            raise ConfigError("--tp is the server's own option: give it to sglang.launch_server instead")
        facts = facts_of(spec)
        adapter = launch.adapter_of(spec, facts.trained)
        self.spec, self.space, self.facts, self.adapter = spec, spec.space, facts, adapter
        self.trained, self.base_digest = facts.trained, facts.base_digest
        self.micro_batch = MicroBatch(rows=spec.rows, members=launch.MEMBERS)
        self.count = Count()
        in_place = spec.space.kind == "matrices"
        path, loader = locate(spec.model), LOADER if in_place else ""
        self.replicas = [Replica(url, path, adapter, spec.dtype, loader) for url in spec.urls]
        self._name, self._number = f"mezzo-{facts.base_digest[:12]}-{uuid.uuid4().hex[:8]}", 0
        self._pool = ThreadPoolExecutor(len(self.replicas))
        self.weights: ServedLora | ServedMatrices | ServedBase = ServedBase()
        if in_place:
            self.weights = ServedMatrices(spec, facts, self._write)
            self._return_to_base(self.weights)
        elif spec.space.kind == "lora":
            self.weights = ServedLora(spec, facts)
        for replica in self.replicas:
            _refuse_other_model(replica, facts)

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

    def apply(self, updates: Sequence[Update]) -> None:
        refuse_space(self.space)
        self.weights.apply(updates)

    def generate(self, batch: Batch, probes: Sequence[Probe], max_new_tokens: int) -> list[list[tuple[int, ...]]]:
        """Greedy continuations, by the first server."""
        texts = []
        for probe in probes:
            with self._lent([probe]) as (adapter,):
                answers = self.replicas[0].generate(requests.continuation(batch, max_new_tokens, adapter))
            texts.append([tuple(answer["output_ids"]) for answer in answers])
        return texts

    def state(self) -> dict[str, Array]:
        return self.weights.state()

    def load_state(self, tensors: Mapping[str, Array]) -> None:
        self.weights.load(fitting(self.trained, tensors))

    def digest(self) -> str:
        return digest_of(self.state(), stored_as(self.spec))

    def describe(self) -> dict[str, Any]:
        return {
            "engine": "sglang",
            "device": ", ".join(replica.url for replica in self.replicas),
            "dtype": self.spec.dtype,
            "sglang": str(self.replicas[0].info["version"]),
            "tp": self.replicas[0].ranks,
            "parameters": self.facts.parameters,
            "trained_parameters": sum(int(np.prod(t.shape)) for t in self.trained),
            "cached_tokens": self.count.cached,
            "computed_tokens": self.count.computed,
        }

    def close(self) -> None:
        self._pool.shutdown()

    # ---- weights that live in the servers

    def _write(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Hand tensors to the loader of every server; their weights then have a name that nobody else gives."""
        version = self._next_name()
        list(self._pool.map(lambda replica: replica.write(named, LOADER, version), self.replicas))

    def _return_to_base(self, weights: ServedMatrices) -> None:
        """Servers that another run of this model has moved go back to the checkpoint. An order without updates goes to all:
        it shows that the loader works before a step depends on it."""
        mark = self._name.rsplit("-", 1)[0]
        if any(replica.weight_version().startswith(mark) for replica in self.replicas):
            weights.load(weights.state())
        try:
            weights.apply([])
        except ConfigError as error:
            raise ConfigError(f"{error}. Is mezzo installed beside the server? Its log says why") from None

    # ---- adapters and questions

    def _next_name(self) -> str:
        self._number += 1
        return f"{self._name}-{self._number}"

    @contextmanager
    def _lent(self, probes: Sequence[Probe]) -> Iterator[list[str | None]]:
        """The probes as adapters on every server, for as long as the block runs; None: the servers' own weights."""
        stem = self._next_name()
        lent = {f"{stem}-{index}": adapter for index, adapter in enumerate(self.weights.adapters(probes)) if adapter}
        names = [f"{stem}-{index}" for index in range(len(probes))]
        for replica in self.replicas:
            for name, tensors in lent.items():
                assert self.adapter is not None
                replica.load(name, tensors, self.adapter)
        try:
            yield [name if name in lent else None for name in names]
        finally:
            for replica in self.replicas:
                for name in lent:
                    with suppress(RunFailed):  # a lost server has lost its adapters too
                        replica.unload(name)

    @staticmethod
    def _ask(
        replica: Replica, rows: Sequence[Row], adapters: Sequence[str | None], readout: Readout
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
    replica.version = replica.weight_version()
    replica.begun = True
