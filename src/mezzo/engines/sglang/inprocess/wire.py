"""Values as bytes and back, for messages between the driver and SGLang's processes: JSON and arrays, no pickle.

Whoever can name a file to those processes could otherwise run code in them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from array import array
from typing import Any

import numpy as np

from mezzo import errors
from mezzo.engines.base import EngineSpec
from mezzo.engines.sglang.model_facts import ModelFacts
from mezzo.engines.sglang.tensor_parts import TensorPart
from mezzo.engines.token_rows import TokenCounts
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
# What a reward reads of a prompt, which is not compared, is not the business of an engine.
FIELDS = {
    name: tuple(field.name for field in dataclasses.fields(each) if field.compare) for name, each in TYPES.items()
}
PLAIN = frozenset((bool, int, float, str, type(None)))
LENGTH = 8  # bytes of the number in front
MANY, MAX_ID = 16, 2**31  # integers that are stored as an array: token ids


def encode(value: Any) -> bytes:
    """A number, the length of the JSON text; the text; the arrays that it refers to."""
    arrays = bytearray()
    text = json.dumps(_encode(value, arrays), separators=(",", ":")).encode()
    return b"".join((len(text).to_bytes(LENGTH, "little"), text, arrays))


def decode(data: bytes) -> Any:
    """The value; ValueError where the bytes are not those of one."""
    end = LENGTH + int.from_bytes(data[:LENGTH], "little")
    try:
        return _decode(json.loads(data[LENGTH:end]), memoryview(data)[end:])
    except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError, AttributeError, MezzoError) as error:
        raise ValueError(f"not a message: {error!r}") from None


def _encode(value: Any, arrays: bytearray) -> Any:
    """Plain values as they are, all others as a list that begins with the name of their type."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, (tuple, list)):
        kind = type(value).__name__
        types = set(map(type, value))
        if types == {int} and len(value) >= MANY and min(value) >= 0 and max(value) < MAX_ID:
            start = len(arrays)
            arrays += array("i", value).tobytes()
            return [f"ids {kind}", len(value), start]
        if PLAIN.issuperset(types):
            return [f"plain {kind}", list(value)]
        return [kind, [_encode(each, arrays) for each in value]]
    if isinstance(value, dict):
        return ["dict", [[key, _encode(each, arrays)] for key, each in value.items()]]
    if isinstance(value, np.ndarray):
        start = len(arrays)
        arrays += np.ascontiguousarray(value).tobytes()
        return ["array", value.dtype.str, list(value.shape), start]
    if isinstance(value, float):  # one of NumPy's
        return float(value)
    if isinstance(value, MezzoError):
        return ["error", type(value).__name__, str(value)]
    name = type(value).__name__
    if TYPES.get(name) is not type(value):
        raise TypeError(f"{name} is not sent to SGLang's processes")
    return [name, [_encode(getattr(value, field), arrays) for field in FIELDS[name]]]


def _decode(value: Any, arrays: memoryview) -> Any:
    if type(value) in PLAIN:
        return value
    kind, content = value[0], value[1]
    match kind:
        case "ids tuple" | "ids list":
            ids = np.frombuffer(arrays, np.int32, content, value[2]).tolist()
            return tuple(ids) if kind == "ids tuple" else ids
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
            return TYPES[kind](*(_decode(each, arrays) for each in content))
