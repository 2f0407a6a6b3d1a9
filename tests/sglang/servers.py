"""Start and stop real SGLang servers: on the CPU unless a test needs a GPU."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from mezzo.engines.hf_hub import locate
from tests.processes import patience

BACKENDS = {"cpu": ("torch_native", "torch_native"), "cuda": ("triton", "triton")}
"""Attention and LoRA."""
ON_CPU = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
WITHOUT_MEZZO = {"SGLANG_PLUGINS": "none-of-them"}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Server:
    """One `sglang.launch_server`; `ready()` waits until it answers, `kill()` kills it and its children."""

    def __init__(
        self,
        model: str,
        log: Path,
        rank: int = 8,
        targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
        tp: int = 1,
        more: tuple[str, ...] = (),
        dtype: str = "float32",
        device: str = "cpu",
        port: int = 0,
        plugins: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port, self.log = port or free_port(), log
        self.url = f"http://127.0.0.1:{self.port}"
        options = {
            "--model-path": locate(model),
            "--port": str(self.port),
            "--tp-size": str(tp),
            "--dtype": dtype,
            "--device": device,
            "--attention-backend": BACKENDS[device][0],
            "--sampling-backend": "pytorch",
            "--grammar-backend": "none",
            "--max-total-tokens": "20000",
            "--mem-fraction-static": "0.3",
            "--max-lora-rank": str(rank),
            "--max-loras-per-batch": "4",
            "--lora-backend": BACKENDS[device][1],
            "--log-level": "warning",
        }
        flags = [
            "--disable-cuda-graph",
            "--disable-overlap-schedule",
            "--skip-server-warmup",
            "--enable-lora",
            "--sleep-on-idle",
        ]
        words = [word for pair in options.items() for word in pair]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "sglang.launch_server",
                    *words,
                    *flags,
                    "--lora-target-modules",
                    *targets,
                    *more,
                ],
                env={
                    **os.environ,
                    **(ON_CPU if device == "cpu" else {}),
                    **({} if plugins else WITHOUT_MEZZO),
                    "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank) for rank in range(tp)),
                    "PYTHONWARNINGS": "ignore",
                    **(environment or {}),
                },
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ready(self, seconds: float = 300) -> Server:
        end = time.monotonic() + patience(seconds)
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(self.url + "/server_info", timeout=5):
                    return self
            except (OSError, urllib.error.URLError) as error:
                if getattr(error, "code", None) == 401:  # it wants a key
                    return self
                time.sleep(0.5)
        raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-3000:]}")

    def freeze(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
