"""JSON over HTTP with a server of unknown intent: bounded answers, no redirects, no proxies; the user's API key goes along."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from mezzo.errors import ConfigError

API_KEY = "MEZZO_API_KEY"
LARGEST_ANSWER = 2**27
# Bytes that are shown of an error page.
SHOWN = 300
# Seconds without an answer after which the client looks whether the server is still there.
LOOK_SECONDS = 15.0
T = TypeVar("T")


class BadAnswer(Exception):
    """A server did not answer (`lost`), or not as SGLang does. `status` is that of HTTP, 0 where there is none."""

    def __init__(self, reason: str, status: int = 0, lost: bool = False) -> None:
        super().__init__(reason)
        self.status, self.lost = status, lost


def send(
    url: str, body: Mapping[str, Any] | None, timeout: float, still_there: Callable[[], bool] | None = None
) -> bytes:
    """The answer to a POST, or without a body to a GET, whole within `timeout` seconds.

    While it waits, it asks every few seconds whether the server is `still_there`: a computation may take long, but a server that
    does not answer anything is lost.
    """
    key = _api_key()
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    try:
        with contextlib.closing(_connect(url, timeout)) as connection:
            path = url.split("/", 3)[3]
            data = None if body is None else json.dumps(body).encode()
            connection.request("GET" if body is None else "POST", f"/{path}", data, headers)
            with _watch(connection, timeout, still_there):
                answer = connection.getresponse()
                if answer.status >= 300:  # a redirect is not followed: prompts and the key go to no other address
                    page = b""
                    with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
                        page = answer.read(SHOWN)
                    reason = _without_key(f"HTTP {answer.status}: {page.decode(errors='replace')}", key)
                    raise BadAnswer(reason, answer.status)
                content = answer.read(LARGEST_ANSWER + 1)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise BadAnswer(_without_key(str(error)[:SHOWN] or type(error).__name__, key), lost=True) from None
    if len(content) > LARGEST_ANSWER:
        raise BadAnswer(f"it sent more than {LARGEST_ANSWER:,} bytes")
    return content


def _connect(url: str, timeout: float) -> http.client.HTTPConnection:
    """A connection without proxies."""
    address = urlsplit(url)
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    return kind(address.hostname or "", address.port, timeout=timeout)


@contextlib.contextmanager
def _watch(
    connection: http.client.HTTPConnection, timeout: float, still_there: Callable[[], bool] | None
) -> Iterator[None]:
    """Look at the server while the block waits for its answer; TimeoutError if it is gone, or takes longer than the timeout.

    A thread looks, since a socket's own timeout begins again with each byte that comes, and a wait for bytes ends with the first
    ones of an encrypted connection, which are none of the answer.
    """
    waiting, done, gone = connection.sock, threading.Event(), threading.Event()
    end = time.monotonic() + timeout

    def look() -> None:
        while not done.wait(max(0.0, min(LOOK_SECONDS, end - time.monotonic()))):
            late = time.monotonic() >= end
            if (late or (still_there and not still_there())) and not done.is_set():
                gone.set()
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(waiting, socket.SHUT_RDWR)  # ends the wait
                return

    threading.Thread(target=look, daemon=True).start()
    try:
        yield
    except (OSError, ValueError, http.client.HTTPException):
        if not gone.is_set():
            raise
    finally:
        done.set()
    if gone.is_set():
        raise TimeoutError("it stopped answering")


def read_answer(data: bytes, parse: Callable[[Any], T]) -> T:
    """What `parse` makes of the JSON in an answer. It may fail in any way that values of unexpected shape cause."""
    try:
        return parse(json.loads(data))
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        reason = _without_key(f"{type(error).__name__}: {str(error)[:100]}", _api_key())
        raise BadAnswer(f"its answer is not one of SGLang's ({reason})") from None


def _api_key() -> str:
    """The key of all servers of the run, from the environment: nothing that is stored or shown has it."""
    key = os.environ.get(API_KEY, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{API_KEY} holds characters that cannot be sent; is it a key?")
    return key


def _without_key(text: str, key: str) -> str:
    return text.replace(key, "…") if key else text
