"""Journals written by earlier versions verify: the file format and the arithmetic of updates are guarded.

Each was recorded with six steps on a bundled model: spaces, noise kinds, types, workers and engines. A journal that stops
verifying means that runs of users can no longer be rebuilt; a change of format needs a new format number instead.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import mezzo
from mezzo.journal.journal import START
from mezzo.runs.reopen import open_journal

FOLDER = Path(__file__).parent / "golden"
JOURNALS = sorted(path.name for path in FOLDER.iterdir() if path.name != START)
DIGESTS = {
    "llama-mini-es-lora-b.jsonl": "3b6bcd5d11c79726",
    "llama-mini-lora-gaussian-float32.jsonl": "7752c984a93baa46",
    "llama-mini-solve-lora-both.jsonl": "f9b9f191fb77affc",
    "roberta-mini-full-gaussian-float32.jsonl": "d625c0465881db15",
    "roberta-mini-full-lowrank-bfloat16.jsonl": "5a1e59cf75f67283",
    "roberta-mini-full-samples3-w2.jsonl": "9b84961978a8ceb2",
    "roberta-mini-full-samples3.mezzo": "9b84961978a8ceb2",
    "roberta-mini-head-rademacher-float32.jsonl": "8433e178d74481cf",
    "roberta-mini-matrices-rademacher-float16.jsonl": "b2d5c849ae4a268b",
    "roberta-mini-pattern.jsonl": "373f0a9e82faeb5f",
    "roberta-mini-prefix-rademacher-float32.jsonl": "2644df3b5c610d5c",
    "roberta-mini-readout-head.jsonl": "8e1865d0270e826f",
    "roberta-mini-solve-lora-b.jsonl": "d77641610b243d4d",
    "sglang-llama-matrices.jsonl": "5786348f54733a51",
}
"""Of the weights after the last step, by the version that wrote them."""


def test_every_golden_journal_has_its_digest():
    assert sorted(DIGESTS) == JOURNALS and len(JOURNALS) >= 10


@pytest.mark.parametrize("name", JOURNALS)
def test_golden_journal_rebuilds_the_recorded_weights(name):
    verified = mezzo.verify(FOLDER / name)
    assert verified.ok and verified.steps == 6
    assert verified.digest.startswith(DIGESTS[name])


@pytest.mark.parametrize("name", [name for name in JOURNALS if name.endswith(".jsonl")])
def test_golden_header_is_written_as_it_was_read(name, tmp_path):
    """A header survives parsing and writing without losing or gaining a field."""
    import json

    stored = json.loads((FOLDER / name).read_bytes().splitlines()[0])
    assert open_journal(FOLDER / name).header.to_dict() == {
        k: v for k, v in stored.items() if k not in ("format", "crc")
    }
