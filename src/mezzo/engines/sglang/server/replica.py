"""One running SGLang server: its options, its adapters and weights, and requests to it."""

from __future__ import annotations

import base64
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, TypeVar

from torch import Tensor

from mezzo.engines.sglang.adapters import PROBES_PER_FORWARD, AdapterShape
from mezzo.engines.sglang.requests import Answers
from mezzo.engines.sglang.server import answers
from mezzo.engines.sglang.server.command import launch_command
from mezzo.engines.sglang.server.connection import API_KEY, BadAnswer, read_answer, send
from mezzo.engines.sglang.server.loader import DIGESTS, LOADER, STATUS, Order, encode_order
from mezzo.engines.sglang.server.recipes import FORGOTTEN
from mezzo.engines.sglang.versions import refuse_version
from mezzo.errors import ConfigError, MezzoError, RunFailed

# Seconds for one answer: a large batch on a busy server takes long, a lost server never answers.
TIMEOUT = 900.0
# Seconds that a server may take to finish its requests before it empties its prefix cache.
FLUSH_TIMEOUT = 60
# Seconds in which a server answers the simplest request, however busy it is.
LOOK_TIMEOUT = 15.0
# The same where other servers wait meanwhile.
SHORT_LOOK = 2.0
# Seconds that another client's session of weight updates may last.
SESSION_PATIENCE = 10.0
RESUME = "The journal holds the run up to here: continue with 'mezzo train --resume DIR --url URL'"
T = TypeVar("T")


class ServerLost(RunFailed):
    """A server does not answer, was restarted, or holds other weights than the run's: others can do its work."""


