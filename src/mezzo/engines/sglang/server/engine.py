"""SGLang servers by URL: probes are uploaded as adapters, and several servers share each batch."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch

from mezzo.engines.arrays import Array
from mezzo.engines.base import Continuations, EngineSpec
from mezzo.engines.hf_hub import locate
from mezzo.engines.microbatch import empty_scores
from mezzo.engines.sglang.adapters import PROBES_PER_FORWARD
from mezzo.engines.sglang.base import SGLangEngine
from mezzo.engines.sglang.model_facts import SAMPLE_TOKENS, ModelFacts
from mezzo.engines.sglang.requests import count_tokens, generation_body, parse_scores, prefix_bodies, scoring_body
from mezzo.engines.sglang.server.answers import parse_tokens
from mezzo.engines.sglang.server.loader import LOADER
from mezzo.engines.sglang.server.replica import Replica
from mezzo.engines.sglang.server.weights import ClientWeights, FrozenModel, ServerMatrices, UploadedLora
from mezzo.engines.sglang.support import refuse_space
from mezzo.engines.token_rows import TokenCounts, TokenRow, token_rows, write_scores
from mezzo.errors import ConfigError, ModelError, RunFailed
from mezzo.types import Batch, Generation, Probe, Readout, Scores, Update

# How far a server's log-probabilities may differ from the checkpoint's.
LOGPROB_TOLERANCE, LOGPROB_TOLERANCE_16_BIT = 1e-3, 0.2


class ServerEngine(SGLangEngine):
    """The client of servers that were started with LoRA and serve the run's model."""

    def __init__(self, spec: EngineSpec) -> None:
        if spec.family != "causal":
            raise ModelError("over --url the sglang engine trains causal models; leave --url out for a masked one")
        if spec.tp != 1:
            raise ConfigError("--tp is the server's own option: give it to sglang.launch_server instead")
        super().__init__(spec)
        in_place = spec.space.kind == "matrices"
        path, loader = locate(spec.model), LOADER if in_place else ""
        self.replicas = [Replica(url, path, self.adapter_shape, spec.dtype, loader) for url in spec.urls]
        self._name, self._number = f"mezzo-{self.base_digest[:12]}-{uuid.uuid4().hex[:8]}", 0
        self._threads = ThreadPoolExecutor(len(self.replicas))
        self.weights: ClientWeights = FrozenModel()
        if in_place:
            self.weights = ServerMatrices(spec, self.facts, self._write_weights)
            self._reset_to_base(self.weights)
        elif spec.space.kind == "lora":
            self.weights = UploadedLora(spec, self.facts.trained, self.facts.frozen, torch.device("cpu"))
        for replica in self.replicas:
            _refuse_other_model(replica, self.facts)
            replica.start_run()

    def score(self, batch: Batch, probes: Sequence[Probe]) -> Scores:
        """scores[P, B, C]: the two signs as adapters of one request, a share of the examples to each server."""
        rows, scores = token_rows(batch), empty_scores(batch, len(probes))
        shares = [rows[index :: len(self.replicas)] for index in range(len(self.replicas))]
        work = [(replica, share) for replica, share in zip(self.replicas, shares, strict=True) if share]
        for first in range(0, len(probes), PROBES_PER_FORWARD):
            with self._uploaded_adapters(probes[first : first + PROBES_PER_FORWARD]) as adapters:
                futures = [
                    self._threads.submit(_score_rows, replica, share, adapters, batch.readout)
                    for replica, share in work
                ]
                for (_, share), future in zip(work, futures, strict=True):
                    values, token_counts = future.result()
                    self.token_counts += token_counts
                    for index in range(len(adapters)):
                        start = index * len(share)
                        write_scores(scores, first + index, share, values[start : start + len(share)])
        return scores

    def apply(self, updates: Sequence[Update]) -> None:
        refuse_space(self.space)
        self.weights.apply(updates)

    def generate(self, batch: Batch, probes: Sequence[Probe], generation: Generation) -> Continuations:
        """Greedy continuations, by the first server."""
        texts, count = [], generation.max_new_tokens
        for probe in probes:
            with self._uploaded_adapters([probe]) as (adapter,):
                body = generation_body(batch, count, adapter)
                texts.append(self.replicas[0].generate(body, lambda rows: [[parse_tokens(row, count)] for row in rows]))
        return texts

    def state(self) -> dict[str, Array]:
        return self.weights.state()

    def load_state(self, tensors: Mapping[str, Array]) -> None:
        super().load_state(tensors)
        self.weights.load(tensors)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {
            "device": ", ".join(replica.url for replica in self.replicas),
            "sglang": self.replicas[0].info.version,
            "tp": self.replicas[0].info.ranks,
        }

    def close(self) -> None:
        self._threads.shutdown()

    # ---- weights in the servers

    def _write_weights(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Send tensors to the loader of every server, under a new `weight_version` that nobody else uses."""
        version = self._next_name()
        list(self._threads.map(lambda replica: replica.write_weights(named, LOADER, version), self.replicas))

    def _reset_to_base(self, weights: ServerMatrices) -> None:
        """Send the checkpoint's matrices if a run of this model has changed a server.

        An empty list of updates goes to all servers: it shows that the loader works before a step depends on it.
        """
        model_name = self._name.rsplit("-", 1)[0]
        if any(replica.weight_version().startswith(model_name) for replica in self.replicas):
            weights.load(weights.state())
        try:
            weights.apply([])
        except ConfigError as error:
            raise ConfigError(f"{error}. Is mezzo installed beside the server? Its log says why") from None

    # ---- adapters

    def _next_name(self) -> str:
        self._number += 1
        return f"{self._name}-{self._number}"

    @contextmanager
    def _uploaded_adapters(self, probes: Sequence[Probe]) -> Iterator[list[str | None]]:
        """Names of the probes' adapters, which every server holds inside the block; None: the servers' own weights."""
        stem = self._next_name()
        names = [f"{stem}-{index}" for index in range(len(probes))]
        adapters = {
            name: adapter for name, adapter in zip(names, self.weights.adapters(probes), strict=True) if adapter
        }
        for replica in self.replicas:
            for name, tensors in adapters.items():
                assert self.adapter_shape is not None
                replica.load_adapter(name, tensors, self.adapter_shape)
        try:
            yield [name if name in adapters else None for name in names]
        finally:
            for replica in self.replicas:
                for name in adapters:
                    with suppress(RunFailed):  # a lost server has lost its adapters too
                        replica.unload_adapter(name)


def _score_rows(
    replica: Replica, rows: Sequence[TokenRow], adapters: Sequence[str | None], readout: Readout
) -> tuple[list[Any], TokenCounts]:
    """The values of all rows under the first adapter, then under the second."""
    counts = [replica.generate(body, count_tokens) for body in prefix_bodies(rows, adapters)]
    every = [row for _ in adapters for row in rows]
    body = scoring_body(every, [adapter for adapter in adapters for _ in rows], readout)
    scores, count = replica.generate(body, lambda found: (parse_scores(every, found, readout), count_tokens(found)))
    return scores, sum(counts, count)


def _refuse_other_model(replica: Replica, facts: ModelFacts) -> None:
    """Raise ModelError if the server holds other weights than the checkpoint."""
    rows, readout = [TokenRow(SAMPLE_TOKENS, example=0)], Readout("words", words=SAMPLE_TOKENS)
    body = scoring_body(rows, [None], readout)
    (logprobs,) = replica.generate(body, lambda found: parse_scores(rows, found, readout))
    tolerance = LOGPROB_TOLERANCE if replica.info.dtype == "float32" else LOGPROB_TOLERANCE_16_BIT
    if not all(abs(a - b) <= tolerance for a, b in zip(logprobs, facts.sample_logprobs, strict=True)):
        raise ModelError(
            f"the server at {replica.url} serves another model than the run's ({replica.info.model_path}); start it "
            f"with: {replica.command}"
        )
