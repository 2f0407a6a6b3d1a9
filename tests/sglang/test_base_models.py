"""A model that is not trained, on SGLang without LoRA: predictions are those of the torch engine."""

from __future__ import annotations

import pytest

from mezzo import api
from tests.conftest import SENTENCES
from tests.sglang.conftest import MODEL

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
ROWS = [{"text": text, "label": label} for label, texts in SENTENCES.items() for text in texts[:8]]
PROMPTS = [f"The {noun} and the sea" for noun in ("dog", "cat", "house")]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model whose norms and embeddings have moved too, which no adapter could say."""
    folder = tmp_path_factory.mktemp("exported")
    data = {"task": "sst-2", "train": ROWS, "dev": ROWS, "test": ROWS}
    how = {"method": "spsa", "space": "full", "steps": 4, "lr": 1e-4, "batch_size": 8, "threads": 1}
    run = api.finetune(MODEL, **data, **how, out=folder / "run")
    api.export(run.out, "model", out=folder / "model", at=run.steps)
    return str(folder / "model")


@pytest.mark.parametrize("name", ["base", "exported"])
def test_evaluation_is_that_of_the_torch_engine(name, request):
    model = request.getfixturevalue(name) if name == "exported" else MODEL
    ours, theirs = (
        api.evaluate(model=model, task="sst-2", data=ROWS, engine=engine, threads=1) for engine in ("sglang", "torch")
    )
    assert (ours.n, ours.accuracy) == (theirs.n, theirs.accuracy)
    assert ours.loss == pytest.approx(theirs.loss, abs=1e-4)


@pytest.mark.parametrize("name", ["base", "exported"])
def test_texts_are_those_of_the_torch_engine(name, request):
    how = {"task": "prompts", "max_new_tokens": 6, "stop": ("",), "threads": 1}
    source = {"run": request.getfixturevalue(name)} if name == "exported" else {"model": MODEL}
    ours, theirs = (list(api.predict(PROMPTS, **source, **how, engine=engine)) for engine in ("sglang", "torch"))
    assert ours == theirs and all(row["prediction"] for row in ours)


def test_labels_of_an_exported_model_are_those_of_the_torch_engine(exported):
    texts = [row["text"] for row in ROWS]
    ours, theirs = (
        list(api.predict(texts, exported, task="sst-2", engine=engine, threads=1)) for engine in ("sglang", "torch")
    )
    assert [row["prediction"] for row in ours] == [row["prediction"] for row in theirs]
    for row, expected in zip(ours, theirs, strict=True):
        assert row["probabilities"] == pytest.approx(expected["probabilities"], abs=1e-4)
