"""Which modules of a model hold which trained tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from mezzo.engines.torch import catalog
from mezzo.engines.torch.forward.population import Population
from mezzo.method.space import lora_names, prefix_names


@dataclass(frozen=True, slots=True)
class TrainedModule:
    """What is trained in one module."""

    path: str
    tensors: dict[str, str] = field(default_factory=dict)
    """The module's own name of a parameter → the name of the trained tensor."""
    lora: tuple[str, str] | None = None
    """Names of the factors A and B, if at least one of them is trained."""
    scaling: float = 1.0
    """What LoRA's product is multiplied by."""
    is_head: bool = False
    """True for the LM head, of which only the label words may be needed."""


class TrainedModules:
    """A model, its population, and how the modules of one and the tensors of the other belong together."""

    def __init__(self, model: nn.Module, population: Population, scaling: float) -> None:
        self.model, self.population, self.scaling = model, population, scaling
        self.names = catalog.canonical_names(model)
        getter = getattr(model, "get_output_embeddings", None)
        self.head: nn.Module | None = getter() if getter else None
        """The linear layer that turns hidden states into logits of the vocabulary, if the model has one."""
        leaves = (module for module in model.modules() if not list(module.children()))
        self._in_leaves = {id(parameter) for leaf in leaves for parameter in leaf.parameters(recurse=False)}

    def trained_name(self, parameter: Tensor | None) -> str | None:
        """The name of a parameter that is trained."""
        name = self.names.get(id(parameter))
        return name if name in self.population.trained else None

    def find(self, path: str, module: nn.Module) -> TrainedModule | None:
        """What is trained in a module; the LM head counts even if nothing is."""
        tensors = {
            key: name
            for key, parameter in module.named_parameters(recurse=False)
            if (name := self.trained_name(parameter)) is not None
        }
        if list(module.children()):
            # A parent that only shares a leaf's tensor (RoBERTa's lm_head.bias) leaves the work to the leaf.
            tensors = {key: name for key, name in tensors.items() if id(getattr(module, key)) not in self._in_leaves}
        factors = lora_names(f"{path}.weight")
        lora = factors if any(name in self.population.trained for name in factors) else None
        is_head = module is self.head
        return TrainedModule(path, tensors, lora, self.scaling, is_head) if tensors or lora or is_head else None

    def changed_by_training(self) -> set[nn.Module]:
        """Modules whose output training changes: owners of trained tensors, tied ones included, LoRA and prefix targets."""
        trained = self.population.trained
        changed = {
            module for module, _, parameter in catalog.parameter_owners(self.model) if self.trained_name(parameter)
        }
        for path, module in self.model.named_modules():
            if any(name in trained for name in (*lora_names(f"{path}.weight"), *prefix_names(path))):
                changed.add(module)
        return changed
