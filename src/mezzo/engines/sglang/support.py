"""What can be trained on SGLang. It is decided from names alone, so that the rest is refused before anything starts."""

from __future__ import annotations

from collections.abc import Sequence

from mezzo.engines.lora_factors import module_of, projection_of
from mezzo.engines.registry import ENGINES
from mezzo.engines.sglang.module_names import ENCODER_LAYER, sglang_path
from mezzo.errors import ModelError, SpaceError
from mezzo.method.space import Space
from mezzo.types import Family, TrainedTensor

TRAINABLE_SPACES = ENGINES["sglang"].spaces
# The modules that SGLang's adapters reach; `mid_proj` exists only in this package's own encoder.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "mid_proj")


# Causal architectures whose adapters SGLang serves as transformers computes them: a tiny one of each is tested.
ARCHITECTURES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "opt", "gemma", "gemma2", "gemma3_text"),
    *("granite", "phi", "olmo2", "starcoder2", "stablelm", "cohere", "cohere2", "olmo", "glm4", "arcee"),
    *("ministral3", "granitemoe", "olmoe", "qwen3_moe"),
)


# Masked ones that this package's own encoder computes (`models.encoder`).
ENCODERS = ("roberta", "xlm-roberta", "camembert", "bert")


def refuse_architecture(model_type: str, family: Family) -> None:
    """Raise ModelError for a model that is not known to be served correctly."""
    tested = ARCHITECTURES if family == "causal" else ENCODERS
    if model_type not in tested:
        raise ModelError(
            f"{family} {model_type!r} models are not tested on SGLang with adapters: use --engine torch "
            f"(tested: {', '.join(tested)})"
        )


def refuse_head(classes: int) -> None:
    """Raise ModelError for a classification head."""
    if classes:
        raise ModelError("SGLang serves no classification head; use --readout words or candidates, or --engine torch")


def refuse_server_targets(space: Space, targets: Sequence[str]) -> None:
    """Raise SpaceError for adapters that SGLang's command line has no word for, though its engine takes them."""
    if "mid_proj" in targets:
        option = "--targets query,value" if space.kind == "lora" else "--only *attention*"
        raise SpaceError(
            f"a server cannot be started with adapters on intermediate.dense; use {option}, or leave out --url"
        )


def refuse_tensors(space: Space, trained: Sequence[TrainedTensor]) -> None:
    """Raise SpaceError for modules that SGLang cannot attach an adapter to, or not in this combination."""
    names = sorted({projection_of(sglang_path(module_of(t.name))) for t in trained})
    if unsupported := [name for name in names if name not in PROJECTIONS]:
        rest = [name for name in names if name in PROJECTIONS]
        option = "--targets " + ",".join(rest) if space.kind == "lora" else "--only " + ",".join(f"*{n}*" for n in rest)
        remedy = f"{option}, or --engine torch" if rest else "--engine torch"
        raise SpaceError(f"SGLang cannot attach adapters to {', '.join(unsupported)} of this model; use {remedy}")
    attention = {"q_proj", "k_proj", "v_proj"} & set(names)
    if space.kind == "lora" and attention and not attention >= {"q_proj", "v_proj"}:
        targets = "query,value" if ENCODER_LAYER.match(trained[0].name) else "q_proj,v_proj"
        raise SpaceError(
            f"SGLang cannot serve an adapter on {', '.join(sorted(attention))} alone: it fuses query, key and value and "
            f"expects query and value together. Use --targets {targets}, or --engine torch"
        )
    if space.kind == "matrices" and (small := [t for t in trained if not t.rank]):
        raise SpaceError(
            f"{small[0].name} of shape {small[0].shape} is too small for low-rank noise of rank {space.noise_rank}; "
            f"lower --noise-rank below {min(small[0].shape)}"
        )
