"""The command that starts a server which fits a run, for messages."""

from __future__ import annotations

import json

from mezzo.engines.sglang.adapters import AdapterShape
from mezzo.engines.sglang.module_names import ENCODER, MODEL_PACKAGE


def launch_command(
    url: str, model: str, shape: AdapterShape | None, dtype: str, loader: str, adapters: int, mask_token: int | None
) -> str:
    """How to start it at that port, with room for the run's adapters beside those of others."""
    port = url.rsplit(":", 1)[-1].strip("/")
    port = port if port.isdigit() else "30000"
    command = f"python -m sglang.launch_server --model-path {model} --port {port} --dtype {dtype}"
    if shape is not None:
        targets = " ".join(shape.targets)
        command += f" --enable-lora --max-lora-rank {shape.rank} --lora-target-modules {targets}"
        command += f" --max-loras-per-batch {adapters + 2}"
    command += f" --custom-weight-loader {loader}" if loader else ""
    if mask_token is None:
        return command
    settings = json.dumps({"architectures": [ENCODER], "mask_token_id": mask_token})
    return (
        f"SGLANG_EXTERNAL_MODEL_PACKAGE={MODEL_PACKAGE} {command} --is-embedding --disable-radix-cache "
        f"--chunked-prefill-size -1 --json-model-override-args '{settings}'"
    )
