"""The report while a run trains: served to this machine only, made anew whenever it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from mezzo.errors import ConfigError, MezzoError
from mezzo.reports.page import render
from mezzo.reports.run_data import story_of

LOOPBACK = "127.0.0.1"


def server(paths: Sequence[str | Path], port: int = 0) -> ThreadingHTTPServer:
    """A server that is ready to `serve_forever`; port 0 takes a free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A page elsewhere could make a browser ask for our address under another name: answer to our own names only.
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            if host not in (LOOPBACK, "localhost"):
                self._answer(403, "text/plain", b"ask for 127.0.0.1 or localhost\n")
            elif self.path != "/":
                self._answer(404, "text/plain", b"the report is at /\n")
            else:
                self._report()

        def _report(self) -> None:
            try:
                self._answer(200, "text/html", render([story_of(path) for path in paths], live=True).encode())
            except MezzoError as error:
                self._answer(500, "text/plain", f"{error}\n".encode())

        def _answer(self, code: int, kind: str, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet: it is asked every two seconds."""

    try:
        return ThreadingHTTPServer((LOOPBACK, port), Handler)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--port {port} cannot be used: {getattr(error, 'strerror', None) or error}") from None
