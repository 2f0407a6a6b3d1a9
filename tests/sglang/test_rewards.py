"""`--method es` on SGLang: a population generates in one batch, one adapter for each member."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

import mezzo
from mezzo.runs.reopen import open_run
from mezzo.types import Generation, Probe
from tests.sglang.conftest import EPS, MODEL, words_batch
from tests.test_rewards import HABIT, QUICK, commas
from tests.test_scripts import run_script

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    out = tmp_path_factory.mktemp("habit") / "run"
    session = mezzo.open_session(MODEL, engine="sglang", **QUICK, **HABIT, objective=commas, out=str(out))
    yield session
    session.close()


def test_a_population_generates_what_its_members_would_alone_and_what_the_torch_engine_does(session):
    assert len(session.engine.adapters) == 16, "all members of a step in one batch"
    reference, _ = open_run(session.folder.path, 0, commas, engine="torch")
    probes = [Probe(((seed, sign * EPS),)) for seed in (3, 4, 5) for sign in (1, -1)]
    drawn = Generation(5, temperature=1.0, top_p=0.9, draws=2, seed=4)
    for generation in (Generation(5), drawn, dataclasses.replace(drawn, stop_ids=(18, 323))):
        together, expected = (
            engine.generate(words_batch(4), probes, generation) for engine in (session.engine, reference)
        )
        assert together == expected
        assert together[:2] == session.engine.generate(words_batch(4), probes[:2], generation)
    prefix, counted = tuple(range(100, 140)), session.engine.token_counts.cached
    asked = (words_batch(4, prefix=prefix), probes, dataclasses.replace(drawn, draws=1))
    assert session.engine.generate(*asked) == reference.generate(*asked)
    assert session.engine.token_counts.cached - counted == len(probes) * 4 * len(prefix), "once for each member"


def test_habit_is_learned_beyond_chance_and_the_torch_engine_rebuilds_it(session):
    run = session.train()
    assert run.value > run.interval[0] > run.zero_shot, "beyond the interval of its test reward"
    assert run.verdict.startswith("worked: ")
    assert mezzo.verify(run.out).ok
    engine, _ = open_run(run.out, run.steps, commas, engine="torch", device="cpu")
    assert engine.digest() == run.digest, "the same bits from seeds and coefficients, on another engine"


def test_benchmark_measures_all_its_contenders(tmp_path):
    sizes = ["--samples", "1", "--prompts", "2", "--max-new-tokens", "4", "--rounds", "1"]
    out = tmp_path / "rows.jsonl"
    done = run_script("../benchmarks/rewards.py", "--model", MODEL, "--device", "cpu", *sizes, "--out", str(out))
    assert done.returncode == 0, done.stderr
    rows = {row["contender"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert list(rows) == ["mezzo", "same", "different", "torch"]
    for row in rows.values():
        assert "error" not in row, f"{row}\n{done.stderr}"
        assert row["texts_per_s"] > 0 and row["tokens_per_s"] > 0
        assert [each["texts"] for each in row["rounds"]] == [4], "both signs of a direction, two prompts"
    shown = re.findall(r"^\| (\w+) \| ([\d.]+) \| (\d+) \|", done.stdout, re.MULTILINE)
    assert [name for name, *_ in shown] == list(rows)
    assert all(float(texts) > 0 and float(tokens) > 0 for _, texts, tokens in shown)
    assert done.stdout.startswith("4 of 4 texts begin as the torch engine's")


def test_contenders_of_the_benchmark_take_turns(tmp_path):
    sizes = ["--samples", "1", "--prompts", "2", "--max-new-tokens", "4", "--rounds", "2"]
    chosen = ["--contenders", "same,torch", "--together", "--out", str(tmp_path / "rows.jsonl")]
    done = run_script("../benchmarks/rewards.py", "--model", MODEL, "--device", "cpu", *sizes, *chosen)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["contender"] for row in rows] == ["same", "torch"], "in the order asked for"
    assert all(len(row["rounds"]) == 2 and "peak_mib" not in row for row in rows), done.stderr
