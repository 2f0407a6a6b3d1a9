"""A transformers or PEFT model that a program holds: saved as a base to train from, and given the trained weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mezzo.engines.hf_hub import quiet
from mezzo.errors import ConfigError


def save_base(model: Any, tokenizer: Any, folder: Path) -> Path:
    """Write the model, of a PEFT model the base without its adapters, with its tokenizer."""
    if folder.exists():
        raise ConfigError(f"{folder.parent} has been used for a run; choose another output_dir")
    base = model
    state = None
    if hasattr(model, "peft_config"):
        base = model.get_base_model()
        parameters = {name: value for name, value in base.state_dict().items() if ".lora_" not in name}
        state = {name.replace(".base_layer.", "."): value for name, value in parameters.items()}
    with quiet():
        base.save_pretrained(folder, state_dict=state)
        tokenizer.save_pretrained(folder)
    return folder


def read_lora(model: Any) -> dict[str, Any]:
    """The options that describe a PEFT model's LoRA; empty for a plain model."""
    configs = getattr(model, "peft_config", None)
    if not configs:
        return {}
    adapter = configs[model.active_adapter]
    if str(getattr(adapter.peft_type, "value", adapter.peft_type)) != "LORA" or adapter.modules_to_save:
        raise ConfigError("of PEFT's methods, MezzoTrainer trains plain LoRA; merge_and_unload() the adapter first")
    trained = [name for name, value in model.named_parameters() if ".lora_B." in name and torch.any(value != 0)]
    if trained:
        raise ConfigError(f"this adapter has been trained already ({trained[0]}); merge_and_unload() it first")
    modules = [name.split(".lora_A.")[0] for name, _ in model.named_parameters() if ".lora_A." in name]
    names = sorted({name.rpartition(".")[2] for name in modules})
    return {"space": "lora", "rank": adapter.r, "alpha": float(adapter.lora_alpha), "targets": tuple(names)}


def write_back(model: Any, folder: Path) -> None:
    """Load exported weights into the model that the program holds."""
    if hasattr(model, "peft_config"):
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"), model.active_adapter)
        return
    tensors = {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}
    with torch.no_grad():
        own = model.state_dict()
        for name, value in tensors.items():
            own[name].copy_(value)
