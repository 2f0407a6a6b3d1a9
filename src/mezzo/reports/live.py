"""The report while a run trains: served to this machine only, rendered anew for every request."""

from __future__ import annotations

from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from mezzo.errors import ConfigError, MezzoError
from mezzo.reports.page import render_page
from mezzo.reports.run_data import read_run

LOOPBACK = "127.0.0.1"


def make_server(paths: Sequence[str | Path], port: int = 0) -> ThreadingHTTPServer:
    """A server that is ready to `serve_forever`; port 0 takes a free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # Another site could point its own host name at this address (DNS rebinding): accept our own names only.
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            if host not in (LOOPBACK, "localhost"):
                self._respond(403, "text/plain", b"use 127.0.0.1 or localhost\n")
            elif self.path != "/":
                self._respond(404, "text/plain", b"the report is at /\n")
            else:
                try:
                    self._respond(200, "text/html", render_page([read_run(path) for path in paths], live=True).encode())
                except MezzoError as error:
                    self._respond(500, "text/plain", f"{error}\n".encode())

        def _respond(self, code: int, content_type: str, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", f"{content_type}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: the page sends a request every two seconds."""

    try:
        return ThreadingHTTPServer((LOOPBACK, port), Handler)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--port {port} cannot be used: {getattr(error, 'strerror', None) or error}") from None
