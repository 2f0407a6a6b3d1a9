"""Hugging Face models in process: all probes of a work unit in one forward; a probe never writes the base weights."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mezzo.engines.base import Continuations
from mezzo.engines.hf_hub import refuse_pairs
from mezzo.engines.microbatch import check_state, empty_scores, group_by_length
from mezzo.engines.torch import catalog
from mezzo.engines.torch.device_map import DeviceMap
from mezzo.engines.torch.forward import frozen_cache
from mezzo.engines.torch.forward.forward import Forward, is_causal
from mezzo.engines.torch.forward.generation import generate_texts
from mezzo.engines.torch.forward.inputs import PaddedRows, make_rows
from mezzo.engines.torch.forward.plan import make_plan
from mezzo.engines.torch.forward.population import Population
from mezzo.engines.torch.forward.prefix import tensor_infos
from mezzo.engines.torch.forward.probe_point import ProbePoint, places_of
from mezzo.engines.torch.forward.shared_prompts import can_share, score_candidates, within_windows
from mezzo.engines.torch.forward.trained_modules import TrainedModules
from mezzo.engines.torch.gradients import GradientDescent
from mezzo.engines.torch.initial_values import initial_lora_factor, initial_prefix, untrained_partners
from mezzo.engines.torch.loading import devices_of
from mezzo.engines.torch.offload import LayerStream
from mezzo.engines.torch.quantized import is_quantized
from mezzo.engines.torch.weights.noise import NoiseSource, make_source
from mezzo.errors import ConfigError, ModelError, RunFailed, SpaceError, is_out_of_memory
from mezzo.method import noise
from mezzo.method.space import ADAPTERS, Space, lora_names, select
from mezzo.types import (
    Batch,
    Generation,
    GradientStep,
    MicroBatch,
    Probe,
    Prompt,
    Readout,
    Scores,
    TrainedTensor,
    Update,
)

if TYPE_CHECKING:
    from mezzo.engines.torch.gpu.graphs import Graphs
    from mezzo.engines.torch.gpu.pipeline import Pipeline


class TorchEngine:
    """One model, its trained tensors and the population forward over them."""

    merges_units = True
    """Several work units in one call of `score` give the same bits as one call each."""

    def __init__(
        self,
        model: nn.Module,
        space: Space,
        *,
        noise_kind: noise.Kind = "rademacher",
        micro_batch: MicroBatch | None = None,
        seed: int = 0,
        pad_id: int = 0,
        device: str | torch.device = "cpu",
        prefix_ids: Sequence[int] = (),
        cache_mb: float = 0,
        gradients: bool = False,
        offload: bool = False,
        base_digest: str = "",
    ) -> None:
        refuse_pairs(model.config)
        self.devices = devices_of(str(device))
        """Several share the layers."""
        self.device = self.devices[0]
        self.quantized = is_quantized(model)
        self.frozen_base = self.quantized or offload
        """Whether the model's own layers can hold nothing that is trained."""
        if self.frozen_base and not space.adapter:
            raise SpaceError(
                f"a base that is quantised or offloaded stays as it is: --space {' or '.join(ADAPTERS)}, not {space.kind!r}"
            )
        self.model = model.eval().requires_grad_(False)
        self.dtype: torch.dtype = self.model.dtype  # type: ignore[assignment]
        """The type of the stored weights. A CPU computes in float32 whatever it is: 16-bit products are slow there."""
        self.micro_batch = micro_batch or MicroBatch(rows=64)
        self.space = space
        self.pad_id = pad_id
        self.base_digest = base_digest or catalog.digest_of(self.model.named_parameters())
        self.stored_types = {name: parameter.dtype for name, parameter in self.model.named_parameters()}
        on_cpu = all(device.type == "cpu" for device in self.devices)
        stored = dict(self._widen()) if on_cpu else {}
        self.layer_stream, self.device_map = self._place_model(offload)
        self.catalogue = catalog.catalogue(model)
        self.causal = is_causal(self.model)
        self.share_prompts = can_share(self.model)  # candidates of one prompt continue its keys and values
        self.prefix_override: dict[str, Tensor] = {}
        """Keys and values that take the place of the trained prefix, during the check before step 1."""
        prefixes = initial_prefix(self.model, space, seed, prefix_ids)
        self.catalogue += tensor_infos(prefixes)
        self.trained: tuple[TrainedTensor, ...] = select(space, self.catalogue)
        self.transposed = {t.name for t in self.catalogue if t.transposed}
        start = {**dict(self.model.named_parameters()), **stored, **prefixes}
        kernels = not (gradients or offload or self.device_map)
        self.population = self._make_population(start, make_source(noise_kind, self.device), seed, kernels)
        modules = TrainedModules(self.model, self.population, space.scaling)
        # Before the parameters become views: a CPU runs no plain forward once they are 16-bit.
        self.frozen_cache = frozen_cache.find(model, modules.changed_by_training(), int(cache_mb * frozen_cache.MIB))
        if self.layer_stream:
            self.layer_stream.cache = self.frozen_cache
        self._share_parameters()
        self.plan = make_plan(modules, self.frozen_cache, self.prefix_override)
        self.plan.install()
        self.forward = Forward(self.model, self.population, self.frozen_cache, self.causal)
        self.at_close: Callable[[], None] = lambda: None
        self._last_rows: tuple[Batch, list[PaddedRows]] | None = None
        self.descent = GradientDescent(self) if gradients else None
        self.graphs, self.pipeline = self._make_fast_path()

    # ---- the contract

    @torch.no_grad()
    def score(self, batch: Batch, probes: Sequence[Probe]) -> Scores:
        """scores[P, B, C]: pairs of probes by micro-batches of examples, each one forward."""
        out = empty_scores(batch, len(probes))
        shared = self.share_prompts and self.causal and batch.readout.kind == "candidates"
        groups = [] if shared else self.padded_rows(batch)
        points = self.probe_points(probes)
        with self.explain_out_of_memory(max(len(point.probes) for point in points)):
            placed = list(zip(places_of(points), points, strict=True))
            if self.graphs is not None and not shared and not self.frozen_cache:
                self.graphs.score(groups, batch, [each for each in placed if len(each[1].seeds) <= 1], out)
                placed = [each for each in placed if len(each[1].seeds) > 1]
            if placed:
                self.flush_updates()
            for place, point in placed:
                with self.population.at(point):
                    if shared:
                        self._score_shared(batch, out[place])
                    else:
                        self._score_groups(groups, batch, out[place])
        return out

    def probe_points(self, probes: Sequence[Probe], by_graphs: bool = True) -> list[ProbePoint]:
        """The probes in the groups that share a forward; those of a graph, where one runs it."""
        size = self.micro_batch.members
        groups = [tuple(probes[first : first + size]) for first in range(0, len(probes), size)]
        if self.graphs is not None and by_graphs:
            groups = [part for group in groups for part in self._split_for_graphs(group)]
        return [ProbePoint(group, self.device) for group in groups]

    def _split_for_graphs(self, group: tuple[Probe, ...]) -> list[tuple[Probe, ...]]:
        """A graph serves one direction: only probes along the same directions share one. Where every probe has its own and a
        member's tensors are small, one large forward without a graph is faster than a graph for each."""
        same = [tuple(probes) for _, probes in itertools.groupby(group, key=_seeds_of)]
        return [group] if len(same) == len(group) and not self.population.large else same

    def padded_rows(self, batch: Batch) -> list[PaddedRows]:
        """The micro-batches of a batch; those of the last one are kept."""
        if self._last_rows is None or self._last_rows[0] != batch:
            self._last_rows = batch, make_rows(batch, self.micro_batch, self.pad_id)
        return self._last_rows[1]

    @contextlib.contextmanager
    def explain_out_of_memory(self, members: int) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                where = ", ".join(map(str, self.devices))
                raise RunFailed(
                    f"{where} is out of memory with {self.micro_batch.rows} examples and {members} probes in one forward; "
                    "start again with a smaller --micro-batch"
                ) from None
            raise

    def _score_groups(self, groups: Sequence[PaddedRows], batch: Batch, out: Scores) -> None:
        for rows in groups:
            scores = self.forward(rows, batch).reshape(len(out), -1, *rows.tail)
            rows.write_scores(out, scores.cpu().numpy())

    def _score_shared(self, batch: Batch, out: Scores) -> None:
        # Whether a work unit shares its prompts depends on its own rows alone, so that every worker decides alike.
        for places in group_by_length([p.ids for p in batch.prompts], self.micro_batch.rows):
            part = Batch(tuple(batch.prompts[place] for place in places), batch.readout)
            scores = empty_scores(part, len(out))
            if within_windows(self.model.config, part.prompts):
                score_candidates(self, part, scores)
            else:
                self._score_groups(make_rows(part, self.micro_batch, self.pad_id), part, scores)
            out[:, places, : scores.shape[2]] = scores

    @torch.no_grad()
    def apply(self, updates: Sequence[Update]) -> None:
        if self.pipeline is not None and self.pipeline.confirm(updates):
            return
        if self.graphs is None:
            self.population.apply_all(updates)
        else:
            self.graphs.apply(updates)

    @torch.no_grad()
    def features(self, prompts: Sequence[Prompt]) -> npt.NDArray[np.float32]:
        """[B, width]: what the last layer of the LM head reads at each prompt's position."""
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        batch, seen = Batch(tuple(prompts), Readout("words", words=(0,))), list[Tensor]()
        self.flush_updates()
        out = np.zeros((len(batch), head.in_features), dtype=np.float32)
        hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            with self.population.at((Probe(),)):
                for rows in self.padded_rows(batch):
                    self.forward(rows, batch)
                    out[rows.places[0]] = seen.pop()[:, 0].float().cpu().numpy()
        finally:
            hook.remove()
        return out

    def descend(self, step: GradientStep) -> tuple[float, float]:
        """Move the weights by a step of AdamW; the loss before it, and the gradient's norm."""
        assert self.descent is not None, "the engine was opened without gradients"
        return self.descent.step(step)

    def flush_updates(self) -> None:
        """Launch the update that waits for the next forward: before anything but a graph reads the weights."""
        if self.graphs is not None:
            self.graphs.flush()

    @torch.no_grad()
    def generate(self, batch: Batch, probes: Sequence[Probe], generation: Generation) -> Continuations:
        """Continuations by the model's own `generate`, every row at its own probe."""
        if not self.causal:
            raise ModelError(f"{type(self.model).__name__} is not a causal model: it cannot generate text")
        self.flush_updates()
        out: Continuations = []
        for point in self.probe_points(probes, by_graphs=False):
            with self.explain_out_of_memory(len(point.probes)), self.population.at(point):
                out += generate_texts(self, batch, point.probes, generation)
        return out

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        """The trained values in float32, which holds those of every type: NumPy has no bfloat16."""
        self.flush_updates()
        return {t.name: self.population.value(t.name).float().cpu().numpy().copy() for t in self.trained}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, npt.NDArray[np.generic]]) -> None:
        check_state(self.trained, tensors)
        self.flush_updates()
        if self.pipeline is not None:
            self.pipeline.cancel()
        for name, values in tensors.items():
            self.population.value(name).copy_(torch.from_numpy(np.ascontiguousarray(values)))

    def digest(self) -> str:
        self.flush_updates()
        return catalog.digest_of((t.name, self.population.value(t.name)) for t in self.trained)

    def describe(self) -> dict[str, Any]:
        return {
            "engine": "torch",
            "device": ", ".join(d.type if d.type != "cuda" else torch.cuda.get_device_name(d) for d in self.devices),
            "dtype": str(self.dtype).removeprefix("torch."),
            "torch": torch.__version__,
            "graphs": "none" if self.graphs is None else self.graphs.capture_error or "on",
            "threads": torch.get_num_threads(),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "trained_parameters": sum(int(np.prod(t.shape)) for t in self.trained),
            **({"frozen_cache": self.frozen_cache.describe()} if self.frozen_cache else {}),
        }

    def close(self) -> None:
        self.population.source.clear_cache()
        if self.graphs is not None:
            self.graphs.close()
        if self.frozen_cache:
            self.frozen_cache.clear()
        self.at_close()

    def adapter_tensors(self) -> dict[str, npt.NDArray[np.generic]]:
        """The trained tensors, and the frozen one of every pair of which only one is trained."""
        return self.state() | {name: value.cpu().numpy() for name, value in self.population.frozen.items()}

    def module_tensors(self, path: str) -> dict[str, npt.NDArray[np.generic]]:
        """All tensors of the model's module at a path, trained or not."""
        self.flush_updates()
        tensors = self.model.get_submodule(path).state_dict()
        return {f"{path}.{name}": value.float().cpu().numpy() for name, value in tensors.items()}

    @property
    def stores_transposed(self) -> bool:
        """True where weights of linear layers are stored as (in, out)."""
        return bool(self.transposed)

    @torch.no_grad()
    def merged_model(self) -> nn.Module:
        """A plain copy of the model in host memory, with what was trained in its weights, in the types they were stored in."""
        if self.space.kind == "prefix":
            raise ConfigError("a prefix is not part of a model's weights: export the adapter instead")
        if self.quantized:
            raise ConfigError("a quantised base cannot take in what was trained: export the adapter instead")
        self.flush_updates()
        copies: dict[int, Any] = {}
        for name, parameter in self.model.named_parameters():
            delta = self.lora_delta(name)
            merged = parameter.data if delta is None else parameter.data + delta.to(parameter.device)
            merged = merged.to("cpu", self.stored_types[name], copy=True)
            copies[id(parameter)] = nn.Parameter(merged, requires_grad=False)
        with contextlib.ExitStack() as without:
            for hooks in (self.plan, self.layer_stream, self.device_map):
                if hooks:
                    without.enter_context(hooks.suspended())
            return copy.deepcopy(self.model, copies).cpu()

    def lora_delta(self, name: str, factors: Mapping[str, Tensor] | None = None) -> Tensor | None:
        """What LoRA adds to the weight `name`; `factors` take the place of those trained."""
        down, up = lora_names(name)
        if down not in self.population.trained and up not in self.population.trained:
            return None
        a, b = (factors[n] if factors and n in factors else self.population.value(n) for n in (down, up))
        product = self.space.scaling * (b @ a)
        return product.T if name in self.transposed else product

    def check(self, batch: Batch, eps: float) -> None:
        """Refuse a model that the population forward gets wrong, or a space that no perturbation can train."""
        from mezzo.engines.torch.self_check import self_check

        self.flush_updates()
        self_check(self, batch, eps)

    # ---- the model's parameters

    def _place_model(self, offload: bool) -> tuple[LayerStream | None, DeviceMap | None]:
        """Move the model to where it computes."""
        try:
            if offload:
                return LayerStream(self.model, self.device), None
            if len(self.devices) > 1:
                return None, DeviceMap(self.model, self.devices)
            if not self.quantized:
                self.model.to(self.device)
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                size = sum(parameter.nbytes for parameter in self.model.parameters()) / 1e9
                raise RunFailed(
                    f"the model's {size:.1f} GB do not fit {', '.join(map(str, self.devices))}: use --dtype bfloat16, more GPUs "
                    "(--device all), --offload or --quantize 4bit"
                ) from None
            raise
        return None, None

    def _make_population(
        self, start: Mapping[str, Tensor], source: NoiseSource, seed: int, kernels: bool
    ) -> Population:
        """The trained tensors at their initial values; `start` has those that do not follow from the seed."""

        def initial(t: TrainedTensor) -> Tensor:
            return start[t.name] if t.name in start else initial_lora_factor(t, seed).to(self._device_of(t))

        partners = untrained_partners(self.space, self.trained, self.catalogue)
        compute = torch.float32 if any(device.type == "cpu" for device in self.devices) else self.dtype
        trained = [(t, initial(t)) for t in self.trained]
        return Population(trained, source, {t.name: initial(t) for t in partners}, compute, kernels)

    def _device_of(self, factor: TrainedTensor) -> torch.device:
        """Where the module computes that a LoRA factor belongs to."""
        return self.device_map.device_of(factor.name.split(".lora_")[0]) if self.device_map else self.device

    def _make_fast_path(self) -> tuple[Graphs | None, Pipeline | None]:
        if self.device.type != "cuda" or not self.population.ops.uses_kernels:
            return None, None
        from mezzo.engines.torch.gpu import graphs, pipeline

        captured = graphs.Graphs(self)
        return captured, pipeline.Pipeline(self, captured)

    def _widen(self) -> Iterator[tuple[str, Tensor]]:
        """Make the model's 16-bit tensors float32 and yield what the parameters were."""
        for name, parameter in self.model.named_parameters():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                yield name, parameter.data
                parameter.data = parameter.data.float()
        for buffer in self.model.buffers():
            if buffer.dtype in (torch.bfloat16, torch.float16):
                buffer.data = buffer.data.float()

    def _share_parameters(self) -> None:
        """Make the model's parameters views of the tensors that the population updates."""
        for name, parameter in self.model.named_parameters():
            if name in self.population.trained:
                parameter.data = self.population.value(name)


def _seeds_of(probe: Probe) -> tuple[int, ...]:
    return tuple(seed for seed, _ in probe.terms)
