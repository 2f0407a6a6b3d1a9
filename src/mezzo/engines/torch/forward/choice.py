"""The implementation that was chosen for a module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Choice:
    """An implementation by name: how it is built around the forward that a module has, or why it is not used."""

    name: str
    build: Callable[[Any], Any] | None = None
    reason: str = ""
