"""Stands in for SGLang's kernel package where there is no GPU: nothing of it runs on the plain CPU path, but it is imported."""

from typing import Any

__version__ = "0.0.0+cpu.standin"


def copy_all_layer_kv_cache_cpu(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError("sgl_kernel is a stand-in here: this kernel needs SGLang's own kernel package")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} needs SGLang's own kernel package; this is a stand-in")

    return missing
