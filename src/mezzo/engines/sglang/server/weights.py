"""The trained tensors as a client of SGLang servers holds them: LoRA factors are here, matrices are in the servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

from mezzo.engines.arrays import Array, to_numpy
from mezzo.engines.base import EngineSpec
from mezzo.engines.lora_factors import LoraFactors, load_values
from mezzo.engines.sglang.adapters import lora_adapters, noise_adapters
from mezzo.engines.sglang.model_facts import ModelFacts, read_matrices
from mezzo.engines.sglang.server.base_weights import (
    HEARTBEAT_SECONDS,
    check_digests,
    restore_base,
    write_matrices,
)
from mezzo.engines.sglang.server.loader import Order, describe_updates
from mezzo.engines.sglang.server.recipes import Recipe, encode_recipe
from mezzo.engines.sglang.server.replica import SHORT_LOOK, Replica
from mezzo.engines.torch.forward.population import Population
from mezzo.engines.torch.weights.noise import NoiseSource
from mezzo.errors import ConfigError, MezzoError, RunFailed
from mezzo.method import noise
from mezzo.types import Probe, Update

AdapterTensors = dict[str, Tensor]
# Does something on every server that answers.
OnServers = Callable[[Callable[[Replica], None]], None]


class FrozenModel:
    """A model that is evaluated, not trained."""

    def adapters(self, probes: Sequence[Probe], replica: Replica) -> list[AdapterTensors | None]:
        return [None for _ in probes]

    def apply(self, updates: Sequence[Update]) -> None: ...

    def state(self) -> dict[str, Array]:
        return {}

    def load(self, tensors: Mapping[str, Array]) -> None: ...

    def attach(self, replica: Replica) -> None: ...

    def close(self) -> None: ...


class UploadedLora(LoraFactors):
    """LoRA factors held by the client, and uploaded as adapters at each probe; servers that can make them from seeds."""

    def __init__(self, spec: EngineSpec, facts: ModelFacts, client: str) -> None:
        super().__init__(spec, facts.trained, facts.frozen, torch.device("cpu"))
        self.spec, self.facts, self.client = spec, facts, client
        self._unsent: dict[Replica, list[Update] | None] = {}
        """What each server has not been sent, if it makes adapters: updates, or (None) the factors themselves."""

    def attach(self, replica: Replica) -> None:
        self._unsent[replica] = None

    def apply(self, updates: Sequence[Update]) -> None:
        super().apply(updates)
        for unsent in self._unsent.values():
            if unsent is not None:
                unsent += updates

    def load(self, tensors: Mapping[str, Array]) -> None:
        super().load(tensors)
        self._unsent = dict.fromkeys(self._unsent)

    def adapters(self, probes: Sequence[Probe], replica: Replica) -> list[AdapterTensors | None]:
        """The adapter of each probe, for this server: complete, or as a recipe."""
        if replica.makes_adapters:
            return self._recipes(probes, replica)
        return list(lora_adapters(self, probes))

    def _recipes(self, probes: Sequence[Probe], replica: Replica) -> list[AdapterTensors | None]:
        unsent, self._unsent[replica] = self._unsent[replica], []
        values = None if unsent is not None else self._values()
        recipes: list[AdapterTensors | None] = []
        for probe in probes:
            recipe = Recipe(
                client=self.client,
                noise_kind=self.spec.noise_kind,
                trained=self.facts.trained,
                probe=probe,
                updates=tuple(unsent or ()),
            )
            recipes.append(encode_recipe(recipe, values))
            unsent, values = [], None  # the first has brought the server to this step
        return recipes

    def _values(self) -> dict[str, Tensor]:
        trained = {t.name: self.population.value(t.name).clone() for t in self.facts.trained}
        return trained | dict(self.population.frozen)

    def state(self) -> dict[str, Array]:
        return self.arrays()

    def close(self) -> None: ...


class ServerMatrices:
    """Matrices inside the servers: a probe is an adapter, an update is sent as (seed, coefficient) pairs.

    Weights cannot be read back from a server in full, so the client keeps a copy and updates it when the state is needed.
    """

    def __init__(self, spec: EngineSpec, facts: ModelFacts, client: str, on_servers: OnServers) -> None:
        self.spec, self.trained, self.client, self.on_servers = spec, facts.trained, client, on_servers
        self.source = NoiseSource(spec.noise_kind, torch.device("cpu"))
        self.copy = Population([(t, facts.matrices[t.name]) for t in facts.trained], self.source)
        self.pending_updates: list[Update] = []
        self.moved = False
        """The weights are not the base any more."""
        self.base_names: dict[Replica, str] = {}
        """SGLang's `weight_version` of the untrained model on each server that was taken over."""
        self._count = 0
        self._closed = threading.Event()
        self._heartbeat = threading.Thread(target=self._show_life, daemon=True)

    def attach(self, replica: Replica) -> None:
        """Take over a server that holds the base, and bring it to the run's weights."""
        status = replica.weight_status()
        if status is None:
            raise ConfigError(
                f"mezzo is not installed beside the server at {replica.url}, or another version: it cannot update its own "
                "weights, as --space matrices needs. Use --space lora, or install mezzo there and restart it"
            )
        if status.noise != noise.VERSION:
            raise ConfigError(
                f"the mezzo beside the server at {replica.url} makes noise {status.noise!r}, this one {noise.VERSION!r}: "
                "install the same version"
            )
        self.base_names[replica] = replica.weight_version()
        replica.loader_version = status.version
        # Without updates the order shows that the loader works, and says whose weights they are from now on.
        self._write(replica, [], self._next_version())
        if self.moved:
            write_matrices(replica, self.client, self.base_names[replica], self.state())
        else:
            check_digests(replica, self.state())
        if not self._heartbeat.is_alive():
            self._heartbeat.start()

    def adapters(self, probes: Sequence[Probe], replica: Replica) -> list[AdapterTensors | None]:
        """The adapter of each probe; None where the servers' own weights are the probe."""
        adapters: list[AdapterTensors | None] = []
        for probe in probes:
            if replica.makes_adapters and probe.terms:
                kind = self.spec.noise_kind
                recipe = Recipe(client=self.client, noise_kind=kind, trained=self.trained, probe=probe)
                adapters.append(encode_recipe(recipe))
                continue
            adapters.append(noise_adapters(self.source, self.trained, probe) or None)
        return adapters

    def apply(self, updates: Sequence[Update]) -> None:
        self.pending_updates += updates
        self.moved = self.moved or bool(updates)
        version = self._next_version()
        self.on_servers(lambda replica: self._write(replica, updates, version))
        self.source.clear_cache()

    @torch.no_grad()
    def state(self) -> dict[str, Array]:
        self.copy.apply_all(self.pending_updates)
        self.pending_updates = []
        return {t.name: to_numpy(self.copy.value(t.name)) for t in self.trained}

    def load(self, tensors: Mapping[str, Array]) -> None:
        self.pending_updates = []
        load_values(self.copy, tensors)
        self.moved = True
        self.on_servers(lambda replica: write_matrices(replica, self.client, self.base_names[replica], tensors))

    def close(self) -> None:
        """Put the base back into every server that was taken over, also one that was lost and is back; checked by digest."""
        self._closed.set()
        if not self.base_names:
            return
        base = read_matrices(self.spec, [t.name for t in self.trained])
        with ThreadPoolExecutor(len(self.base_names)) as threads:
            problems = list(threads.map(lambda replica: self._give_back(replica, base), self.base_names))
        if any(problems):
            raise RunFailed("; ".join(filter(None, problems)))

    def _give_back(self, replica: Replica, base: Mapping[str, Array]) -> str:
        """Why a server could not be put back; empty if it holds the base."""
        if not replica.is_there(SHORT_LOOK):
            return f"{replica.url} does not answer"
        replica.expected_version = ""  # a lost server may have been given another name
        try:
            status = replica.weight_status()
            if status is not None and status.owner == self.client:
                restore_base(replica, self.client, status, lambda names: {name: base[name] for name in names})
        except MezzoError as error:
            return str(error)
        return ""

    def _write(self, replica: Replica, updates: Sequence[Update], version: str) -> None:
        order = Order(
            owner=self.client,
            expected=replica.loader_version,
            version=version,
            base_name=self.base_names[replica],
            **describe_updates(self.trained, updates),
        )
        replica.write_weights(order)

    def _next_version(self) -> str:
        self._count += 1
        return f"{self.client}.{time.time_ns():x}.{self._count}"

    def _show_life(self) -> None:
        """Tell the servers now and then that the run is alive, so that no other takes them over."""
        while not self._closed.wait(HEARTBEAT_SECONDS):
            for replica in list(self.base_names):
                with suppress(MezzoError):
                    replica.weight_status(self.client)


ClientWeights = FrozenModel | UploadedLora | ServerMatrices
