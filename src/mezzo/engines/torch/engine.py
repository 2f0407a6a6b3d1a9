"""Hugging Face models in process: all probes of a unit in one forward, the base weights never written by a probe."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mezzo.engines.hf_hub import refuse_pairs
from mezzo.engines.microbatch import candidate_count, group_by_length
from mezzo.engines.torch import catalog
from mezzo.engines.torch.forward import frozen_cache, last_layer, modules, prefix
from mezzo.engines.torch.forward.forward import Forward, is_causal
from mezzo.engines.torch.forward.generation import continued
from mezzo.engines.torch.forward.inputs import Rows, pack
from mezzo.engines.torch.forward.population import Population
from mezzo.engines.torch.forward.probe_point import ProbePoint
from mezzo.engines.torch.forward.shared_prompts import can_share, score_candidates, within_windows
from mezzo.engines.torch.gpu import install
from mezzo.engines.torch.initial_values import InitialValues
from mezzo.engines.torch.merge import merged
from mezzo.engines.torch.quantized import is_quantized
from mezzo.engines.torch.weights.noise import NoiseSource
from mezzo.errors import JournalError, ModelError, RunFailed, SpaceError, out_of_memory
from mezzo.method import noise
from mezzo.method.space import Space, lora_names, prefix_names, select
from mezzo.types import Batch, MicroBatch, Probe, Scores, TensorInfo, TrainedTensor, Update

if TYPE_CHECKING:
    from mezzo.engines.torch.gpu.graphs import Graphs
    from mezzo.engines.torch.gpu.pipeline import Pipeline


class TorchEngine:
    """One model, its trained tensors and the population forward over them."""

    joins_units = True
    """Several units in one call of `score` give the same bits as one call each."""
    width = staticmethod(candidate_count)

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
        base_digest: str = "",
    ) -> None:
        refuse_pairs(model.config)
        self.device = torch.device(device)
        self.quantized = is_quantized(model)
        if self.quantized and space.kind not in ("lora", "prefix"):
            raise SpaceError(f"a quantised base stays as it is: --space lora or prefix, not {space.kind!r}")
        self.model = (model if self.quantized else model.to(self.device)).eval().requires_grad_(False)
        self.dtype: torch.dtype = self.model.dtype  # type: ignore[assignment]
        """The type of the stored weights. A CPU computes in float32 whatever it is: sixteen-bit products are slow there."""
        compute = torch.float32 if self.device.type == "cpu" else self.dtype
        self.micro_batch = micro_batch or MicroBatch(rows=64)
        self.space = space
        self.pad_id = pad_id
        self.base_digest = base_digest or catalog.digest_of(self.model.named_parameters())
        self.stored_as = {name: parameter.dtype for name, parameter in self.model.named_parameters()}
        stored = dict(self._widened()) if self.device.type == "cpu" else {}
        self.catalogue: list[TensorInfo] = catalog.catalogue(model, catalog.used_modules(model, self._tiny_inputs()))
        self.causal = is_causal(self.model)
        self.share_prompts = can_share(self.model)  # candidates of one prompt continue its keys and values
        self.stated: dict[str, Tensor] = {}  # a prefix that stands in for the trained one, while the check looks
        begin = InitialValues(self.model, space, seed, self.device, prefix_ids)
        self.catalogue += begin.catalogue
        self.trained: tuple[TrainedTensor, ...] = select(space, self.catalogue)
        self.transposed = {t.name for t in self.catalogue if t.transposed}
        self.population = Population(
            begin.tensors(self.trained, stored),
            NoiseSource(noise_kind, self.device),
            begin.partners(self.trained, self.catalogue),
            compute,
        )
        # Before the trained tensors take their places: no plain forward runs on a CPU once weights are of sixteen bits.
        self.frozen_cache = frozen_cache.find(
            model, self._moving(), self._tiny_inputs(), int(cache_mb * frozen_cache.MIB)
        )
        self._adopt()
        self.graphs: Graphs | None = None
        self.at_close: Callable[[], None] = lambda: None
        self.pipeline: Pipeline | None = None
        self._laid_out: tuple[Batch, list[Rows]] | None = None
        modules.attach(self.model, self.population, space.scaling)
        prefix.attach(self.model, self.population, self.stated.get)
        install.attach(self, space.scaling)
        last_layer.attach(self.model, self.population, self.frozen_cache.layers if self.frozen_cache else ())
        self.forward = Forward(self.model, self.population, self.frozen_cache, self.device, self.causal)

    # ---- the contract

    @torch.no_grad()
    def score(self, batch: Batch, probes: Sequence[Probe]) -> Scores:
        """scores[P, B, C]: pairs of probes by micro-batches of examples, each one forward."""
        out = np.full((len(probes), len(batch), self.width(batch)), -np.inf, dtype=np.float32)
        shared = self.share_prompts and self.causal and batch.readout.kind == "candidates"
        groups = [] if shared else self.packed(batch)
        points = self.points(probes)
        with self.explain_out_of_memory(min(len(probes), self.micro_batch.members)):
            if (
                self.graphs is not None
                and not shared
                and not self.frozen_cache
                and all(len(p.seeds) <= 1 for p in points)
            ):
                self.graphs.score(groups, batch, points, out)
            else:
                for number, point in enumerate(points):
                    first = number * self.micro_batch.members
                    self._score_plainly(groups, batch, point, out[first : first + len(point.probes)])
        return out

    def points(self, probes: Sequence[Probe]) -> list[ProbePoint]:
        size = self.micro_batch.members
        return [ProbePoint(tuple(probes[first : first + size]), self.device) for first in range(0, len(probes), size)]

    def packed(self, batch: Batch) -> list[Rows]:
        if self._laid_out is None or self._laid_out[0] != batch:
            self._laid_out = batch, pack(batch, self.micro_batch, self.pad_id)
        return self._laid_out[1]

    def _score_plainly(self, groups: Sequence[Rows], batch: Batch, point: ProbePoint, out: Scores) -> None:
        """One micro-batch after the other; no groups: prompts whose candidates share them."""
        self.settle()
        with self.population.at(point):
            self._score_groups(groups, batch, len(point.probes), out)
            if not groups:
                self._score_shared(batch, len(point.probes), out)

    @contextlib.contextmanager
    def explain_out_of_memory(self, members: int) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if out_of_memory(error):
                raise RunFailed(
                    f"{self.device} is out of memory with {self.micro_batch.rows} examples and {members} probes in one forward; "
                    "start again with a smaller --micro-batch"
                ) from None
            raise

    def _score_groups(self, groups: Sequence[Rows], batch: Batch, members: int, out: Scores) -> None:
        for rows in groups:
            scores = self.forward(rows, batch).reshape(members, -1, *rows.tail)
            rows.place(out, scores.cpu().numpy())

    def _score_shared(self, batch: Batch, members: int, out: Scores) -> None:
        # Whether a unit shares its prompts is decided by its own rows, so that whoever computes it decides alike.
        for places in group_by_length([p.ids for p in batch.prompts], self.micro_batch.rows):
            part = Batch(tuple(batch.prompts[place] for place in places), batch.readout)
            if within_windows(self.model.config, part.prompts):
                found = score_candidates(self, part.prompts, batch.readout)
            else:
                found = np.full((members, len(part), self.width(part)), -np.inf, dtype=np.float32)
                self._score_groups(pack(part, self.micro_batch, self.pad_id), part, members, found)
            out[:, places, : found.shape[2]] = found

    @torch.no_grad()
    def apply(self, updates: Sequence[Update]) -> None:
        if self.pipeline is not None and self.pipeline.confirm(updates):
            return
        if self.graphs is None:
            self.population.replay(updates)
        else:
            self.graphs.apply(updates)

    def settle(self) -> None:
        """Launch what was applied and waits for the next forward: before anybody but a graph looks at the weights."""
        if self.graphs is not None:
            self.graphs.flush()

    @torch.no_grad()
    def generate(self, batch: Batch, probes: Sequence[Probe], max_new_tokens: int) -> list[list[tuple[int, ...]]]:
        """Greedy continuations by the model's own `generate`, every row at its own probe."""
        if not self.causal:
            raise ModelError(f"{type(self.model).__name__} is not a causal model: it cannot generate text")
        self.settle()
        out: list[list[tuple[int, ...]]] = []
        for first in range(0, len(probes), self.micro_batch.members):
            with self.population.at(probes[first : first + self.micro_batch.members]):
                out += continued(self, batch, max_new_tokens)
        return out

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        """The trained values in float32, which holds those of every type: NumPy has no bfloat16."""
        self.settle()
        return {t.name: self.population.value(t.name).float().cpu().numpy().copy() for t in self.trained}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, npt.NDArray[np.generic]]) -> None:
        if set(tensors) != {t.name for t in self.trained}:
            raise JournalError("the tensors do not belong to this run: their names differ")
        self.settle()
        if self.pipeline is not None:
            self.pipeline.cancel()
        for trained in self.trained:
            value = self.population.value(trained.name)
            if tuple(tensors[trained.name].shape) != trained.shape:
                raise JournalError(f"{trained.name} has shape {tensors[trained.name].shape}, expected {trained.shape}")
            value.copy_(torch.from_numpy(np.ascontiguousarray(tensors[trained.name])))

    def digest(self) -> str:
        self.settle()
        return catalog.digest_of((t.name, self.population.value(t.name)) for t in self.trained)

    def describe(self) -> dict[str, Any]:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        return {
            "engine": "torch",
            "device": name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "torch": torch.__version__,
            "graphs": "none" if self.graphs is None else self.graphs.capture_error or "on",
            "threads": torch.get_num_threads(),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "trained_parameters": sum(int(np.prod(t.shape)) for t in self.trained),
            **({"trunk": self.frozen_cache.describe()} if self.frozen_cache else {}),
        }

    def close(self) -> None:
        self.population.source.clear_cache()
        if self.graphs is not None:
            self.graphs.close()
        if self.frozen_cache:
            self.frozen_cache.forget()
        self.at_close()

    def merged(self) -> nn.Module:
        """A plain copy of the model with what was trained in its weights: what `save_pretrained` should write."""
        self.settle()
        return merged(self)

    def lora_delta(self, name: str, moved: Mapping[str, Tensor] | None = None) -> Tensor | None:
        """What LoRA adds to the weight `name`, its factors taken from `moved` where they are there."""
        down, up = lora_names(name)
        if down not in self.population.trained and up not in self.population.trained:
            return None
        found = {n: moved[n] if moved and n in moved else self.population.value(n) for n in (down, up)}
        product = self.space.scaling * (found[up] @ found[down])
        return product.T if name in self.transposed else product

    def check(self, batch: Batch, eps: float) -> None:
        """Refuse a model that the population forward gets wrong, or a space that no perturbation can train."""
        from mezzo.engines.torch.self_check import self_check

        self.settle()
        self_check(self, batch, eps)

    # ---- taking the model over

    def _widened(self) -> Iterator[tuple[str, Tensor]]:
        """Make the model's sixteen-bit tensors float32 and yield what the parameters were."""
        for name, parameter in self.model.named_parameters():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                yield name, parameter.data
                parameter.data = parameter.data.float()
        for buffer in self.model.buffers():
            if buffer.dtype in (torch.bfloat16, torch.float16):
                buffer.data = buffer.data.float()

    def _adopt(self) -> None:
        """Let the model's parameters be views of what the population owns and updates."""
        for name, parameter in self.model.named_parameters():
            if name in self.population.trained:
                parameter.data = self.population.value(name)

    def _tiny_inputs(self) -> dict[str, Tensor]:
        ids = torch.tensor([[0, 1]], device=self.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def _moving(self) -> set[nn.Module]:
        """The modules whose outcome training changes: owners of trained tensors, tied ones included, and LoRA's targets."""
        names = catalog.canonical_names(self.model)
        trained = {t.name for t in self.trained}
        found = {module for _, module, _, parameter in catalog.owners(self.model) if names[id(parameter)] in trained}
        for path, module in self.model.named_modules():
            if any(name in trained for name in (*lora_names(f"{path}.weight"), *prefix_names(path))):
                found.add(module)
        return found
