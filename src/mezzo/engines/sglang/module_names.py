"""Names of modules: Hugging Face's, by which tensors are trained, and SGLang's, under which its layers hold them."""

from __future__ import annotations

import re

# SGLang's fused modules and the Hugging Face modules they hold, in the order of their rows.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
ENCODER_LAYER = re.compile(r"(?:bert|roberta)\.encoder\.layer\.(\d+)\.(.+)")
# This package's own model for masked language models, and where SGLang finds it.
ENCODER, MODEL_PACKAGE = "EncoderForMaskedLM", "mezzo.engines.sglang.models"
# Modules of an encoder layer and their names in this package's own model (`models.encoder`).
ENCODER_PROJECTIONS = {
    "attention.self.query": "q_proj",
    "attention.self.key": "k_proj",
    "attention.self.value": "v_proj",
    "attention.output.dense": "o_proj",
    "intermediate.dense": "mid_proj",
    "output.dense": "down_proj",
}


def sglang_path(module: str) -> str:
    """SGLang's path of a Hugging Face module: the same, except in this package's own encoder."""
    if (match := ENCODER_LAYER.fullmatch(module)) and match[2] in ENCODER_PROJECTIONS:
        return f"layers.{match[1]}.{ENCODER_PROJECTIONS[match[2]]}"
    return module
