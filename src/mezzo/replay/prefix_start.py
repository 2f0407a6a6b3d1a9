"""Where trained tensors begin when neither the base model nor the seed says so: a prefix begins at the outcome of a forward pass.

A forward's last bits differ between machines, so the journal's header keeps these values themselves.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mezzo.engines.base import Engine
from mezzo.errors import JournalError

FIELD = "start"


def kept(engine: Engine) -> dict[str, Any]:
    """What the header of a new run must hold; nothing for spaces that begin at the base model."""
    names = [t.name for t in engine.trained if t.kind == "prefix"]
    state = engine.state() if names else {}
    return {FIELD: {name: _packed(state[name]) for name in names}} if names else {}


def taken_up(engine: Engine, header: Mapping[str, Any], source: object) -> None:
    """Put a fresh engine where the header says its run began."""
    shapes = {t.name: t.shape for t in engine.trained if t.kind == "prefix"}
    if not shapes:
        return
    given = header.get(FIELD)
    if not isinstance(given, Mapping) or set(given) != set(shapes):
        raise JournalError(f"{source}: the header does not say where the prefix began; it cannot be rebuilt")
    try:
        values = {name: _unpacked(given[name], shape) for name, shape in shapes.items()}
    except (TypeError, ValueError, binascii.Error, zlib.error):
        raise JournalError(f"{source}: the prefix in the header is damaged; it cannot be rebuilt") from None
    state = engine.state()
    if any(not np.array_equal(state[name], value) for name, value in values.items()):  # another machine began the run
        engine.load_state({**state, **values})


def _packed(values: npt.NDArray[np.generic]) -> str:
    """The upper halves of float32 values whose lower halves are zero, which is what the engine rounds a prefix to."""
    words = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    assert not (words & 0xFFFF).any(), "a prefix starts at bfloat16 values"
    return base64.b64encode(zlib.compress((words >> 16).astype("<u2").tobytes(), 9)).decode()


def _unpacked(text: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    size = 2 * int(np.prod(shape))
    data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), size + 1)
    if len(data) != size:
        raise ValueError
    values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").reshape(shape)
    if not np.isfinite(values).all():
        raise ValueError
    return values.astype(np.float32)
