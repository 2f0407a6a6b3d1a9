"""Whole layers of BERT-like encoders in few kernels: query, key and value by one product, and one kernel between products.

At the unperturbed weights and along one direction, whatever is trained. A layer with a part that is not known here, or whose
tensors are trained in an unknown mixture, keeps its own code, and its modules the forwards they have otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import GELUActivation

from mezzo.engines.architectures import ENCODER_LINEARS, ENCODER_NORMS, Part, part_of
from mezzo.engines.torch.forward.choice import Choice
from mezzo.engines.torch.forward.last_layer import find_last_layer
from mezzo.engines.torch.forward.modules import Forward
from mezzo.engines.torch.forward.population import Population
from mezzo.engines.torch.forward.trained_modules import TrainedModules
from mezzo.engines.torch.gpu.fused_ops import STACK_ALIGN
from mezzo.engines.torch.gpu.graph_ops import GraphOps
from mezzo.engines.torch.gpu.kernels import encoder, lowrank, norms
from mezzo.engines.torch.gpu.lowrank_layers import LowRankLinear, find_factors, join_factors

NAME = "encoder kernels"
# Lines below weights come in multiples of this, so that rows of a product begin where kernels read whole vectors.
LINES = 16


def choose(path: str, module: Any, modules: TrainedModules, cached: Collection[nn.Module]) -> Choice | None:
    """Kernels for an encoder layer; those in `cached` have no need of them."""
    if part_of(module) is not Part.ENCODER_LAYER:
        return None
    reason = _model_refusal(module, modules, cached) or _layer_refusal(path, module, modules)
    if reason:
        return Choice(NAME, reason=reason)
    return Choice(NAME, lambda inner: EncoderLayer(path, module, modules).forward_or(inner))


def _model_refusal(layer: nn.Module, modules: TrainedModules, cached: Collection[nn.Module]) -> str:
    config: Any = modules.model.config
    if layer in cached:
        return "its output is cached"
    if getattr(config, "_attn_implementation", "") != "sdpa":
        return f"its attention is {config._attn_implementation!r}"
    if getattr(config, "is_decoder", False):
        return "it is a decoder"
    return "it is the last layer" if layer is find_last_layer(modules.model) else ""


def _layer_refusal(path: str, layer: Any, modules: TrainedModules) -> str:
    """Why a layer keeps its own code; empty where all of its parts are what this file computes."""
    linears = [[(f"{path}.{name}", layer.get_submodule(name)) for name in group] for group in ENCODER_LINEARS]
    layer_norms = [layer.get_submodule(name) for name in ENCODER_NORMS]
    if getattr(layer, "add_cross_attention", False):
        return "it has cross-attention"
    if type(layer.intermediate.intermediate_act_fn) is not GELUActivation:
        return f"its activation is {type(layer.intermediate.intermediate_act_fn).__name__}"
    if not all(
        type(norm) is nn.LayerNorm and norm.weight is not None and norm.bias is not None for norm in layer_norms
    ):
        return "its norms are not plain layer norms"
    for here, linear in (pair for group in linears for pair in group):
        factors = find_factors(here, linear, modules)
        if isinstance(factors, str):
            return f"{here.removeprefix(path + '.')}: {factors}"
    reasons = (_group_refusal([linear for _, linear in group], modules) for group in linears)
    return next((reason for reason in reasons if reason), "")


def _group_refusal(linears: Sequence[Any], modules: TrainedModules) -> str:
    """Weights of a group must be trained densely, and large, or none of them; and all of its biases, or none."""
    population = modules.population
    if not all(type(linear) is nn.Linear and linear.bias is not None for linear in linears):
        return "a linear layer has another class, or no bias"
    if len({modules.trained_name(linear.bias) is None for linear in linears}) > 1:
        return "some biases of query, key and value are trained and some are not"
    first = linears[0].weight
    if any(linear.weight.dtype != population.compute or linear.weight.shape != first.shape for linear in linears):
        return "weights that are multiplied together differ in shape, or in type from the activations"
    names = [modules.trained_name(linear.weight) for linear in linears]
    dense = [name for name in names if name and not population.trained[name].rank]
    if dense and len(dense) < len(names):
        return "some weights of query, key and value are trained densely and some are not"
    if any(name not in population.large for name in dense):
        return "weights with dense noise are small"
    if dense and len(linears) > 1 and first.numel() % STACK_ALIGN:
        return f"weights with dense noise are not multiples of {STACK_ALIGN} elements"
    return ""


class JointLinear:
    """Linear layers that read one input, as one product without bias. All are trained densely, or none is.

    Factors V of low-rank noise lie below the weights, so that the product's last columns are x·V.
    """

    def __init__(self, linears: Sequence[tuple[str, nn.Linear]], modules: TrainedModules) -> None:
        self.population = population = modules.population
        self.names = [modules.names[id(linear.weight)] for _, linear in linears]
        self.biases = [(linear.bias, modules.trained_name(linear.bias)) for _, linear in linears]
        self.dense = all(name in population.large and not population.trained[name].rank for name in self.names)
        layers = [None if self.dense else find_factors(path, linear, modules) for path, linear in linears]
        low_rank = [layer for layer in layers if isinstance(layer, LowRankLinear)]
        self.factors = join_factors(low_rank) if low_rank else None
        self.places = tuple(low_rank.index(layer) if isinstance(layer, LowRankLinear) else -1 for layer in layers)
        """Which of the factors belong to which of the layers."""
        fits_below = bool(low_rank) and len(low_rank[0].components) == 1 and low_rank[0].rank <= norms.MAX_TERM_RANK
        self.factor_lines = len(low_rank) * low_rank[0].rank if fits_below else 0
        """Lines below the weights that hold factors."""
        self.stacked = self._stack_weights([linear for _, linear in linears])
        self.weight = self.stacked[: sum(linear.out_features for _, linear in linears)]
        if self.factor_lines:
            self._keep_factors_below(low_rank, linears[0][1].out_features)

    def __call__(self, x: Tensor) -> tuple[Tensor, lowrank.LowRankTerm | None]:
        """[rows, outputs of all layers side by side], and their low-rank term, which is still to be added."""
        population = self.population
        if self.dense and population.perturbed:
            members = population.stacked_member_matrix(self.names, self.weight)
            return torch.bmm(x.view(len(members), -1, x.shape[1]), members.mT).view(len(x), -1), None
        if self.factors is None or not population.perturbed:
            return torch.mm(x, self.weight.T), None
        if not self.factor_lines:
            return torch.mm(x, self.weight.T), self._term(x, self.factors)
        y, width = torch.mm(x, self.stacked.T), len(self.weight)
        t = y[None, :, width : width + self.factor_lines]
        return y[:, :width], lowrank.LowRankTerm(t, self.factors, population.point.scales, self.places, self.up)

    def with_lora(self, x: Tensor) -> tuple[Tensor, lowrank.LowRankTerm | None]:
        """The same for a single layer whose reader adds low-rank noise only: LoRA's term is in the product already."""
        if self.factors is None or self.factor_lines or not self.population.perturbed:
            return self(x)
        y = torch.empty((len(x), len(self.weight)), device=x.device, dtype=x.dtype)
        lowrank.project_up(y[None], self._term(x, self.factors), None)
        return y.addmm_(x, self.weight.T), None

    def bias(self, number: int = 0) -> Tensor:
        """[P, n] of one of the layers."""
        return _member_vectors(*self.biases[number], self.population)

    def _term(self, x: Tensor, factors: lowrank.Factors) -> lowrank.LowRankTerm:
        scales = self.population.point.scales
        return lowrank.LowRankTerm(lowrank.project_down(x, factors, scales), factors, scales, self.places)

    def _stack_weights(self, linears: Sequence[nn.Linear]) -> Tensor:
        """The weights below each other in one tensor, of which the model's own become views, and lines for factors below them."""
        if len(linears) == 1 and not self.factor_lines:
            return linears[0].weight.detach()
        weights = [linear.weight.detach() for linear in linears]
        lines = -(-self.factor_lines // LINES) * LINES
        stacked = torch.cat([*weights, weights[0].new_zeros((lines, weights[0].shape[1]))])
        views = torch.split(stacked, [*(len(weight) for weight in weights), lines])
        for linear, name, view in zip(linears, self.names, views[:-1], strict=True):
            linear.weight.data = view
            if name in self.population.large:
                self.population.large[name] = view
        return stacked

    def _keep_factors_below(self, layers: Sequence[LowRankLinear], width: int) -> None:
        ops = self.population.ops
        assert isinstance(ops, GraphOps)
        self.up = self.weight.new_zeros(self.factor_lines * width).view(len(layers), -1, width)
        lines = self.stacked[len(self.weight) :][: self.factor_lines].chunk(len(layers))
        for layer, down, up in zip(layers, lines, self.up, strict=True):
            ops.keep_transposed(layer.down, down)
            ops.keep_transposed(layer.up, up)


class EncoderLayer:
    """One layer: attention, residual and norm, the two products of the block and GELU between them, residual and norm."""

    def __init__(self, path: str, layer: Any, modules: TrainedModules) -> None:
        self.population = modules.population
        attention = layer.attention.self
        self.heads, self.scaling = attention.num_attention_heads, attention.scaling
        joint = [
            JointLinear([(f"{path}.{name}", layer.get_submodule(name)) for name in group], modules)
            for group in ENCODER_LINEARS
        ]
        self.query_key_value, self.attention_output, self.intermediate, self.output = joint
        self.norms = [_MemberNorm(layer.get_submodule(name), modules) for name in ENCODER_NORMS]
        self.has_lora = any(one.factors is not None and len(one.factors.components) > 1 for one in joint)

    def forward_or(self, inner: Forward) -> Forward:
        """The forward of the layer, and `inner` where the kernels cannot be used."""

        def forward(hidden: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
            if self.usable(hidden, attention_mask):
                return self.forward(hidden, attention_mask)
            return inner(hidden, attention_mask, *args, **kwargs)

        return forward

    def usable(self, hidden: Tensor, mask: Tensor | None) -> bool:
        population, context = self.population, self.population.context
        has_term = population.perturbed or self.has_lora  # LoRA's is there at any point
        return (
            bool(population.members)
            and (context.point.single or not has_term)
            and not context.own_tokens
            and hidden.is_contiguous()
            and hidden.dtype == population.compute
            and hidden.shape[0] == population.members * context.rows
            and hidden.shape[1] <= encoder.MAX_TOKENS[hidden.dtype]
            and (mask is None or (mask.dtype == torch.bool and mask.ndim == 4 and mask.shape[1] == 1))
        )

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        x = hidden.view(-1, hidden.shape[-1])
        joint, members = self.query_key_value, self.population.members
        biases = (joint.bias(0), joint.bias(1), joint.bias(2))
        y, term = joint(x)
        attended = encoder.attend(y, biases, hidden.shape[1], self.heads, self.scaling, members, term, mask)
        x = self.norms[0](self.attention_output, attended, x)
        wide, term = self.intermediate(x)
        if term is None:
            norms.add_bias(wide, self.intermediate.bias(), gelu=True)
        else:
            encoder.gelu(wide, self.intermediate.bias(), members, term)
        return self.norms[1](self.output, wide, x).view(hidden.shape)


class _MemberNorm:
    """Linear layer, residual and norm."""

    def __init__(self, norm: Any, modules: TrainedModules) -> None:
        self.population, self.eps = modules.population, norm.eps
        self.gain, self.shift = ((p, modules.trained_name(p)) for p in (norm.weight, norm.bias))

    def __call__(self, linear: JointLinear, x: Tensor, residual: Tensor) -> Tensor:
        gain, shift = (_member_vectors(*vector, self.population) for vector in (self.gain, self.shift))
        y, term = linear.with_lora(x)
        return norms.norm(y, gain, shift, self.eps, residual, linear.bias(), term=term)


def _member_vectors(parameter: Tensor, name: str | None, population: Population) -> Tensor:
    """[P, n]: the members' own, or one vector seen P times."""
    if population.perturbed and name is not None:
        return population.member_tensor(name)
    return parameter.detach().expand(population.members, -1)
