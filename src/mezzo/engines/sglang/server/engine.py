"""SGLang servers by URL: probes are uploaded as adapters, and several servers share each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np

from mezzo.engines.arrays import Array
from mezzo.engines.base import Continuations, EngineSpec
from mezzo.engines.hf_hub import locate
from mezzo.engines.microbatch import empty_scores
from mezzo.engines.registry import refuse_space
from mezzo.engines.sglang.adapters import PROBES_PER_FORWARD, adapter_count, likely_shape
from mezzo.engines.sglang.base import SGLangEngine
from mezzo.engines.sglang.model_facts import (
    mask_token_of,
    read_matrices,
)
from mezzo.engines.sglang.requests import (
    count_tokens,
    generation_body,
    generation_rows,
    group_texts,
    prefix_bodies,
)
from mezzo.engines.sglang.server.answers import parse_tokens
from mezzo.engines.sglang.server.base_weights import reset_to_base
from mezzo.engines.sglang.server.client_names import is_leftover, name_adapter, name_client
from mezzo.engines.sglang.server.loader import LOADER
from mezzo.engines.sglang.server.pool import Pool
from mezzo.engines.sglang.server.replica import Replica
from mezzo.engines.sglang.server.scoring import refuse_other_model, sample_logprobs, score_rows, score_tolerance
from mezzo.engines.sglang.server.weights import AdapterTensors, ClientWeights, FrozenModel, ServerMatrices, UploadedLora
from mezzo.engines.sglang.support import refuse_head, refuse_server_targets
from mezzo.engines.token_rows import TokenCounts, TokenRow, token_rows, write_scores
from mezzo.errors import ConfigError, MezzoError, ModelError, RunFailed
from mezzo.types import Batch, Generation, Probe, Prompt, Readout, Scores, Update

# How far from the weights adapters are compared.
SAMPLE_SCALE = 0.01
# An adapter under its name; None: the servers' own weights.
NamedAdapter = tuple[str, AdapterTensors] | None


class ServerEngine(SGLangEngine):
    """The client of servers that were started with LoRA and serve the run's model."""

    def __init__(self, spec: EngineSpec) -> None:
        if spec.tp != 1:
            raise ConfigError("--tp is the server's own option: give it to sglang.launch_server instead")
        in_place = spec.space.kind == "matrices"
        if in_place and not spec.exclusive_server:
            raise ConfigError(
                "training matrices changes the server's own weights, and the answers that its other clients get: add "
                "--exclusive-server if it has none, or use --space lora, which changes nothing for others"
            )
        refuse_head(spec.classes)
        path, loader, adapters = locate(spec.model), LOADER if in_place else "", adapter_count(spec)
        mask_token = mask_token_of(spec) if spec.family == "masked" else None
        replica = partial(
            Replica, model=path, dtype=spec.dtype, loader=loader, adapters=adapters, mask_token=mask_token
        )
        for url in spec.urls:  # before the weights are read, which may take minutes
            replica(url, shape=likely_shape(spec.space, spec.family)).read_info()
        super().__init__(spec)
        if self.adapter_shape is not None:
            refuse_server_targets(spec.space, self.adapter_shape.targets)
        self._name, self._number = name_client(), 0
        self.weights: ClientWeights = FrozenModel()
        replicas = [replica(url, shape=self.adapter_shape) for url in spec.urls]
        self.pool = Pool(replicas, self._admit, spec.server_timeout)
        if in_place:
            self.weights = ServerMatrices(spec, self.facts, self._name, self.pool.on_all)
        elif spec.space.kind == "lora":
            self.weights = UploadedLora(spec, self.facts, self._name)
        try:
            for each in replicas:
                self._admit(each)
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
        """scores[P, B, C]: several probes as adapters of one request, a share of the examples to each server."""
        scores, members = empty_scores(batch, len(probes)), min(self.micro_batch.members, self._most_adapters())
        for first in range(0, len(probes), members):
            group, rows = probes[first : first + members], token_rows(batch, self.facts.decoder is None)
            while rows:
                servers = self.pool.servers()
                work = [(s, share) for i, s in enumerate(servers) if (share := rows[i :: len(servers)])]
                found = self.pool.run(
                    [
                        (s, partial(self._score_share, s, share, self._adapters(group, s), batch.readout))
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
                    for index in range(len(group)):
                        start = index * len(share)
                        write_scores(scores, first + index, share, values[start : start + len(share)])
        return scores

    def apply(self, updates: Sequence[Update]) -> None:
        refuse_space("sglang", self.space)
        self.weights.apply(updates)

    def generate(self, batch: Batch, probes: Sequence[Probe], generation: Generation) -> Continuations:
        """Continuations: as many adapters in a request as a batch may have, a share of the prompts to each server."""
        if self.facts.decoder is not None:
            raise ModelError("a masked language model does not generate text")
        texts: Continuations = [[[] for _ in batch.prompts] for _ in probes]
        members = self._most_adapters()
        for first in range(0, len(probes), members):
            group, places = probes[first : first + members], list(range(len(batch)))
            while places:
                servers = self.pool.servers()
                work = [(s, share) for i, s in enumerate(servers) if (share := places[i :: len(servers)])]
                prompts = [[batch.prompts[index] for index in share] for _, share in work]
                found = self.pool.run(
                    [
                        (s, partial(self._generate_share, s, asked, group, self._adapters(group, s), generation))
                        for (s, _), asked in zip(work, prompts, strict=True)
                    ]
                )
                places = []
                for (_, share), result in zip(work, found, strict=True):
                    if result is None:
                        places += share
                        continue
                    for member, written in enumerate(result):
                        for place, drawn in zip(share, written, strict=True):
                            texts[first + member][place] = drawn
        return texts

    def _most_adapters(self) -> int:
        """Adapters that every server takes in a batch, beside the model itself."""
        return max(PROBES_PER_FORWARD, min(server.info.loras_per_batch or 0 for server in self.pool.servers()) - 1)

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
        if self.spec.draws_texts and not replica.draws_texts:  # its scheduler would fail, and end
            raise ConfigError(
                f"the server at {replica.url} cannot draw texts: leave --temperature out, or install mezzo beside it and "
                "start it with --enable-custom-logit-processor, by which its clients may run code there"
            )
        refuse_other_model(replica, self.facts)
        self.weights.attach(replica)
        if self.adapter_shape is not None and replica.makes_adapters:
            self._check_recipes(replica)
        replica.start_run()

    def _check_recipes(self, replica: Replica) -> None:
        """Do without recipes on a server that does not make the adapters of them that would be uploaded."""
        found = []
        try:
            for by_recipe in (False, True):
                replica.makes_adapters = by_recipe
                adapters = self._adapters([Probe(((0, SAMPLE_SCALE),))], replica)
                with self._uploaded_adapters(replica, adapters) as (name,):
                    found.append(np.array(sample_logprobs(replica, name, self.facts.decoder)))
            difference = np.abs(found[1] - found[0]).max()
            problem = "" if difference <= score_tolerance(replica) else f"scores differ by {difference:.2g}"
        except MezzoError as error:
            problem = str(error)
        if problem:
            replica.makes_adapters = False
            self.report(
                f"{replica.url} does not make adapters from seeds ({problem}): they are uploaded, which is slower"
            )

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
            return score_rows(replica, rows, names, readout, self.facts.decoder)

    def _generate_share(
        self,
        replica: Replica,
        prompts: Sequence[Prompt],
        probes: Sequence[Probe],
        adapters: Sequence[NamedAdapter],
        generation: Generation,
    ) -> Continuations:
        most, draws = generation.max_new_tokens, generation.draws
        with self._uploaded_adapters(replica, adapters) as names:
            for shared in prefix_bodies(generation_rows(prompts, draws), names):
                replica.generate(shared, count_tokens)
            body = generation_body(prompts, probes, generation, names)
            texts = replica.generate(body, lambda rows: [parse_tokens(row, most) for row in rows])
            return group_texts(texts, len(prompts), draws)


def _remove_leftovers(replica: Replica) -> None:
    """Unload the adapters of clients that were killed in mid-step."""
    with suppress(MezzoError):  # the list is a help, not a need
        for name in replica.adapter_names():
            if is_leftover(name):
                replica.unload_adapter(name)
