"""The gradient baseline: `--method adam` on every space and readout, with the evaluation, report and exports of any run."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

import mezzo
from mezzo import api
from mezzo.cli import main
from mezzo.engines.torch.engine import TorchEngine
from mezzo.errors import ConfigError, JournalError, SpaceError
from mezzo.method.objectives import cross_entropy
from mezzo.method.space import Space
from mezzo.types import Batch, Probe, Prompt, Readout, Update
from tests.conftest import make_batch, make_llama, make_roberta
from tests.reference import z_of

CANDIDATES = Batch(
    (
        Prompt((5, 9, 30), 1, candidates=((7,), (8, 12))),
        Prompt((4, 31, 6, 40), 0, candidates=((3, 9, 10), (11,), (5,))),
    ),
    Readout("candidates"),
)


def classifier() -> torch.nn.Module:
    from transformers import RobertaForSequenceClassification

    return RobertaForSequenceClassification(make_roberta().config)


@pytest.mark.parametrize("space", ["full", "lora", "prefix", "head"])
@pytest.mark.parametrize("readout", ["words", "vocabulary", "head", "candidates"])
def test_gradient_is_the_slope_of_the_scores(space, readout):
    """Along any direction, the central difference of the loss that the engine's scores give."""
    if (space, readout) == ("head", "candidates"):
        pytest.skip("the head of this model is tied to its embeddings")
    words = make_batch(5)
    model, batch = {
        "words": (make_roberta, words),
        "vocabulary": (make_roberta, Batch(words.prompts, Readout("words", words=(11, 47), vocabulary=True))),
        "head": (classifier, Batch(words.prompts, Readout("head", classes=2))),
        "candidates": (make_llama, CANDIDATES),
    }[readout]
    trained = Space(space, rank=2, head=readout == "head" and space in ("lora", "prefix"))
    engine = TorchEngine(model(), trained, gradients=True)
    engine.apply([Update(((5, 0.03125),))])  # off the start, where LoRA's B is zero
    eps = 2e-3
    up, down = cross_entropy(engine.score(batch, (Probe(((7, eps),)), Probe(((7, -eps),)))), batch)
    loss, gradients = engine.descent.gradients(batch)
    assert loss == pytest.approx(cross_entropy(engine.score(batch, [Probe()]), batch)[0], rel=1e-5)
    kind = engine.population.source.kind
    slope = sum(
        float((gradients[t.name].numpy() * z_of(t, kind, 7)).sum()) for t in engine.trained if t.name in gradients
    )
    assert slope == pytest.approx((up - down) / (2 * eps), rel=3e-2, abs=2e-3)


def test_16bit_weights_are_refused_and_adapters_of_them_are_not():
    with pytest.raises(SpaceError, match="--dtype float32, or --space lora"):
        TorchEngine(make_roberta().bfloat16(), Space("full"), gradients=True)
    TorchEngine(make_roberta().bfloat16(), Space("lora", rank=2), gradients=True)


@pytest.fixture(scope="module")
def options(tiny_folder, tiny_data):
    data = {"model": tiny_folder, "task": "sst-2", "train": tiny_data, "dev": tiny_data, "threads": 1}
    return {**data, "method": "adam", "steps": 40, "eval_every": 20}


@pytest.fixture(scope="module")
def run(options, tmp_path_factory):
    out = str(tmp_path_factory.mktemp("adam") / "run")
    return mezzo.finetune(**options, space="lora", readout="head", lr=3e-2, out=out)


def test_run_learns_and_is_honest_about_memory(run, capsys):
    assert run.value > run.zero_shot + 0.2 and run.verdict.split(":")[0] in ("worked", "unclear")
    assert run.example_forwards == 40 * 8 * 3, "a backward pass counts as two forward passes"
    assert [warning for warning in run.warnings if "keeps gradients and two moments" in warning]
    records = api.records(run.out)
    assert records[-1].losses[0] < records[0].losses[0] and all(record.update.empty for record in records)
    assert main(["report", run.out]) == 0
    page = (mezzo.report(run.out)).read_text()
    assert "norm of the gradient" in page and "zero slopes" not in page


def test_kept_weights_are_verified_and_others_refused(run, tmp_path, capsys):
    assert main(["verify", run.out]) == 0
    assert "a gradient run's journal has no moves to rebuild them from" in capsys.readouterr().out
    with pytest.raises(JournalError, match="the weights of step 3 of a gradient run cannot be rebuilt: only those of"):
        mezzo.evaluate(run.out, at=3)
    assert main(["train", "--resume", run.out]) == 2
    assert "a gradient run cannot be resumed" in capsys.readouterr().err
    with pytest.raises(JournalError, match="export the adapter or the model"):
        mezzo.export(run.out, "journal", tmp_path / "j.mezzo")


def test_export_predicts_as_the_run(run, tmp_path, tiny_folder):
    from transformers import AutoTokenizer

    exported = mezzo.export(run.out, "model", tmp_path / "model")
    model = AutoModelForSequenceClassification.from_pretrained(exported).eval()
    assert "steps of AdamW" in (exported / "README.md").read_text()
    (row,) = mezzo.predict(["a warm film"], run.out)
    with torch.no_grad():
        logits = model(**AutoTokenizer.from_pretrained(tiny_folder)("a warm film", return_tensors="pt")).logits[0]
    torch.testing.assert_close(logits.softmax(0), torch.tensor(list(row["probabilities"].values())), atol=1e-5, rtol=0)


def test_full_training_is_that_of_torch(options, tmp_path, tiny_folder):
    """The weights after a step equal those of AdamW on an ordinary model."""
    run = mezzo.finetune(**{**options, "steps": 1, "eval_every": 1}, space="full", lr=1e-3, out=str(tmp_path / "run"))
    engine, setup = api.open_run(run.out, 1)
    plain = AutoModelForMaskedLM.from_pretrained(tiny_folder)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    from mezzo.runs.methods import make_method

    batch = next(make_method(setup, setup.objective).step(0)).batch
    rows = [
        plain(input_ids=torch.tensor([p.ids])).logits[0, p.position, list(setup.readout.words)] for p in batch.prompts
    ]
    torch.nn.functional.cross_entropy(torch.stack(rows), torch.from_numpy(batch.labels)).backward()
    optimizer.step()
    parameters = dict(plain.named_parameters())
    for name, value in engine.state().items():
        torch.testing.assert_close(torch.from_numpy(value), parameters[name].detach(), atol=2e-4, rtol=0)
    engine.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"objective": "accuracy"}, "--method adam needs a loss with slopes"),
        ({"eps": 1e-3}, "--method adam has no --eps"),
        ({"engine": "sglang"}, "one process of the torch engine"),
        ({"workers": 2}, "one process of the torch engine"),
        ({"lr": 1e38}, "--lr 1e\\+38 is more than AdamW can compute with"),
    ],
)
def test_what_adam_cannot_do_is_refused(changes, reason, options):
    with pytest.raises(ConfigError, match=reason):
        mezzo.finetune(**{**options, **changes})


def test_configuration_states_published_settings(options, capsys):
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if name != "steps"]
    assert main(["train", *arguments, "--space", "full", "--print-config"]) == 0
    assert {"lr = 3e-05", 'schedule = "linear"', "batch_size = 8", "steps = 1000"} <= set(
        capsys.readouterr().out.split("\n")
    )
