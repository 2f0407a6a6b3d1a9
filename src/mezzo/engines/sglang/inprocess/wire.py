"""Values as bytes and back, for messages between the driver and SGLang's processes: JSON and arrays, no pickle.

Whoever can name a file to those processes could otherwise run code in them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np

from mezzo import errors
from mezzo.engines.base import EngineSpec
from mezzo.engines.sglang.model_facts import ModelFacts
from mezzo.engines.sglang.tensor_parts import TensorPart
from mezzo.engines.sglang.token_rows import TokenCounts
from mezzo.errors import MezzoError
from mezzo.method.space import Space
from mezzo.types import Batch, MicroBatch, Probe, Prompt, Readout, TrainedTensor, Update

TYPES: dict[str, Any] = {
    each.__name__: each
    for each in (
        *(Batch, MicroBatch, Probe, Prompt, Readout, TrainedTensor, Update),
        *(EngineSpec, ModelFacts, Space, TensorPart, TokenCounts),
    )
}
PLAIN = (bool, int, float, str, type(None))
PLAIN_TYPES = frozenset(PLAIN)
LENGTH = 8  # bytes of the number in front


def encode(value: Any) -> bytes:
    """A number, the length of the JSON text; the text; the arrays that it refers to."""
    arrays: list[bytes] = []
    text = json.dumps(_encode(value, arrays), separators=(",", ":")).encode()
    return b"".join((len(text).to_bytes(LENGTH, "little"), text, *arrays))


def decode(data: bytes) -> Any:
    """The value; ValueError where the bytes are not those of one."""
    end = LENGTH + int.from_bytes(data[:LENGTH], "little")
    try:
        return _decode(json.loads(data[LENGTH:end]), memoryview(data)[end:])
    except (
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        OverflowError,
        RecursionError,
        AttributeError,
        MezzoError,
    ) as error:
        raise ValueError(f"not a message: {error!r}") from None


def _encode(value: Any, arrays: list[bytes]) -> Any:
    """Plain values as they are, all others as a list that begins with the name of their type."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, (tuple, list)):
        kind = type(value).__name__
        if PLAIN_TYPES.issuperset(map(type, value)):  # token ids, above all
            return [f"plain {kind}", list(value)]
        return [kind, [_encode(each, arrays) for each in value]]
    if isinstance(value, dict):
        return ["dict", [[key, _encode(each, arrays)] for key, each in value.items()]]
    if isinstance(value, np.ndarray):
        start = sum(map(len, arrays))
        arrays.append(np.ascontiguousarray(value).tobytes())
        return ["array", value.dtype.str, list(value.shape), start]
    if isinstance(value, MezzoError):
        return ["error", type(value).__name__, str(value)]
    name = type(value).__name__
    if TYPES.get(name) is not type(value):
        raise TypeError(f"{name} is not sent to SGLang's processes")
    return [name, [[field.name, _encode(getattr(value, field.name), arrays)] for field in dataclasses.fields(value)]]


def _decode(value: Any, arrays: memoryview) -> Any:
    if isinstance(value, PLAIN):
        return value
    kind, content = value[0], value[1]
    match kind:
        case "plain tuple":
            return tuple(content)
        case "plain list":
            return list(content)
        case "tuple":
            return tuple(_decode(each, arrays) for each in content)
        case "list":
            return [_decode(each, arrays) for each in content]
        case "dict":
            return {key: _decode(each, arrays) for key, each in content}
        case "array":
            dtype, (_, _, shape, start) = np.dtype(content), value
            if dtype.hasobject:
                raise ValueError("an array of objects")
            return np.frombuffer(arrays, dtype, math.prod(shape), start).reshape(shape).copy()
        case "error":
            found = getattr(errors, content)
            return found(value[2]) if issubclass(found, MezzoError) else None
        case _:
            return TYPES[kind](**{name: _decode(each, arrays) for name, each in content})
