"""What can be trained on SGLang, decided from names alone: refused early, with the remedy."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mezzo.engines.registry import ENGINES
from mezzo.errors import SpaceError
from mezzo.method.space import Space
from mezzo.types import TrainedTensor

LEAVES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "mid_proj")
"""The projections that SGLang's adapters reach; `mid_proj` is this package's name in its own encoder."""
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""SGLang's fused modules and the Hugging Face modules they hold, in the order of their rows."""
TRAINABLE = ENGINES["sglang"].spaces


def module_of(name: str) -> str:
    """The Hugging Face module of a trained tensor: a LoRA factor's or a weight's."""
    return name.removesuffix(".weight").removesuffix(".lora_A").removesuffix(".lora_B")


ENCODER = re.compile(r"roberta\.encoder\.layer\.(\d+)\.(.+)")
ENCODER_LEAVES = {
    "attention.self.query": "q_proj",
    "attention.self.key": "k_proj",
    "attention.self.value": "v_proj",
    "attention.output.dense": "o_proj",
    "intermediate.dense": "mid_proj",
    "output.dense": "down_proj",
}


def served(module: str) -> str:
    """SGLang's path of a Hugging Face module: the same, but for the encoder of this package (`models.roberta`)."""
    if (found := ENCODER.fullmatch(module)) and found[2] in ENCODER_LEAVES:
        return f"layers.{found[1]}.{ENCODER_LEAVES[found[2]]}"
    return module


def leaf_of(module: str) -> str:
    return module.rsplit(".", 1)[-1]


def refuse_space(space: Space) -> None:
    """Adapters reach projections only, so that only two spaces can be perturbed."""
    if space.kind not in TRAINABLE:
        raise SpaceError(
            f"the sglang engine trains the spaces {' and '.join(TRAINABLE)}: SGLang's adapters reach projections, not "
            f"norms, biases or embeddings. Use --space lora, or --engine torch for {space.kind!r}"
        )
    if space.kind in ENGINES["sglang"].low_rank_spaces and not space.noise_rank:
        raise SpaceError(
            f"on the sglang engine the directions of space {space.kind!r} must be adapters: use --noise lowrank, "
            "or --engine torch for dense noise"
        )


def refuse_tensors(space: Space, trained: Sequence[TrainedTensor]) -> None:
    """Modules that SGLang cannot attach an adapter to, or not in this combination."""
    leaves = sorted({leaf_of(served(module_of(t.name))) for t in trained})
    foreign = [leaf for leaf in leaves if leaf not in LEAVES]
    if foreign:
        kept = [leaf for leaf in leaves if leaf in LEAVES]
        option = "--targets " + ",".join(kept) if space.kind == "lora" else "--only " + ",".join(f"*{k}*" for k in kept)
        remedy = f"{option}, or --engine torch" if kept else "--engine torch"
        raise SpaceError(f"SGLang cannot attach adapters to {', '.join(foreign)} of this model; use {remedy}")
    attention = {"q_proj", "k_proj", "v_proj"} & set(leaves)
    if space.kind == "lora" and attention and not attention >= {"q_proj", "v_proj"}:
        names = "query,value" if ENCODER.match(trained[0].name) else "q_proj,v_proj"
        raise SpaceError(
            f"SGLang cannot serve an adapter on {', '.join(sorted(attention))} alone: it fuses query, key and value and "
            f"expects query and value together. Use --targets {names}, or --engine torch"
        )
    thin = [t for t in trained if space.kind == "matrices" and not t.rank]
    if thin:
        raise SpaceError(
            f"{thin[0].name} of shape {thin[0].shape} is too thin for low-rank noise of rank {space.noise_rank}; "
            f"lower --noise-rank below {min(thin[0].shape)}"
        )
