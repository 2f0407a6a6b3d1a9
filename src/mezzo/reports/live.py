"""The report while a run trains: served on this machine, to whoever has the address, rendered anew for every request."""

from __future__ import annotations

import hmac
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from mezzo.errors import ConfigError, MezzoError
from mezzo.reports.comparison import compare
from mezzo.reports.page import render_page
from mezzo.untrusted import printable

LOOPBACK = "127.0.0.1"
# Connections at the same time, and seconds that one may last. A page needs one every two seconds.
MAX_CLIENTS, MAX_SECONDS = 16, 10.0
# Of an error that is shown.
MAX_CHARACTERS = 300


class PageServer(ThreadingHTTPServer):
    """Ready to `serve_forever`. The address holds a token, because every user of this machine can reach its ports."""

    request_queue_size = 512
    """Connections that wait to be accepted: the kernel makes those beyond it try again for seconds."""

    def __init__(self, paths: Sequence[str | Path], port: int) -> None:
        self.paths, self._token = paths, secrets.token_urlsafe(24)
        self._started: dict[Any, float] = {}
        super().__init__((LOOPBACK, port), _Handler)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/?token={self._token}"

    def admits(self, query: str) -> bool:
        given = parse_qs(query).get("token", [""])[0]
        return hmac.compare_digest(given.encode(errors="replace"), self._token.encode())

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._started) >= MAX_CLIENTS:
            self.shutdown_request(request)
            return
        self._started[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._started.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End connections that have lasted too long; their threads then end too."""
        for request, started in list(self._started.items()):
            if time.monotonic() - started > MAX_SECONDS:
                try:
                    request.shutdown(socket.SHUT_RDWR)
                except OSError:
                    self._started.pop(request, None)  # it has ended meanwhile

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say it in one line. A client that hangs up is not our error."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            print(f"a request for the report failed: {printable(repr(error))[:MAX_CHARACTERS]}", file=sys.stderr)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        try:
            address = urlsplit(self.path)
        except ValueError:  # such as http://[x
            self._respond(400, "text/plain", b"this address cannot be read\n")
            return
        # Another site could point its own host name at this address (DNS rebinding): accept our own names only.
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        if host not in (LOOPBACK, "localhost"):
            self._respond(403, "text/plain", b"use 127.0.0.1 or localhost\n")
        elif not self.server.admits(address.query):
            self._respond(403, "text/plain", b"open the complete address, with its token\n")
        elif address.path != "/":
            self._respond(404, "text/plain", b"the report is at /\n")
        else:
            self._respond_with_page()

    def _respond_with_page(self) -> None:
        try:
            page = render_page(compare(self.server.paths).runs, live=True)
        except (MezzoError, OSError) as error:
            self._respond(500, "text/plain", f"{error}\n".encode(errors="replace"))
        else:
            self._respond(200, "text/html", page.encode())

    def _respond(self, code: int, content_type: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", f"{content_type}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the page sends a request every two seconds."""


def make_server(paths: Sequence[str | Path], port: int = 0) -> PageServer:
    """A server of the page of these runs; port 0 takes a free one."""
    try:
        return PageServer(paths, port)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--port {port} cannot be used: {getattr(error, 'strerror', None) or error}") from None
