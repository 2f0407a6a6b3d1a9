"""A base model whose frozen weights stay in 8 or 4 bits, by bitsandbytes. What is trained in addition is float32."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.engines.torch.catalog import digest_of, refuse_nonfinite
from mezzo.errors import ConfigError


def loading_options(kind: str, device: torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained`; ConfigError where the library is missing."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns at every call that it rounds
    try:
        import bitsandbytes  # noqa: F401
        from transformers import BitsAndBytesConfig
    except ImportError:
        raise ConfigError(
            f"--quantize {kind} needs the bitsandbytes and accelerate libraries: pip install bitsandbytes accelerate"
        ) from None
    if kind == "8bit":
        # No outlier columns: which they are depends on all rows of a batch, and a score must depend on its own row alone.
        config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    else:
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    return {"quantization_config": config, "device_map": {"": str(device)}}


def compute_in_float32(model: nn.Module) -> None:
    """Keep bitsandbytes from rounding the inputs of 4-bit layers to bfloat16, as it does on CPUs that have instructions for
    it whatever type it was asked to compute in: the rounding is larger than the effect of a perturbation."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def is_quantized(model: nn.Module) -> bool:
    """True for a model with quantised weights."""
    return any(not parameter.is_floating_point() for parameter in model.parameters())


def checkpoint_digest(name: str, kind: str) -> str:
    """Of the weights on disk: quantised bits may differ between devices and versions of one and the same model."""
    from safetensors import safe_open

    total = hashlib.sha256(kind.encode())
    for file in sorted(_folder(name).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for key in sorted(tensors.keys()):
                stored = [(key, tensors.get_tensor(key))]
                refuse_nonfinite(stored, name)  # quantised weights do not show it
                total.update(digest_of(stored).encode())
    return total.hexdigest()


def _folder(path: str) -> Path:
    from transformers.utils import cached_file

    return Path(path) if Path(path).is_dir() else Path(str(cached_file(path, "config.json"))).parent


@contextmanager
def lora_hooks(model: nn.Module, factors: dict[str, tuple[Tensor, Tensor]], scaling: float) -> Iterator[None]:
    """Plain LoRA by hooks: module path → (A, B), added to the output of the quantised layer. For the check before step 1."""

    def hook(down: Tensor, up: Tensor) -> Any:
        def add(_module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return output + (scaling * (args[0].to(down.dtype) @ down.T @ up.T)).to(output.dtype)

        return add

    with ExitStack() as hooks:
        for path, pair in factors.items():
            hooks.enter_context(model.get_submodule(path).register_forward_hook(hook(*pair)))
        yield
