"""What is known about the model before SGLang is involved: digest, tensors and sizes, read with transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from mezzo.engines.arrays import Array, to_numpy
from mezzo.engines.base import EngineSpec
from mezzo.engines.hf_hub import load_config, load_tokenizer
from mezzo.engines.registry import refuse_space
from mezzo.engines.sglang.support import TRAINABLE_SPACES, refuse_architecture, refuse_tensors
from mezzo.engines.torch import catalog
from mezzo.engines.torch.initial_values import initial_lora_factor, untrained_partners
from mezzo.engines.torch.loading import load_model
from mezzo.errors import ModelError
from mezzo.method.space import select
from mezzo.types import Readout, TrainedTensor

SAMPLE_TOKENS = tuple(range(4, 12))


@dataclass(frozen=True)
class MaskDecoder:
    """The last layer of a masked model: from the vector at the mask to the words."""

    mask_token: int
    weight: torch.Tensor
    bias: torch.Tensor

    @torch.no_grad()
    def scores(self, vectors: Sequence[Sequence[float]], readout: Readout) -> list[list[float]]:
        """The scores of the label words of each row; with `vocabulary`, their log-probabilities."""
        words, hidden = list(readout.words), torch.tensor(vectors)
        if readout.vocabulary:
            logits = F.linear(hidden, self.weight.float(), self.bias.float()).log_softmax(-1)[:, words]
        else:
            logits = F.linear(hidden, self.weight[words].float(), self.bias[words].float())
        return [[float(score) for score in row] for row in logits]


@dataclass(frozen=True)
class ModelFacts:
    """A checkpoint, its trained tensors, and what is needed to recognise SGLang's copy of it."""

    base_digest: str
    parameters: int
    trained: tuple[TrainedTensor, ...]
    frozen: tuple[TrainedTensor, ...]
    """LoRA factors that are not trained, but whose partner is."""
    initial_digest: str
    """Digest of the trained tensors before step 1; SGLang's copy of them must have it too."""
    sample_logprobs: tuple[float, ...] = ()
    """Log-probabilities of SAMPLE_TOKENS after the prompt SAMPLE_TOKENS, or at a mask there; another model has others."""
    matrices: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The trained matrices themselves, where servers train them in place."""
    decoder: MaskDecoder | None = None
    """The end of a masked model, where servers return what it reads."""


def read_model_facts(spec: EngineSpec) -> ModelFacts:
    """Read the checkpoint once with transformers; names, digest and selection are then the same as on the torch engine."""
    space = spec.space
    refuse_architecture(load_config(spec.model, spec.remote_code).model_type, spec.family)
    if space.kind in TRAINABLE_SPACES:
        refuse_space("sglang", space)
    dtype = getattr(torch, spec.dtype)
    # In the dtype of its file a checkpoint is mapped into memory, not copied: a client of servers needs no room for it.
    model = load_model(spec.model, spec.family, seed=spec.seed, dtype="auto", remote_code=spec.remote_code)
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    with computing_in_float32(model):
        tensors = catalog.catalogue(model)
        decoder = _mask_decoder(spec, model) if spec.urls and spec.family == "masked" else None
        sample_logprobs = _sample_logprobs(model, sample_tokens(decoder)) if spec.urls else ()
    trained = select(space, tensors)
    if space.kind in TRAINABLE_SPACES:
        refuse_tensors(space, trained)
    matrices = {t.name: parameters[t.name].to(dtype) for t in trained if t.name in parameters}
    initial = matrices or {t.name: initial_lora_factor(t, spec.seed) for t in trained}
    return ModelFacts(
        base_digest=catalog.digest_of(parameters.items(), dtype),
        parameters=sum(p.numel() for p in parameters.values()),
        trained=trained,
        frozen=untrained_partners(space, trained, tensors),
        initial_digest=catalog.digest_of(initial.items()),
        sample_logprobs=sample_logprobs,
        matrices=matrices if spec.urls and space.kind == "matrices" else {},
        decoder=decoder,
    )


@contextmanager
def computing_in_float32(model: torch.nn.Module) -> Iterator[None]:
    """Inside the block each module computes with float32 copies of its parameters, which exist only while it runs."""
    stored: dict[torch.nn.Module, dict[str, Any]] = {}

    def convert(module: torch.nn.Module, _: Any) -> None:
        stored[module] = dict(module._parameters)
        for name, parameter in stored[module].items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(parameter.float(), requires_grad=False)

    def restore(module: torch.nn.Module, *_: Any) -> None:
        module._parameters.update(stored.pop(module))

    with ExitStack() as hooks:
        for module in model.modules():
            if any(each.dtype != torch.float32 for each in module.parameters(recurse=False)):
                hooks.enter_context(module.register_forward_pre_hook(convert))
                hooks.enter_context(module.register_forward_hook(restore, always_call=True))
        yield


def read_matrices(spec: EngineSpec, names: Sequence[str]) -> dict[str, Array]:
    """The checkpoint's own values of some matrices."""
    dtype = getattr(torch, spec.dtype)
    model = load_model(spec.model, spec.family, seed=spec.seed, dtype=dtype, remote_code=spec.remote_code)
    matrices = {name: parameter for name, parameter in model.named_parameters() if parameter.ndim == 2}
    if unknown := next((name for name in names if name not in matrices), ""):
        raise ModelError(f"{spec.model} has no matrix {unknown!r}, which a server says was changed: restart the server")
    return {name: to_numpy(matrices[name]) for name in names}


def mask_token_of(spec: EngineSpec) -> int:
    return int(load_tokenizer(spec.model, spec.remote_code).mask_token_id)


def _mask_decoder(spec: EngineSpec, model: Any) -> MaskDecoder:
    layer = model.get_output_embeddings()
    return MaskDecoder(mask_token_of(spec), layer.weight.data, layer.bias.data)


def sample_tokens(decoder: MaskDecoder | None) -> tuple[int, ...]:
    """The prompt whose end is compared; a masked model is read there at its mask."""
    if decoder is None:
        return SAMPLE_TOKENS
    return (*(token for token in SAMPLE_TOKENS if token != decoder.mask_token), decoder.mask_token)


@torch.no_grad()
def _sample_logprobs(model: torch.nn.Module, prompt: tuple[int, ...]) -> tuple[float, ...]:
    logits = model(input_ids=torch.tensor([prompt])).logits[0, -1].float()
    return tuple(float(value) for value in logits.log_softmax(-1)[list(SAMPLE_TOKENS)])
