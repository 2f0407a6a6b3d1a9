"""SGLang servers by URL: probes are uploaded as adapters, and several servers share each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from mezzo.engines.arrays import Array
from mezzo.engines.base import Continuations, EngineSpec
from mezzo.engines.hf_hub import locate
from mezzo.engines.microbatch import empty_scores
from mezzo.engines.sglang.adapters import PROBES_PER_FORWARD, likely_shape
from mezzo.engines.sglang.base import SGLangEngine
from mezzo.engines.sglang.model_facts import SAMPLE_TOKENS, ModelFacts, read_matrices
from mezzo.engines.sglang.requests import count_tokens, generation_body, parse_scores, prefix_bodies, scoring_body
from mezzo.engines.sglang.server.answers import parse_tokens
from mezzo.engines.sglang.server.base_weights import reset_to_base
from mezzo.engines.sglang.server.client_names import is_leftover, name_adapter, name_client
from mezzo.engines.sglang.server.loader import LOADER
from mezzo.engines.sglang.server.pool import Pool
from mezzo.engines.sglang.server.replica import Replica
from mezzo.engines.sglang.server.weights import AdapterTensors, ClientWeights, FrozenModel, ServerMatrices, UploadedLora
from mezzo.engines.sglang.support import refuse_head, refuse_space
from mezzo.engines.token_rows import TokenCounts, TokenRow, token_rows, write_scores
from mezzo.errors import ConfigError, MezzoError, ModelError, RunFailed
from mezzo.types import Batch, Generation, Probe, Prompt, Readout, Scores, Update

# How far a server's log-probabilities may differ from the checkpoint's.
LOGPROB_TOLERANCE, LOGPROB_TOLERANCE_16_BIT = 1e-3, 0.2
# An adapter under its name; None: the servers' own weights.
NamedAdapter = tuple[str, AdapterTensors] | None


class ServerEngine(SGLangEngine):
    """The client of servers that were started with LoRA and serve the run's model."""

    def __init__(self, spec: EngineSpec) -> None:
        if spec.family != "causal":
            raise ModelError("over --url the sglang engine trains causal models; leave --url out for a masked one")
        if spec.tp != 1:
            raise ConfigError("--tp is the server's own option: give it to sglang.launch_server instead")
        in_place = spec.space.kind == "matrices"
        if in_place and not spec.exclusive_server:
            raise ConfigError(
                "training matrices changes the server's own weights, and the answers that its other clients get: add "
                "--exclusive-server if it has none, or use --space lora, which changes nothing for others"
            )
        refuse_head(spec.classes)
        path, loader = locate(spec.model), LOADER if in_place else ""
        for url in spec.urls:  # before the weights are read, which may take minutes
            Replica(url, path, likely_shape(spec.space), spec.dtype, loader).read_info()
        super().__init__(spec)
        self._name, self._number = name_client(), 0
        self.weights: ClientWeights = FrozenModel()
        replicas = [Replica(url, path, self.adapter_shape, spec.dtype, loader) for url in spec.urls]
        self.pool = Pool(replicas, self._admit, spec.server_timeout)
        if in_place:
            self.weights = ServerMatrices(spec, self.facts, self._name, self.pool.on_all)
        elif spec.space.kind == "lora":
            self.weights = UploadedLora(spec, self.facts, self._name)
        try:
            for replica in replicas:
                self._admit(replica)
        except BaseException:
            self.close()
            raise

    @property
    def report(self) -> Callable[[str], None]:
        """Where to say that a server was lost, or is back."""
        return self.pool.report

    @report.setter
    def report(self, report: Callable[[str], None]) -> None:
        self.pool.report = report

    def score(self, batch: Batch, probes: Sequence[Probe]) -> Scores:
        """scores[P, B, C]: the two signs as adapters of one request, a share of the examples to each server."""
        scores = empty_scores(batch, len(probes))
        for first in range(0, len(probes), PROBES_PER_FORWARD):
            pair, rows = probes[first : first + PROBES_PER_FORWARD], token_rows(batch)
            while rows:
                servers = self.pool.servers()
                work = [(s, share) for i, s in enumerate(servers) if (share := rows[i :: len(servers)])]
                found = self.pool.run(
                    [
                        (s, partial(self._score_share, s, share, self._adapters(pair, s), batch.readout))
                        for s, share in work
                    ]
                )
                rows = []
                for (_, share), result in zip(work, found, strict=True):
                    if result is None:
                        rows += share
                        continue
                    values, token_counts = result
                    self.token_counts += token_counts
                    for index in range(len(pair)):
                        start = index * len(share)
                        write_scores(scores, first + index, share, values[start : start + len(share)])
        return scores

    def apply(self, updates: Sequence[Update]) -> None:
        refuse_space(self.space)
        self.weights.apply(updates)

    def generate(self, batch: Batch, probes: Sequence[Probe], generation: Generation) -> Continuations:
        """Greedy continuations: as many adapters in a request as a batch may have, a share of the prompts to each server."""
        texts: Continuations = [[[()] for _ in batch.prompts] for _ in probes]
        members = max(PROBES_PER_FORWARD, min(server.info.loras_per_batch or 0 for server in self.pool.servers()) - 1)
        for first in range(0, len(probes), members):
            group, places = probes[first : first + members], list(range(len(batch)))
            while places:
                servers = self.pool.servers()
                work = [(s, share) for i, s in enumerate(servers) if (share := places[i :: len(servers)])]
                prompts = [[batch.prompts[index] for index in share] for _, share in work]
                found = self.pool.run(
                    [
                        (s, partial(self._generate_share, s, asked, self._adapters(group, s), generation))
                        for (s, _), asked in zip(work, prompts, strict=True)
                    ]
                )
                places = []
                for (_, share), result in zip(work, found, strict=True):
                    if result is None:
                        places += share
                        continue
                    for index, tokens in enumerate(result):
                        member, number = divmod(index, len(share))
                        texts[first + member][share[number]] = [tokens]
        return texts

    def state(self) -> dict[str, Array]:
        return self.weights.state()

    def load_state(self, tensors: Mapping[str, Array]) -> None:
        super().load_state(tensors)
        self.weights.load(tensors)

    def describe(self) -> dict[str, Any]:
        info = self.pool.first.info
        return super().describe() | {"device": ", ".join(self.spec.urls), "sglang": info.version, "tp": info.ranks}

    def close(self) -> None:
        """Leave the servers as they were found."""
        try:
            self.weights.close()
        except MezzoError as error:
            self.report(
                f"a server could not be put back to the untrained model ({error}); the next run there will do it"
            )
        finally:
            self.pool.close()

    def _admit(self, replica: Replica) -> None:
        """Check a server, put it back to the base if a dead run left it changed, and bring it to this run's weights."""
        replica.connect()
        _remove_leftovers(replica)
        reset_to_base(replica, self._name, partial(read_matrices, self.spec))
        _refuse_other_model(replica, self.facts)
        self.weights.attach(replica)
        replica.start_run()

    # ---- adapters

    def _adapters(self, probes: Sequence[Probe], replica: Replica) -> list[NamedAdapter]:
        """The probes' adapters for a server and new names for them; None where its own weights are the probe."""
        adapters: list[NamedAdapter] = []
        for tensors in self.weights.adapters(probes, replica):
            self._number += 1
            adapters.append((name_adapter(self._name, self._number), tensors) if tensors else None)
        return adapters

    @contextmanager
    def _uploaded_adapters(self, replica: Replica, adapters: Sequence[NamedAdapter]) -> Iterator[list[str | None]]:
        """Names of the adapters, which the server holds inside the block."""
        replica.check_same_process()
        names: list[str] = []
        try:
            for name, tensors in filter(None, adapters):
                assert self.adapter_shape is not None
                names.append(name)
                replica.load_adapter(name, tensors, self.adapter_shape)
            yield [adapter[0] if adapter else None for adapter in adapters]
        finally:
            for name in names:
                with suppress(RunFailed):  # a lost server has lost its adapters too
                    replica.unload_adapter(name)

    def _score_share(
        self, replica: Replica, rows: Sequence[TokenRow], adapters: Sequence[NamedAdapter], readout: Readout
    ) -> tuple[list[Any], TokenCounts]:
        with self._uploaded_adapters(replica, adapters) as names:
            return _score_rows(replica, rows, names, readout)

    def _generate_share(
        self, replica: Replica, prompts: Sequence[Prompt], adapters: Sequence[NamedAdapter], generation: Generation
    ) -> list[tuple[int, ...]]:
        """Of all prompts under the first adapter, then under the next."""
        with self._uploaded_adapters(replica, adapters) as names:
            body, most = generation_body(prompts, generation, names), generation.max_new_tokens
            return replica.generate(body, lambda rows: [parse_tokens(row, most) for row in rows])


def _score_rows(
    replica: Replica, rows: Sequence[TokenRow], adapters: Sequence[str | None], readout: Readout
) -> tuple[list[Any], TokenCounts]:
    """The values of all rows under the first adapter, then under the second."""
    counts = [replica.generate(body, count_tokens) for body in prefix_bodies(rows, adapters)]
    every = [row for _ in adapters for row in rows]
    body = scoring_body(every, [adapter for adapter in adapters for _ in rows], readout)
    scores, count = replica.generate(body, lambda found: (parse_scores(every, found, readout), count_tokens(found)))
    return scores, sum(counts, count)


def _remove_leftovers(replica: Replica) -> None:
    """Unload the adapters of clients that were killed in mid-step."""
    with suppress(MezzoError):  # the list is a help, not a need
        for name in replica.adapter_names():
            if is_leftover(name):
                replica.unload_adapter(name)


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
