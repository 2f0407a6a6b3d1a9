"""A server in bfloat16: weights equal the torch engine's bit for bit, scores as far as rounding allows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mezzo.engines import open_engine
from mezzo.engines.sglang.server.loader import LOADER
from mezzo.errors import ConfigError
from mezzo.method.space import Space
from tests.sglang.conftest import MODEL, PAIR, UPDATES, spec_of, update, words_batch
from tests.sglang.servers import Server
from tests.sglang.test_server_matrices import PROJECTIONS, assert_same_weights

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.gpu]
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
SPACES = {"lora": Space("lora", rank=4, alpha=8), "matrices": Space("matrices", noise_rank=4)}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    more = ("--custom-weight-loader", LOADER)
    log = tmp_path_factory.mktemp("server") / "log"
    server = Server(MODEL, log, targets=PROJECTIONS, more=more, dtype="bfloat16", device="cuda")
    try:
        yield server.ready()
    finally:
        server.kill()


def center(scores):
    return scores - scores.mean(-1, keepdims=True)


@pytest.mark.parametrize("space", SPACES)
def test_weights_and_sign_differences_match_torch_engine(server, space):
    spec = spec_of(SPACES[space], rows=16, dtype="bfloat16", device="cuda")
    reference = open_engine("torch", spec)
    engine = open_engine("sglang", spec_of(SPACES[space], dtype="bfloat16", urls=(server.url,), exclusive_server=True))
    for step in range(10):
        for each in (engine, reference):
            each.apply([*UPDATES, update((100 + step, 1e-3), keep=0.9999)])
    assert engine.digest() == reference.digest()
    if space == "matrices":
        assert_same_weights(server, reference.state())
    batch = words_batch(16, prefix=tuple(range(100, 140)))
    ours, theirs = (center(each.score(batch, PAIR)) for each in (engine, reference))
    assert np.abs(ours - theirs).max() < 0.25
    assert np.corrcoef((ours[0] - ours[1]).ravel(), (theirs[0] - theirs[1]).ravel())[0, 1] > 0.99
    assert engine.token_counts.cached == 2 * 16 * 40
    engine.close()


def test_matrices_of_another_dtype_are_refused(server):
    """Their updates would be rounded differently. LoRA factors are held by the client, so the server's dtype does not matter."""
    with pytest.raises(ConfigError, match="holds its weights as 'bfloat16', the run as 'float32'"):
        open_engine("sglang", spec_of(SPACES["matrices"], urls=(server.url,), exclusive_server=True))
