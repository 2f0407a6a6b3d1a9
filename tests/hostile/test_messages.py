"""Messages into SGLang's processes: values arrive as they were, and no bytes run code or fail otherwise than as no message."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.engines.base import EngineSpec
from mezzo.engines.sglang.inprocess import wire
from mezzo.engines.sglang.inprocess.channel import answer_path, answer_request
from mezzo.engines.sglang.inprocess.worker import CALLS, Worker
from mezzo.engines.sglang.tensor_parts import TensorPart
from mezzo.errors import MezzoError, RunFailed
from mezzo.method.space import Space
from mezzo.types import Probe, Update
from tests.conftest import make_batch

MESSAGE = (
    "score",
    {
        "batch": make_batch(),
        "probes": (Probe(), Probe(((2**64 - 1, 1e-3),))),
        "spec": EngineSpec("m", "causal", Space("lora", targets=("q_proj",)), rows=4),
        "names": ["a", None, 0.5, True],
    },
    (Update(((7, 0.5),), 0.25),),
)


def test_values_arrive_as_they_were():
    assert wire.decode(wire.encode(MESSAGE)) == MESSAGE
    part = TensorPart("w", (0, 2), (1, 4), np.arange(6, dtype=np.float32).reshape(2, 3))
    (error, [found]) = wire.decode(wire.encode((RunFailed("why"), [part])))
    assert (type(error), str(error)) == (RunFailed, "why")
    assert (found.name, found.rows, found.cols) == ("w", (0, 2), (1, 4))
    np.testing.assert_array_equal(found.values, part.values)
    with pytest.raises(TypeError, match="Path is not sent"):
        wire.encode(Path("x"))


ALLOWED = (*wire.PLAIN, *wire.TYPES.values(), tuple, list, dict, np.ndarray, MezzoError)


@given(st.binary(max_size=200), st.integers(0, 2000))
def test_random_bytes_are_no_message(junk, where):
    data = wire.encode(MESSAGE)
    for changed in (junk, data[:where] + junk + data[where + len(junk) :]):
        try:
            found = wire.decode(changed)
        except ValueError:
            continue
        assert isinstance(found, ALLOWED)


class Harmful:
    def __reduce__(self):
        return open, ("harmed", "w")


def test_pickled_request_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    request = tmp_path / "1.request"
    request.write_bytes(pickle.dumps(Harmful()))
    answer_request(request, 0, lambda *message: "answered")
    assert "not a message" in str(wire.decode(answer_path(request, 0).read_bytes()))
    assert not (tmp_path / "harmed").exists()
    worker = object.__new__(Worker)
    with pytest.raises(ValueError, match="not a call"):
        worker.handle("__init__", {"scheduler": None}, ())
    assert all(callable(getattr(Worker, name)) for name in CALLS)
