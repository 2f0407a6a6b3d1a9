"""Complete runs on vLLM by SPSA, solve and a reward: the torch engine finds the same, and its replay has the same bits."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

import mezzo
from mezzo.journal.content import read
from tests.conftest import SENTENCES

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
MODEL = "mezzo/llama-mini"
METHODS = {
    "spsa": {"method": "spsa", "steps": 8, "samples": 2, "batch_size": 8},
    "solve": {"steps": 3, "samples": 6, "batch_size": 16},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [{"text": text, "label": label} for label, texts in SENTENCES.items() for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_agrees_with_the_torch_engine_and_is_verified(method, data, tmp_path):
    common = {"task": "sst-2", "train": data, "dev": data, "space": "lora", "rank": 4, "threads": 1, "seed": 2}
    common |= METHODS[method]
    runs = {name: mezzo.finetune(MODEL, engine=name, out=tmp_path / name, **common) for name in ("vllm", "torch")}
    served, plain = (read(tmp_path / name).records for name in ("vllm", "torch"))
    assert len(served) == common["steps"] and runs["vllm"].moves == runs["torch"].moves
    np.testing.assert_allclose([r.losses for r in served], [r.losses for r in plain], atol=1e-3)
    for ours, theirs in zip(served, plain, strict=True):
        np.testing.assert_allclose(ours.slopes, theirs.slopes, rtol=0.02, atol=0.02)
        assert [seed for seed, _ in ours.update.terms] == [seed for seed, _ in theirs.update.terms]
    verified = mezzo.verify(runs["vllm"].out)  # rebuilt by the torch engine
    assert verified.ok and verified.digest == runs["vllm"].digest
    found = {name: mezzo.evaluate(runs["vllm"].out, data=data, engine=name) for name in ("vllm", "torch")}
    assert found["vllm"].accuracy == found["torch"].accuracy


def test_rewards_of_texts_are_those_of_the_torch_engine(tmp_path):
    """Nine directions are 18 adapters, in two calls."""
    rows = [{"prompt": f"The {noun} and the sea"} for noun in ("dog", "cat", "man", "boy", "tree", "house")]
    options = {"task": "prompts", "max_new_tokens": 6, "stop": ("",), "threads": 1, "device": "cpu"}
    options |= {"train": rows[:4], "dev": rows[4:], "method": "es", "steps": 2, "samples": 9, "batch_size": 3}
    for name in ("vllm", "torch"):
        mezzo.finetune(MODEL, **options, objective=count_letters, engine=name, out=tmp_path / name)
    ours, theirs = ([record.losses for record in read(tmp_path / name).records] for name in ("vllm", "torch"))
    assert ours == theirs and mezzo.verify(tmp_path / "vllm").ok


def count_letters(completion: str) -> float:
    return float(completion.count("e"))


def test_a_stopped_run_goes_on_to_the_bits_of_a_whole_one(data, tmp_path):
    """Here in two parts, and by the command line in another process, where the same questions have the same answers."""
    options = {"engine": "vllm", "task": "sst-2", "train": data, "dev": data, "threads": 1, "batch_size": 4}
    options |= {"method": "spsa", "schedule": "constant", "eval_limit": 4}
    mezzo.finetune(MODEL, **options, steps=3, out=tmp_path / "parts")
    mezzo.finetune(resume=tmp_path / "parts", steps=6)
    words = [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), str(value))]
    whole = ["train", "--model", MODEL, *words, "--steps", "6", "--out", str(tmp_path / "whole")]
    done = subprocess.run([sys.executable, "-m", "mezzo", *whole], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    records = [list(read(tmp_path / name).records) for name in ("whole", "parts")]
    assert records[0] == records[1] and len(records[0]) == 6
