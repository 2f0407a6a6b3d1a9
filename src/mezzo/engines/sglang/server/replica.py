"""One running SGLang server: its options, its adapters and weights, and requests to it."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from mezzo.engines.sglang.adapters import AdapterShape
from mezzo.engines.sglang.requests import Answers
from mezzo.engines.sglang.server import answers
from mezzo.engines.sglang.server.connection import API_KEY, BadAnswer, read_answer, send
from mezzo.engines.sglang.versions import refuse_version
from mezzo.errors import ConfigError, MezzoError, RunFailed

# Seconds for one answer: a large batch on a busy server takes long, a lost server never answers.
TIMEOUT = 900.0
# Seconds that a server may take to finish its requests before it empties its prefix cache.
FLUSH_TIMEOUT = 60
T = TypeVar("T")


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

    def generate(self, body: Mapping[str, Any], parse: Callable[[Answers], T]) -> T:
        """What `parse` reads from the answers, one for each row of the request."""

        def checked(answer: Any) -> T:
            rows = answers.parse_rows(answer, len(body["input_ids"]))
            for row in rows:
                self._check_version(answers.parse_weight_version(row["meta_info"]))
            return parse(rows)

        return self._request("/generate", body, checked)

    def load_adapter(self, name: str, tensors: Mapping[str, Tensor], shape: AdapterShape) -> None:
        """Upload an adapter; a new name gets a new id, which is part of SGLang's prefix-cache key."""
        body = {"lora_name": name, "config_dict": shape.peft_config(), **self._payload(dict(tensors))}
        self._command("/load_lora_adapter_from_tensors", body)

    def unload_adapter(self, name: str) -> None:
        self._command("/unload_lora_adapter", {"lora_name": name})

    def weight_version(self) -> str:
        """SGLang's name for the weights that the server holds now."""
        return self._request("/model_info", None, answers.parse_weight_version)

    def write_weights(self, named: Sequence[tuple[str, Tensor]], loader: str, version: str) -> None:
        """Send tensors to the server's custom weight loader; `version` is the new name of its weights."""
        self._check_version(self.weight_version())
        body = {**self._payload(list(named)), "load_format": loader, "flush_cache": False, "weight_version": version}
        has_sessions = self._has_update_sessions()  # newer versions accept weights only inside a session
        if has_sessions:
            self._command("/begin_weight_update", {})
        self._command("/update_weights_from_tensor", body)
        if has_sessions:
            self._command("/end_weight_update", {})
        self.expected_version = version
        # Requests that have just been answered may not be finished: wait for them, so that no old key is left.
        self._post(f"/flush_cache?timeout={FLUSH_TIMEOUT}", {})

    def _payload(self, tensors: Any) -> dict[str, list[str]]:
        """Tensors for every rank, in SGLang's encoding."""
        return {
            "serialized_named_tensors": [base64.b64encode(pickle.dumps(tensors, protocol=4)).decode()] * self.info.ranks
        }

    def _has_update_sessions(self) -> bool:
        """True if this version has sessions. The request also closes a session that a dead run left open."""
        try:
            self._send("/end_weight_update", {})
        except BadAnswer as error:
            return error.status != 404  # a server that is lost is reported by the next request
        return True

    def _check_version(self, version: str) -> None:
        if self.expected_version and version != self.expected_version:
            raise RunFailed(
                f"the server at {self.url} no longer holds this run's weights: it was restarted, or another run used it. "
                "The journal holds the run: continue with 'mezzo train --resume DIR --url URL'"
            )

    def _read_info(self) -> answers.ServerInfo:
        """The server's version and options; raise ConfigError if another program answers on that port."""
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"{self.url!r} is not a URL such as http://host:30000")
        for path in ("/server_info", "/get_server_info"):
            try:
                data = self._send(path, None)
            except BadAnswer as error:
                if error.status in (401, 403):
                    raise ConfigError(
                        f"the server at {self.url} wants a key: set {API_KEY} in the environment"
                    ) from None
                if not error.status:
                    raise ConfigError(f"no server answers at {self.url} ({error}). Start one: {self.command}") from None
                continue
            try:
                info = read_answer(data, answers.parse_info)
            except BadAnswer:
                continue
            refuse_version(info.version, f"{self.url}: ")
            return info
        raise ConfigError(
            f"{self.url} is not an SGLang server: is the port used by another program? "
            f"Start SGLang on a free one: {self.command}"
        )

    def _option_problems(self, shape: AdapterShape, dtype: str, loader: str) -> Iterator[str]:
        """What keeps the server from training the run."""
        info = self.info
        if not info.lora:
            yield "runs without LoRA"
        if info.lora_rank is not None and info.lora_rank < shape.rank:
            yield f"takes adapters up to rank {info.lora_rank}"
        if "all" not in info.lora_targets and (missing := sorted(set(shape.targets) - set(info.lora_targets))):
            yield f"has no adapters on {', '.join(missing)}"
        if info.loras_per_batch == 1:
            yield "takes one adapter per batch, but two are needed"
        if loader and loader not in info.loaders:
            yield "cannot update its own weights, as --space matrices needs: use --space lora, or install mezzo beside it"
        if loader and info.dtype != dtype:
            weights = f"its weights as {info.dtype!r}, the run as {dtype!r}"
            yield f"holds {weights}, and their updates would be rounded differently"

    def _command(self, path: str, body: Mapping[str, Any]) -> None:
        self._request(path, body, answers.refuse_failure)

    def _request(self, path: str, body: Mapping[str, Any] | None, parse: Callable[[Any], T]) -> T:
        """What `parse` reads from the answer; a failure is explained."""
        data = self._post(path, body)
        try:
            return read_answer(data, parse)
        except BadAnswer as error:
            raise self._explain(path, error) from None

    def _post(self, path: str, body: Mapping[str, Any] | None) -> bytes:
        try:
            return self._send(path, body)
        except BadAnswer as error:
            raise self._explain(path, error) from None

    def _explain(self, path: str, error: BadAnswer) -> MezzoError:
        if not self.run_started:
            return ConfigError(f"the server at {self.url} refused {path}: {error}")
        return RunFailed(
            f"the SGLang server at {self.url} failed ({error}). The journal holds the run up to here: start a server "
            "and continue with 'mezzo train --resume DIR --url URL'"
        )

    def _send(self, path: str, body: Mapping[str, Any] | None) -> bytes:
        return send(self.url + path, body, 30 if body is None else TIMEOUT)


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
