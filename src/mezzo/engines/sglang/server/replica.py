"""One running SGLang server: its options, its adapters and weights, and requests to it."""

from __future__ import annotations

import base64
import json
import pickle
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from mezzo.engines.sglang.adapters import AdapterShape
from mezzo.engines.sglang.versions import refuse_version
from mezzo.errors import ConfigError, RunFailed

# Seconds for one answer: a large batch on a busy server takes long, a lost server never answers.
TIMEOUT = 900.0
# Seconds that a server may take to finish its requests before it empties its prefix cache.
FLUSH_TIMEOUT = 60


class Replica:
    """The client of one URL. Before the run starts, failures are ConfigErrors; later they are RunFailed."""

    def __init__(
        self, url: str, model: str, shape: AdapterShape | None, dtype: str = "float32", loader: str = ""
    ) -> None:
        self.url = url.rstrip("/")
        self.run_started = False
        self.command = _launch_command(url, model, shape, dtype, loader)
        """How to start a server that fits the run."""
        self.info = self._read_info()
        if shape is not None and (problem := next(self._option_problems(shape, dtype, loader), "")):
            raise ConfigError(f"the server at {self.url} {problem}. Restart it with {self.command}")
        self.expected_version = ""
        """SGLang's `weight_version` during this run: it changes when the server is restarted or its weights are changed."""

    def start_run(self) -> None:
        """From now on the server must keep its weights."""
        self.expected_version = self.weight_version()
        self.run_started = True

    @property
    def ranks(self) -> int:
        return int(self.info.get("tp_size") or 1)

    def generate(self, body: Mapping[str, Any]) -> list[Any]:
        answers = self._request("/generate", body)
        answers = answers if isinstance(answers, list) else [answers]
        for answer in answers:
            self._check_version(answer["meta_info"]["weight_version"])
        return answers

    def load_adapter(self, name: str, tensors: Mapping[str, Tensor], shape: AdapterShape) -> None:
        """Upload an adapter; a new name gets a new id, which is part of SGLang's prefix-cache key."""
        body = {"lora_name": name, "config_dict": shape.peft_config(), **self._payload(dict(tensors))}
        self._request("/load_lora_adapter_from_tensors", body)

    def unload_adapter(self, name: str) -> None:
        self._request("/unload_lora_adapter", {"lora_name": name})

    def weight_version(self) -> str:
        """SGLang's name for the weights that the server holds now."""
        return str(self._request("/model_info", None)["weight_version"])

    def write_weights(self, named: Sequence[tuple[str, Tensor]], loader: str, version: str) -> None:
        """Send tensors to the server's custom weight loader; `version` is the new name of its weights."""
        self._check_version(self.weight_version())
        body = {**self._payload(list(named)), "load_format": loader, "flush_cache": False, "weight_version": version}
        has_sessions = self._has_update_sessions()  # newer versions accept weights only inside a session
        if has_sessions:
            self._request("/begin_weight_update", {})
        self._request("/update_weights_from_tensor", body)
        if has_sessions:
            self._request("/end_weight_update", {})
        self.expected_version = version
        # Requests that have just been answered may not be finished: wait for them, so that no old key is left.
        self._request(f"/flush_cache?timeout={FLUSH_TIMEOUT}", {})

    def _payload(self, tensors: Any) -> dict[str, list[str]]:
        """Tensors for every rank, in SGLang's encoding."""
        return {"serialized_named_tensors": [base64.b64encode(pickle.dumps(tensors, protocol=4)).decode()] * self.ranks}

    def _has_update_sessions(self) -> bool:
        """True if this version has sessions. The request also closes a session that a dead run left open."""
        try:
            self._send("/end_weight_update", {})
        except urllib.error.HTTPError as error:
            return error.code != 404
        except OSError:
            return True  # the server is lost, which the next request reports
        return True

    def _check_version(self, version: str) -> None:
        if self.expected_version and version != self.expected_version:
            raise RunFailed(
                f"the server at {self.url} no longer holds this run's weights: it was restarted, or another run used it. "
                "The journal holds the run: continue with 'mezzo train --resume DIR --url URL'"
            )

    def _read_info(self) -> dict[str, Any]:
        """The server's version and options; raise ConfigError if another program answers on that port."""
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"{self.url!r} is not a URL such as http://host:30000")
        for path in ("/server_info", "/get_server_info"):
            try:
                info = self._send(path, None)
            except (urllib.error.HTTPError, ValueError):  # ValueError: the answer is not JSON
                continue
            except OSError as error:
                raise ConfigError(f"no server answers at {self.url} ({error}). Start one: {self.command}") from None
            if isinstance(info, dict) and "version" in info and "model_path" in info:
                refuse_version(str(info["version"]), f"{self.url}: ")
                return info
        raise ConfigError(
            f"{self.url} is not an SGLang server: is the port used by another program? "
            f"Start SGLang on a free one: {self.command}"
        )

    def _option_problems(self, shape: AdapterShape, dtype: str, loader: str) -> Iterator[str]:
        """What keeps the server from training the run."""
        info, targets = self.info, self.info.get("lora_target_modules") or ["all"]
        if not info.get("enable_lora"):
            yield "runs without LoRA"
        if (rank := int(info.get("max_lora_rank") or shape.rank)) < shape.rank:
            yield f"takes adapters up to rank {rank}"
        if "all" not in targets and (missing := sorted(set(shape.targets) - set(targets))):
            yield f"has no adapters on {', '.join(missing)}"
        if int(info.get("max_loras_per_batch") or 2) < 2:
            yield "takes one adapter per batch, but two are needed"
        if loader and loader not in (info.get("custom_weight_loader") or ()):
            yield "cannot update its own weights, as --space matrices needs: use --space lora, or install mezzo beside it"
        if loader and info.get("dtype") != dtype:
            weights = f"its weights as {info.get('dtype')!r}, the run as {dtype!r}"
            yield f"holds {weights}, and their updates would be rounded differently"

    def _request(self, path: str, body: Mapping[str, Any] | None) -> Any:
        """The server's answer to a GET (without a body) or a POST; a failure is explained."""
        try:
            answer = self._send(path, body)
        except (OSError, ValueError) as error:
            detail = _error_detail(error)
            if not self.run_started:
                raise ConfigError(f"the server at {self.url} refused {path}: {detail}") from None
            raise RunFailed(
                f"the SGLang server at {self.url} failed ({detail}). The journal holds the run up to here: start a server "
                "and continue with 'mezzo train --resume DIR --url URL'"
            ) from None
        if isinstance(answer, dict) and answer.get("success") is False:
            reason = answer.get("error_message") or answer.get("message") or answer
            raise RunFailed(f"the server at {self.url} refused {path}: {reason}")
        return answer

    def _send(self, path: str, body: Mapping[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with _OPENER.open(request, timeout=TIMEOUT if data else 30) as answer:
            text = answer.read()
            return None if path.startswith("/flush_cache") else json.loads(text)


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _error_detail(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}: {error.read()[:300].decode(errors='replace')}"
    return str(error) or type(error).__name__


def _launch_command(url: str, model: str, shape: AdapterShape | None, dtype: str, loader: str) -> str:
    port = url.rsplit(":", 1)[-1].strip("/")
    port = port if port.isdigit() else "30000"
    command = f"python -m sglang.launch_server --model-path {model} --port {port} --dtype {dtype}"
    if shape is not None:
        targets = " ".join(shape.targets)
        command += (
            f" --enable-lora --max-lora-rank {shape.rank} --lora-target-modules {targets} --max-loras-per-batch 4"
        )
    return command + (f" --custom-weight-loader {loader}" if loader else "")