class Replica:
    """The client of one URL. Before the run starts, failures are ConfigErrors; later they are RunFailed."""

    def __init__(
        self,
        url: str,
        model: str,
        shape: AdapterShape | None,
        dtype: str = "float32",
        loader: str = "",
        adapters: int = PROBES_PER_FORWARD,
        mask_token: int | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.command = launch_command(url, model, shape, dtype, loader, adapters, mask_token)
        """How to start a server that fits the run."""
        self._needs = (shape, dtype, loader)
        self.mask_token = mask_token
        """Where a masked model is read; None for a causal one."""
        self.run_started = False

    def connect(self) -> None:
        """Read the server's options and refuse those that do not fit; the run has not started on it."""
        shape, dtype, loader = self._needs
        self.run_started = False
        self.expected_version = ""
        """SGLang's `weight_version` during this run: it changes when the server is restarted or its weights are changed."""
        self.loader_version: str | None = ""
        """The name that mezzo's loader has for the weights; None if its ranks disagree."""
        self.makes_adapters = self.draws_texts = False
        self.info = self.read_info()
        if self.info.mask_token != self.mask_token:
            kind = "causal" if self.mask_token is None else "masked"
            raise ConfigError(
                f"the server at {self.url} does not serve a {kind} model as mezzo reads one. Restart it: {self.command}"
            )
        if shape is not None and (problem := next(self._option_problems(shape, dtype, loader), "")):
            raise ConfigError(f"the server at {self.url} {problem}. Restart it with {self.command}")

    def start_run(self) -> None:
        """From now on the server must keep its weights."""
        self.expected_version = self.weight_version()
        self.run_started = True

    def check_same_process(self) -> None:
        """Raise ServerLost if the server was restarted: it may serve another model."""
        if self.read_info().process != self.info.process:
            raise ServerLost(f"the server at {self.url} was restarted")

    def encode(self, body: Mapping[str, Any], parse: Callable[[Answers], T]) -> T:
        """What `parse` reads from the embeddings, one for each row of the request."""
        return self.generate(body, parse, "/encode")

    def generate(self, body: Mapping[str, Any], parse: Callable[[Answers], T], path: str = "/generate") -> T:
        """What `parse` reads from the answers, one for each row of the request."""

        def checked(answer: Any) -> T:
            rows = answers.parse_rows(answer, len(body["input_ids"]))
            for row in rows:
                self._check_version(answers.parse_weight_version(row["meta_info"]))
            return parse(rows)

        return self._request(path, body, checked)

    # ---- adapters

    def load_adapter(self, name: str, tensors: Mapping[str, Tensor], shape: AdapterShape) -> None:
        """Upload an adapter; a new name gets a new id, which is part of SGLang's prefix-cache key."""
        body = {"lora_name": name, "config_dict": shape.peft_config(), **self._payload(dict(tensors))}
        try:
            self._command("/load_lora_adapter_from_tensors", body)
        except RunFailed as error:
            if FORGOTTEN not in str(error):
                raise
            raise ServerLost(f"the server at {self.url} has forgotten this run: too many others used it") from None

    def unload_adapter(self, name: str) -> None:
        self._command("/unload_lora_adapter", {"lora_name": name})

    def adapter_names(self) -> list[str]:
        return self._request("/v1/models", None, answers.parse_adapter_names)

    # ---- weights

    def weight_version(self) -> str:
        """SGLang's name for the weights that the server holds now."""
        return self._request("/model_info", None, answers.parse_weight_version)

    def rename_weights(self, version: str) -> None:
        self._command("/update_weight_version", {"new_version": version, "abort_all_requests": False})
        self.expected_version = version if self.expected_version else ""

    def weight_status(self, client: str = "") -> answers.WeightStatus | None:
        """What mezzo's loader says of the weights; None if mezzo is not installed beside the server, or another version."""
        body = {"name": f"{STATUS} {client}".strip(), "truncate_size": 1}
        try:
            return read_answer(self._send("/get_weights_by_name", body), answers.parse_status)
        except BadAnswer as error:
            if error.lost:
                raise self._explain("/get_weights_by_name", error) from None
            return None

    def digests(self) -> list[answers.PartDigest]:
        """The digests of the matrices that orders have moved, part by part."""
        return self._request("/get_weights_by_name", {"name": DIGESTS, "truncate_size": 1}, answers.parse_digests)

    def write_weights(self, order: Order, tensors: Sequence[tuple[str, Tensor]] = ()) -> None:
        """Have the server's loader carry out an order, and ask whether it did."""
        self._check_version(self.weight_version())
        payload = self._payload([encode_order(order), *tensors])
        body = {**payload, "load_format": LOADER, "flush_cache": False, "weight_version": order.version}
        with self._update_session():
            self._command("/update_weights_from_tensor", body)
        status = self.weight_status(order.owner)
        # Not by its error alone: that may be of another client's order, refused since.
        if status is None or status.version != ("" if order.is_base else order.version):
            name = status.version if status and status.version else order.base_name
            self.rename_weights(name)  # SGLang named them as if the order had been carried out
            reason = status.error or "other weights took their place" if status else "its loader does not answer"
            raise self.failure(f"the server at {self.url} did not change its weights ({reason})")
        self.expected_version = order.version
        self.loader_version = status.version
        # Requests that have just been answered may not be finished: wait for them, so that no old key is left.
        self._post(f"/flush_cache?timeout={FLUSH_TIMEOUT}", {})

    def _payload(self, tensors: Any) -> dict[str, list[str]]:
        """Tensors for every rank, in SGLang's encoding."""
        return {
            "serialized_named_tensors": [base64.b64encode(pickle.dumps(tensors, protocol=4)).decode()] * self.info.ranks
        }

    @contextmanager
    def _update_session(self) -> Iterator[None]:
        """Newer versions accept weights only inside a session, of which there is one at a time."""
        if not self._has_update_sessions():
            yield
            return
        end = time.monotonic() + SESSION_PATIENCE
        while True:
            try:
                self._send("/begin_weight_update", {})
                break
            except BadAnswer as error:
                if error.status != HTTPStatus.BAD_REQUEST:
                    raise self._explain("/begin_weight_update", error) from None
            if time.monotonic() > end:  # nobody takes that long: a client died in it
                self._post("/end_weight_update", {})
                end = time.monotonic() + SESSION_PATIENCE
            time.sleep(0.05)
        try:
            yield
        finally:
            self._command("/end_weight_update", {})

    def _has_update_sessions(self) -> bool:
        try:
            self._send("/begin_weight_update", None)  # a GET, which begins nothing
        except BadAnswer as error:
            return error.status == HTTPStatus.METHOD_NOT_ALLOWED
        return False

    def _check_version(self, version: str) -> None:
        if self.expected_version and version != self.expected_version:
            raise ServerLost(
                f"the server at {self.url} no longer holds this run's weights: it was restarted, or another run used it. "
                f"{RESUME}"
            )

    # ---- requests

    def is_there(self, timeout: float | None = None) -> bool:
        """True if the server answers anything at all."""
        try:
            send(self.url + "/model_info", None, timeout or LOOK_TIMEOUT)
        except BadAnswer as error:
            return not error.lost
        return True

    def read_info(self) -> answers.ServerInfo:
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
                if self.run_started and error.lost:
                    raise self._explain(path, error) from None
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
        return self._read(path, self._post(path, body), parse)

    def _read(self, path: str, data: bytes, parse: Callable[[Any], T]) -> T:
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
        kind = ServerLost if error.lost else RunFailed
        return kind(f"the SGLang server at {self.url} failed ({error}). {RESUME}")

    def failure(self, text: str) -> MezzoError:
        return RunFailed(f"{text}. {RESUME}") if self.run_started else ConfigError(text)

    def _send(self, path: str, body: Mapping[str, Any] | None) -> bytes:
        if body is None:
            return send(self.url + path, None, 30)
        return send(self.url + path, body, TIMEOUT, self.is_there)
