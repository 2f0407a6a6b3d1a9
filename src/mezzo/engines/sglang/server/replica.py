"""One running SGLang server: what it is, the adapters it is lent, and the questions it is asked."""

from __future__ import annotations

import base64
import json
import pickle
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from mezzo.engines.sglang.inprocess.launch import Adapter
from mezzo.engines.sglang.versions import refuse_version
from mezzo.errors import ConfigError, RunFailed

TIMEOUT = 900.0
"""Seconds for one answer: a large batch on a busy server takes long, a lost one answers never."""
FLUSH = 60
"""Seconds that a server may take to finish what it is doing before its prefix cache can be emptied."""
WITHOUT_JSON = ("/flush_cache",)


class Replica:
    """Speaks to one URL. What fails before the run begins is the user's to mend; later, the run has failed."""

    def __init__(self, url: str, model: str, adapter: Adapter | None, dtype: str = "float32", loader: str = "") -> None:
        self.url = url.rstrip("/")
        self.begun = False
        self.command = _command(url, model, adapter, dtype, loader)
        self.info = self._recognised()
        if adapter is not None:
            self._refuse_unfit(adapter, dtype, loader)
        self.version = ""
        """SGLang's `weight_version` while this run is served: whoever restarts the server or moves its weights changes it."""

    @property
    def ranks(self) -> int:
        return int(self.info.get("tp_size") or 1)

    def generate(self, body: Mapping[str, Any]) -> list[Any]:
        answers = self._post("/generate", body)
        answers = answers if isinstance(answers, list) else [answers]
        for answer in answers:
            self._expect(answer["meta_info"]["weight_version"])
        return answers

    def load(self, name: str, tensors: Mapping[str, Tensor], adapter: Adapter) -> None:
        """Upload an adapter; a fresh name gets a fresh id, which is part of SGLang's prefix-cache key."""
        payload = base64.b64encode(pickle.dumps(dict(tensors), protocol=4)).decode()
        body = {"lora_name": name, "config_dict": adapter.config(), "serialized_named_tensors": [payload] * self.ranks}
        self._post("/load_lora_adapter_from_tensors", body)

    def unload(self, name: str) -> None:
        self._post("/unload_lora_adapter", {"lora_name": name})

    def weight_version(self) -> str:
        """The name of the weights that the server holds now."""
        return str(self._asked("/model_info", None)["weight_version"])

    def write(self, named: Sequence[tuple[str, Tensor]], loader: str, version: str) -> None:
        """Hand tensors to the server's custom weight loader; its weights are then called `version`."""
        self._expect(self.weight_version())
        payload = base64.b64encode(pickle.dumps(list(named), protocol=4)).decode()
        body = {"serialized_named_tensors": [payload] * self.ranks, "load_format": loader}
        with self._session():
            self._post("/update_weights_from_tensor", {**body, "flush_cache": False, "weight_version": version})
        self.version = version
        # Requests that have just been answered may still be on their way out: wait for them, then no old key is left.
        self._post(f"/flush_cache?timeout={FLUSH}", {})

    @contextmanager
    def _session(self) -> Iterator[None]:
        """Newer versions take weights between two calls only."""
        if not self._sessions():
            yield
            return
        self._post("/begin_weight_update", {})
        yield
        self._post("/end_weight_update", {})

    def _sessions(self) -> bool:
        """Whether this version has them. A session that a run left open when it died is closed by asking."""
        try:
            self._call("/end_weight_update", {})
        except urllib.error.HTTPError as error:
            return error.code != 404
        except OSError:
            return True  # the server is lost, which the next call explains
        return True

    def _expect(self, version: str) -> None:
        if self.version and version != self.version:
            raise RunFailed(
                f"the server at {self.url} no longer holds this run's weights: it was restarted, or another run used it. "
                "The journal holds the run: continue with 'mezzo train --resume DIR --url URL'"
            )

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

    def _refuse_unfit(self, adapter: Adapter, dtype: str, loader: str) -> None:
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
        if loader and loader not in (info.get("custom_weight_loader") or ()):
            raise ConfigError(
                f"the server at {self.url} cannot move its own weights, as --space matrices needs. Install mezzo beside it "
                f"and restart it with {self.command}; or use --space lora"
            )
        if loader and info.get("dtype") != dtype:
            raise ConfigError(
                f"the server at {self.url} holds its weights as {info.get('dtype')!r}, the run as {dtype!r}, and their updates "
                f"would be rounded differently. Restart it with {self.command}"
            )

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._asked(path, body)

    def _asked(self, path: str, body: Mapping[str, Any] | None) -> Any:
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
            reason = answer.get("error_message") or answer.get("message") or answer
            raise RunFailed(f"the server at {self.url} refused {path}: {reason}")
        return answer

    def _call(self, path: str, body: Mapping[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with _OPENER.open(request, timeout=TIMEOUT if data else 30) as answer:
            text = answer.read()
            return json.loads(text) if path.partition("?")[0] not in WITHOUT_JSON else None


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _detail(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}: {error.read()[:300].decode(errors='replace')}"
    return str(error) or type(error).__name__


def _command(url: str, model: str, adapter: Adapter | None, dtype: str, loader: str) -> str:
    port = url.rsplit(":", 1)[-1].strip("/")
    port = port if port.isdigit() else "30000"
    command = f"python -m sglang.launch_server --model-path {model} --port {port} --dtype {dtype}"
    if adapter is not None:
        targets = " ".join(adapter.targets)
        command += (
            f" --enable-lora --max-lora-rank {adapter.rank} --lora-target-modules {targets} --max-loras-per-batch 4"
        )
    return command + (f" --custom-weight-loader {loader}" if loader else "")
