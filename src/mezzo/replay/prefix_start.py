"""Initial values that neither the base model nor the seed determines: a prefix starts at the outcome of a forward pass.

The last bits of a forward differ between machines, so the journal's header stores the values themselves.
"""

from __future__ import annotations

import base64
import binascii
import zlib

import numpy as np
import numpy.typing as npt

from mezzo.engines.base import Engine
from mezzo.errors import JournalError
from mezzo.journal.header import Header


def prefix_start(engine: Engine) -> dict[str, str]:
    """The initial prefix for the header of a new run; nothing in spaces that start at the base model."""
    names = [t.name for t in engine.trained if t.kind == "prefix"]
    state = engine.state() if names else {}
    return {name: _pack(state[name]) for name in names}


def restore_prefix_start(engine: Engine, header: Header, source: object) -> None:
    """Put a fresh engine at the values that the run started from."""
    shapes = {t.name: t.shape for t in engine.trained if t.kind == "prefix"}
    if not shapes:
        return
    if set(header.start) != set(shapes):
        raise JournalError(f"{source}: the header does not say where the prefix began; it cannot be rebuilt")
    try:
        values = {name: _unpack(header.start[name], shape) for name, shape in shapes.items()}
    except (TypeError, ValueError, binascii.Error, zlib.error):
        raise JournalError(f"{source}: the prefix in the header is damaged; it cannot be rebuilt") from None
    state = engine.state()
    if any(not np.array_equal(state[name], value) for name, value in values.items()):  # another machine started the run
        engine.load_state({**state, **values})


def _pack(values: npt.NDArray[np.generic]) -> str:
    """The upper halves of float32 values whose lower halves are zero, which is what the engine rounds a prefix to."""
    words = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    assert not (words & 0xFFFF).any(), "a prefix starts at bfloat16 values"
    return base64.b64encode(zlib.compress((words >> 16).astype("<u2").tobytes(), 9)).decode()


def _unpack(text: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    size = 2 * int(np.prod(shape))
    data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), size + 1)
    if len(data) != size:
        raise ValueError
    values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").reshape(shape)
    if not np.isfinite(values).all():
        raise ValueError
    return values.astype(np.float32)
