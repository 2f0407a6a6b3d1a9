"""Weights of a Hugging Face model, checked: nothing the task needs may be random by accident."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import nn

from mezzo.engines.architectures import layer_count
from mezzo.engines.hf_hub import fetched, load_config, quiet
from mezzo.engines.torch.catalog import is_pooler, refuse_nonfinite
from mezzo.engines.torch.quantized import compute_in_float32
from mezzo.errors import ConfigError, ModelError
from mezzo.method import noise
from mezzo.types import Family

# Parameters that may be missing from any file: a fresh head is made, not read.
SPARE = 2**24


def load_model(
    name: str,
    family: Family,
    *,
    classes: int = 0,
    seed: int = 0,
    dtype: torch.dtype | Literal["auto"] = torch.float32,
    remote_code: bool = False,
    quantize: Mapping[str, Any] | None = None,
) -> nn.Module:
    """The model in eval mode; with `classes`, a classification head whose fresh weights depend on `seed` alone.

    `dtype` "auto" is that of the file. `quantize` are the options of `quantized.loading_options`.
    """
    import transformers

    auto: Any = transformers.AutoModelForMaskedLM if family == "masked" else transformers.AutoModelForCausalLM
    extra = dict(quantize or {})
    if classes:
        auto, extra["num_labels"] = transformers.AutoModelForSequenceClassification, classes
    config = load_config(name, remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"{name} is stored quantised: give the checkpoint it was made from, and --quantize 4bit or 8bit"
        )

    def load(path: str, **options: Any) -> Any:
        if Path(path).is_dir():
            _check_size(Path(path), auto, name, None if remote_code else config)
        return auto.from_pretrained(
            path,
            dtype=dtype,
            output_loading_info=True,
            use_safetensors=True,
            trust_remote_code=remote_code,
            **extra,
            **options,
        )

    with quiet():
        model, report = fetched(name, load)
    _fill_missing(model, sorted(report["missing_keys"]), name, seed, fresh_head=bool(classes))
    refuse_nonfinite(model.named_parameters(), name)
    compute_in_float32(model)
    return model.eval().requires_grad_(False)  # type: ignore[no-any-return]


def _check_size(folder: Path, auto: Any, name: str, config: Any) -> None:
    """ModelError where there are no safetensors, or the configuration describes a far larger model.

    Without a configuration (where the model brings its own code) the second is not checked.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        why = "; its .bin or .pt file is a pickle, which can run code when it is opened" if pickled else ""
        raise ModelError(f"{name} has no weights as .safetensors{why}: save it again with save_pretrained")
    if config is None:
        return
    sizes = [size for file in files for size in _tensor_sizes(file)]
    depth = layer_count(config)
    if depth > len(sizes):
        raise ModelError(f"{name}: config.json claims {depth} layers, and its weights are {len(sizes)} tensors")
    with torch.device("meta"):
        stated = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
    if stated > 4 * sum(sizes) + SPARE:
        raise ModelError(f"{name}: config.json describes {stated:,} parameters, and its weights are {sum(sizes):,}")


def _tensor_sizes(file: Path) -> list[int]:
    """Elements of each tensor, by the file's header, which safetensors has compared with the file's length."""
    with safe_open(file, framework="numpy") as tensors:
        return [math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys()]  # noqa: SIM118


def _fill_missing(model: nn.Module, missing: list[str], name: str, seed: int, fresh_head: bool) -> None:
    """Initialise a fresh classification head. A missing LM head would be random weights that look trained: refuse it."""
    base = getattr(model, "base_model_prefix", "")
    refused = [key for key in missing if not fresh_head or (key.startswith(base + ".") and not is_pooler(key))]
    if refused:
        shown = ", ".join(refused[:3]) + (" …" if len(refused) > 3 else "")
        needed = "that holds the whole model" if fresh_head else "saved with its LM head"
        raise ModelError(f"{name} lacks weights that this task needs ({shown}); use a checkpoint {needed}")
    with torch.no_grad():
        for key in missing:
            parameter = model.get_parameter(key)
            if parameter.ndim < 2:
                parameter.fill_(float(_is_gain(model, key)))
                continue
            values = noise.dense("gaussian", seed, f"init/{key}", 0, parameter.numel())
            parameter.copy_(torch.from_numpy(values).view(parameter.shape).mul_(0.02))


def _is_gain(model: nn.Module, key: str) -> bool:
    """True for the weight of a norm, which must not be zero."""
    module, _, parameter = key.rpartition(".")
    return parameter != "bias" and "norm" in type(model.get_submodule(module)).__name__.lower()


def device_of(name: str) -> torch.device:
    """The device by name; `auto` is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but torch {torch.__version__} sees no GPU; use --device cpu")
    try:
        if torch.device(name).type not in ("cpu", "cuda", "mps", "xpu"):
            raise RuntimeError(f"{name} is not a device to compute on")
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None


def devices_of(names: str) -> list[torch.device]:
    """The devices of a list such as `cuda:0,cuda:1`; `all` are the GPUs."""
    if names == "all" and not gpu_count():
        raise ConfigError(f"--device all is all GPUs, and torch {torch.__version__} sees none; use --device cpu")
    every = [f"cuda:{number}" for number in range(gpu_count())]
    return [device_of(name.strip()) for name in (every if names == "all" else names.split(","))]


def preload_imports() -> None:
    """Import what loading any model imports, in a process whose forks will load one."""
    names = ("modeling_utils", "modeling_layers", "processing_utils", "generation.utils", "models.auto.modeling_auto")
    for name in names:
        importlib.import_module(f"transformers.{name}")


def gpu_count() -> int:
    """How many GPUs there are to distribute among workers."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
