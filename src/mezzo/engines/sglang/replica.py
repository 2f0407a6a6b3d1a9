"""One running SGLang server: what it is, the adapters it is lent, and the questions it is asked."""

from __future__ import annotations

import base64
import json
import pickle
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mezzo.engines.sglang.launch import Adapter
from mezzo.engines.sglang.versions import refuse_version
from mezzo.errors import ConfigError, RunFailed

TIMEOUT = 900.0
"""Seconds for one answer: a large batch on a busy server takes long, a lost one answers never."""


class Replica:
    """Speaks to one URL. What fails before the run begins is the user's to mend; later, the run has failed."""

    def __init__(self, url: str, model: str, adapter: Adapter) -> None:
        self.url = url.rstrip("/")
        self.begun = False
        self.command = _command(url, model, adapter)
        self.info = self._recognised()
        self._refuse_unfit(adapter)

    @property
    def ranks(self) -> int:
        return int(self.info.get("tp_size") or 1)

    def generate(self, body: Mapping[str, Any]) -> list[Any]:
        answers = self._post("/generate", body)
        return answers if isinstance(answers, list) else [answers]

    def load(self, name: str, tensors: Mapping[str, Tensor], adapter: Adapter) -> None:
        """Upload an adapter; a fresh name gets a fresh id, which is part of SGLang's prefix-cache key."""
        payload = base64.b64encode(pickle.dumps(dict(tensors), protocol=4)).decode()
        body = {"lora_name": name, "config_dict": adapter.config(), "serialized_named_tensors": [payload] * self.ranks}
        self._post("/load_lora_adapter_from_tensors", body)

    def unload(self, name: str) -> None:
        self._post("/unload_lora_adapter", {"lora_name": name})

    def _recognised(self) -> dict[str, Any]:
        """The server's own account of itself; something else on that port is not mistaken for one."""
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"{self.url!r} is not a URL such as http://host:30000")
        for path in ("/server_info", "/get_server_info"):
            try:
                info = self._call(path, None)
            except urllib.error.HTTPError:
                continue
            except (OSError, ValueError) as error:
                if isinstance(error, ValueError):  # an answer that is no JSON
                    continue
                raise ConfigError(f"no server answers at {self.url} ({error}). Start one: {self.command}") from None
            if isinstance(info, dict) and "version" in info and "model_path" in info:
                refuse_version(str(info["version"]), f"{self.url}: ")
                return info
        raise ConfigError(
            f"what answers at {self.url} is not an SGLang server: is the port taken by another program? "
            f"Start SGLang on a free one: {self.command}"
        )

    def _refuse_unfit(self, adapter: Adapter) -> None:
        info = self.info
        if not info.get("enable_lora"):
            raise ConfigError(f"the server at {self.url} runs without LoRA. Restart it with {self.command}")
        if int(info.get("max_lora_rank") or adapter.rank) < adapter.rank:
            raise ConfigError(
                f"the server at {self.url} takes adapters of rank {info['max_lora_rank']}: {self.command}"
            )
        targets = info.get("lora_target_modules")
        missing = sorted(set(adapter.targets) - set(targets)) if targets and "all" not in targets else []
        if missing:
            raise ConfigError(
                f"the server at {self.url} has no adapters on {', '.join(missing)}. Restart it with {self.command}"
            )
        if int(info.get("max_loras_per_batch") or 2) < 2:
            raise ConfigError(f"the server at {self.url} takes one adapter a batch, two are needed: {self.command}")

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        try:
            answer = self._call(path, body)
        except (OSError, ValueError) as error:
            detail = _detail(error)
            if not self.begun:
                raise ConfigError(f"the server at {self.url} refused {path}: {detail}") from None
            raise RunFailed(
                f"the SGLang server at {self.url} failed ({detail}). The journal holds the run up to here: start a server "
                "and continue with 'mezzo train --resume DIR --url URL'"
            ) from None
        if isinstance(answer, dict) and answer.get("success") is False:
            raise RunFailed(f"the server at {self.url} refused {path}: {answer.get('error_message') or answer}")
        return answer

    def _call(self, path: str, body: Mapping[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with _OPENER.open(request, timeout=TIMEOUT if data else 30) as answer:
            return json.loads(answer.read())


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _detail(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}: {error.read()[:300].decode(errors='replace')}"
    return str(error) or type(error).__name__


def _command(url: str, model: str, adapter: Adapter) -> str:
    port = url.rsplit(":", 1)[-1].strip("/")
    port = port if port.isdigit() else "30000"
    return (
        f"python -m sglang.launch_server --model-path {model} --port {port} --enable-lora --max-lora-rank {adapter.rank} "
        f"--lora-target-modules {' '.join(adapter.targets)} --max-loras-per-batch 4"
    )
