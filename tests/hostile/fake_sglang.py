"""A small HTTP server that answers as SGLang does, by an ordinary model, until a test changes its answers."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from mezzo.engines.sglang.server.loader import STATUS

INFO = {
    "version": "0.5.23",
    "model_path": "served/model",
    "enable_lora": True,
    "max_lora_rank": 8,
    "lora_target_modules": ["all"],
    "max_loras_per_batch": 4,
    "dtype": "float32",
    "tp_size": 1,
}


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: dict[str, Any]) -> None:
        server = self.server
        server.requests.append((self.path, self.headers.get("Authorization")))
        if server.api_key and self.headers.get("Authorization") != f"Bearer {server.api_key}":
            self._send(401, {}, b'{"error": "Unauthorized"}')
            return
        self._send(*server.change(self.path, json.dumps(server.honest_answer(self.path, body)).encode()))

    def _send(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


class FakeServer(ThreadingHTTPServer):
    """`change(path, data)` gives status, headers and data in place of an honest answer."""

    daemon_threads = True

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.model = model
        self.change: Callable[[str, bytes], tuple[int, dict[str, str], bytes]] = lambda path, data: (200, {}, data)
        self.api_key = ""
        self.loader: dict[str, Any] = {}
        """What mezzo's loader beside the server answers to a question; without it, there is none."""
        self.requests: list[tuple[str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: object) -> None:
        """A client that refuses an answer hangs up."""

    def honest_answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/server_info":
            return INFO
        if path == "/model_info":
            return {"weight_version": "default"}
        if path == "/get_weights_by_name" and self.loader:
            return [float(byte) for byte in json.dumps(self.loader[body["name"].split()[0]]).encode()]
        if path == "/update_weights_from_tensor" and self.loader:  # as if it had carried out the order
            self.loader[STATUS][0]["version"] = body["weight_version"]
        if path != "/generate":
            return {"success": True}
        count = len(body["input_ids"])
        words, adapters = body.get("token_ids_logprob"), body.get("lora_path") or [None] * count
        starts = body.get("logprob_start_len") or [0] * count
        return [
            self._row(ids, words and words[row], starts[row], adapters[row], body["sampling_params"]["max_new_tokens"])
            for row, ids in enumerate(body["input_ids"])
        ]

    @torch.no_grad()
    def _row(self, ids: list[int], words: list[int] | None, start: int, adapter: str | None, new_tokens: int) -> Any:
        logprobs = self.model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
        if adapter:  # any perturbation will do
            logprobs = logprobs + 1e-3 * torch.randn(
                logprobs.shape, generator=torch.Generator().manual_seed(zlib.crc32(adapter.encode()))
            )
        meta: dict[str, Any] = {"weight_version": "default", "cached_tokens": 0, "prompt_tokens": len(ids)}
        if words:
            meta["output_token_ids_logprobs"] = [[[float(logprobs[-1, word]), word, None] for word in words]]
        values = [
            (None if at == 0 else float(logprobs[at - 1, ids[at]]), ids[at], None) for at in range(start, len(ids))
        ]
        meta["input_token_logprobs"] = values
        return {"output_ids": [int(logprobs[-1].argmax())] * new_tokens, "meta_info": meta}
