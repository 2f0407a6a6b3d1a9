"""Initial values that neither the base model nor the seed determines: a prefix starts at the outcome of a forward pass.

The last bits of a forward differ between machines, so the values themselves are stored, in a file beside the journal whose
digest is in the header: they may be large.
"""

from __future__ import annotations

import hashlib
import math
import zlib

import numpy as np
import numpy.typing as npt

from mezzo.engines.base import Engine
from mezzo.errors import JournalError, RunFailed
from mezzo.journal.compact import decompress
from mezzo.journal.content import Content
from mezzo.journal.journal import START
from mezzo.types import TrainedTensor
from mezzo.untrusted import read_bytes


def prefix_start(engine: Engine) -> bytes:
    """The initial prefix of a new run; nothing in spaces that start at the base model."""
    tensors = _prefix(engine)
    state = engine.state() if tensors else {}
    return b"".join(_pack(state[tensor.name]) for tensor in tensors)


def restore_prefix_start(engine: Engine, content: Content) -> None:
    """Put a fresh engine at the values that the run started from."""
    tensors = _prefix(engine)
    if not tensors:
        return
    data, values = read_start(content), {}
    for tensor in tensors:
        size = 2 * math.prod(tensor.shape)
        values[tensor.name] = _unpack(data[:size], tensor.shape)
        data = data[size:]
    if not all(np.isfinite(value).all() for value in values.values()):
        raise JournalError(f"{content.path}: the prefix starts at values that are not finite")
    state = engine.state()
    if any(not np.array_equal(state[name], value) for name, value in values.items()):  # another machine started the run
        engine.load_state({**state, **values})


def read_start(content: Content) -> bytes:
    """The stored values of a journal whose run trains a prefix."""
    path = content.path.with_name(START) if content.start is None else content.path
    size = sum(2 * math.prod(t.shape) for t in content.header.tensors if t.kind == "prefix")
    try:
        data = read_bytes(path, size) if content.start is None else decompress(content.start, size)
    except (OSError, ValueError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise JournalError(f"{path}: {reason}; without the start of its prefix the run cannot be rebuilt") from None
    if len(data) != size or hashlib.sha256(data).hexdigest() != content.header.start:
        raise JournalError(
            f"{path} is not what the journal's header says: restore it, the run cannot be rebuilt without it"
        )
    return data


def _prefix(engine: Engine) -> list[TrainedTensor]:
    return [tensor for tensor in engine.trained if tensor.kind == "prefix"]


def _pack(values: npt.NDArray[np.generic]) -> bytes:
    """The upper halves of float32 values whose lower halves are zero, which is what the engine rounds a prefix to."""
    words = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    if (words & 0xFFFF).any():
        raise RunFailed("the engine started a prefix at values that are not bfloat16; the journal could not rebuild it")
    return (words >> 16).astype("<u2").tobytes()


def _unpack(data: bytes, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").reshape(shape)
    return values.astype(np.float32)
