"""JSON over HTTP with a server of unknown intent: bounded answers, no redirects, no proxies; the user's API key goes along."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mezzo.errors import ConfigError

API_KEY = "MEZZO_API_KEY"
LARGEST_ANSWER = 2**27
# Bytes that are shown of an error page.
SHOWN = 300
T = TypeVar("T")


class BadAnswer(Exception):
    """A server did not answer, or not as SGLang does. `status` is that of HTTP, 0 where there is none."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


def send(url: str, body: Mapping[str, Any] | None, timeout: float) -> bytes:
    """The answer to a POST, or without a body to a GET."""
    key = _api_key()
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    try:
        with _OPENER.open(request, timeout=timeout) as answer:
            data: bytes = answer.read(LARGEST_ANSWER + 1)
    except urllib.error.HTTPError as error:
        page = b""
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            page = error.read(SHOWN)
        reason = _without_key(f"HTTP {error.code}: {page.decode(errors='replace')}", key)
        raise BadAnswer(reason, error.code) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise BadAnswer(_without_key(str(error)[:SHOWN] or type(error).__name__, key)) from None
    if len(data) > LARGEST_ANSWER:
        raise BadAnswer(f"it sent more than {LARGEST_ANSWER:,} bytes")
    return data


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


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Prompts, weights and the key go to the address that the user gave and to no other."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())
