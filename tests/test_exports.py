"""Exports: model cards with the run's figures, models that other libraries load, journals that rebuild the model."""

from __future__ import annotations

import ast
import errno
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

import mezzo
from mezzo import api
from mezzo.cli import main
from mezzo.engines.hf_hub import locate
from mezzo.errors import JournalError, ModelError
from mezzo.journal.atomic_files import write_atomically
from mezzo.runs import export
from mezzo.runs.model_card import model_card
from tests.hostile.files import read_compact_header, replace_compact_header
from tests.test_generation import CHAT

ROBERTA, LLAMA = "mezzo/roberta-mini", "mezzo/llama-mini"


def length(completion: str) -> float:
    return float(len(completion))


@pytest.fixture(scope="module")
def run(tiny_folder, tiny_data, tmp_path_factory):
    """A finished LoRA run on a copy of the tiny model."""
    folder = tmp_path_factory.mktemp("exports")
    base = shutil.copytree(tiny_folder, folder / "base")
    options = {"task": "sst-2", "train": tiny_data, "dev": tiny_data, "threads": 1, "batch_size": 4, "space": "lora"}
    return mezzo.finetune(
        str(base), **options, steps=30, lr=1e-2, eps=1e-2, eval_every=6, out=str(folder / "run"), seed=3
    )


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def test_model_card_has_the_runs_figures_and_code_that_loads(run, tmp_path, capfd):
    for kind in ("adapter", "model"):
        out = tmp_path / kind
        capfd.readouterr()
        assert main(["export", run.out, kind, "--out", str(out)]) == 0
        assert capfd.readouterr().err == "", "no progress bars of other libraries"
        text = (out / "README.md").read_text()
        low, high = run.interval
        assert f"{run.value:.1%} ({low:.1%} to {high:.1%})" in text
        assert f"{run.zero_shot:.1%}" in text and f"{run.zero_shot_calibrated:.1%}" in text
        assert f"after {run.best_step} steps" in text
        assert str(tmp_path) not in text, "local folders are private"
        (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
        names: dict = {}
        base = api.config_of(run.out)["model"]
        exec(
            code.replace("THIS FOLDER", str(out)).replace('from_pretrained("base"', f'from_pretrained("{base}"'), names
        )
        assert names["model"].num_parameters() > 0
    at_zero = tmp_path / "zero"
    mezzo.export(run.out, "adapter", at_zero, at=0)
    assert "after 0 steps" in (at_zero / "README.md").read_text()


def test_pushed_model_has_its_figures_in_the_metadata(run, tmp_path, monkeypatch, capsys):
    from huggingface_hub import HfApi, ModelCard

    asked = []

    def upload(self, repo_id, folder_path, commit_message):
        shutil.copytree(folder_path, tmp_path / "hub")
        asked.append((repo_id, commit_message))

    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, private, exist_ok: f"https://hub/{name}/{private}")
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    assert main(["export", run.out, "adapter", "--push", "me/mine", "--private"]) == 0
    assert capsys.readouterr().out == "pushed to https://hub/me/mine/True\n"
    assert asked == [("me/mine", "mezzo export adapter")]
    assert (tmp_path / "hub" / "adapter_model.safetensors").is_file()
    results = ModelCard.load(tmp_path / "hub" / "README.md").data.eval_results
    assert {(r.metric_type, r.metric_value, r.metric_name, r.dataset_name) for r in results} == {
        ("accuracy", run.value, "accuracy on dev", "sst-2")
    }
    monkeypatch.undo()
    assert main(["export", run.out, "adapter", "--push", "not a name"]) == 1
    assert re.match(r"mezzo: not a name was not pushed: .+; the run itself is as it was\n$", capsys.readouterr().err)
    assert main(["export", run.out, "journal", "--push", "me/mine"]) == 2
    assert main(["export", run.out, "model", "--push", "me/mine", "--out", "here"]) == 2


def test_prefix_model_card_has_code_that_loads(tiny_folder, tiny_data, tmp_path):
    options = {"task": "sst-2", "train": tiny_data, "dev": tiny_data, "threads": 1, "batch_size": 4, "space": "prefix"}
    run = mezzo.finetune(tiny_folder, **options, steps=2, out=str(tmp_path / "run"))
    folder = mezzo.export(run.out, "adapter")
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    names: dict = {}
    exec(code.replace("THIS FOLDER", str(folder)).replace(f'"{Path(tiny_folder).name}"', f'"{tiny_folder}"'), names)
    assert names["model"].num_parameters() > 0


@pytest.mark.parametrize(
    ("space", "head"), [("lora", {"readout": "head"}), ("prefix", {"readout": "head"}), ("lora", {"train_head": True})]
)
def test_adapter_has_the_trained_head_and_predicts_as_the_run(space, head, tiny_folder, tiny_data, tmp_path, recwarn):
    """A fresh classification head is trained beside LoRA or a prefix, an LM head on request; the export holds them."""
    options = {"task": "sst-2", "train": tiny_data, "dev": tiny_data, "threads": 1, "batch_size": 4, "steps": 4}
    run = mezzo.finetune(tiny_folder, **options, **head, space=space, lr=1e-2, eps=1e-2, out=str(tmp_path / "run"))
    trained = [t.name for t in api.open_journal(run.out).header.tensors if t.kind == "head"]
    assert [name.split(".")[0] for name in trained] == ["classifier" if "readout" in head else "lm_head"] * len(trained)
    folder = mezzo.export(run.out, "adapter", at=4)
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    names: dict = {}
    exec(code.replace("THIS FOLDER", str(folder)).replace(f'"{Path(tiny_folder).name}"', f'"{tiny_folder}"'), names)
    assert not [w for w in recwarn if "missing" in str(w.message)]
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    for row in mezzo.predict(["a dull film", "great fun"], run.out, at=4):
        text = row["text"] if "readout" in head else f"{row['text']} It was{tokenizer.mask_token}."
        inputs = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            logits = names["model"].eval()(**inputs).logits[0]
        if "readout" not in head:
            words = [tokenizer.encode(word, add_special_tokens=False)[0] for word in (" terrible", " great")]
            logits = logits[inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id), words]
        expected = torch.tensor(list(row["probabilities"].values()))
        torch.testing.assert_close(logits.softmax(0), expected, atol=2e-6, rtol=1e-4)


def test_train_head_that_cannot_be_is_refused_in_a_line(tiny_folder, tiny_data, capsys):
    options = ["train", "--model", tiny_folder, "--task", "sst-2", "--train", tiny_data, "--train-head"]
    for more, reason in ((["--space", "full"], "lora or prefix"), (["--engine", "sglang"], "the torch engine")):
        assert main([*options, *more]) == 2
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_interrupted_export_leaves_no_folder(kind, run, tmp_path, monkeypatch):
    """The model card is written last, so an export that stops before it leaves no folder that looks complete."""

    def fail_on_card(path, data):
        if path.name == "README.md":
            assert len(list(path.parent.iterdir())) > 1, "the other files are written"
            assert not (tmp_path / "out").exists(), "in a temporary folder"
            raise OSError(errno.ENOSPC, "No space left on device")
        write_atomically(path, data)

    monkeypatch.setattr(export, "write_atomically", fail_on_card)
    with pytest.raises(JournalError, match="out: the disk is full"):
        mezzo.export(run.out, kind, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    (tmp_path / "out").mkdir()
    assert (mezzo.export(run.out, kind, tmp_path / "out") / "README.md").is_file(), (
        "an existing empty folder is accepted"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_model_name_cannot_inject_code_into_the_model_card(run):
    header = api.open_journal(run.out).header
    name = 'x"); import os; os.system("echo'
    text = model_card("adapter", replace(header, config={**header.config, "model": name + "\n# more"}), [], 1, 2)
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    strings = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
    assert name + " # more" in strings
    assert not [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import)]


def test_compact_journal_and_base_model_rebuild_the_model_elsewhere(run, tmp_path, monkeypatch, capsys):
    exported = mezzo.export(run.out, "model", tmp_path / "exported")
    mezzo.export(run.out, "journal", tmp_path / "sent.mezzo")
    shutil.move(api.config_of(run.out)["model"], tmp_path / "moved base")  # as on another machine
    monkeypatch.chdir(tmp_path)
    try:
        assert main(["export", "sent.mezzo", "model", "--model", "moved base", "--out", "rebuilt"]) == 0
        assert main(["export", "sent.mezzo", "model", "--out", "nowhere"]) == 2
        assert "pass an existing model folder" in capsys.readouterr().err
    finally:
        shutil.move(tmp_path / "moved base", api.config_of(run.out)["model"])
    expected, rebuilt = load_weights(exported), load_weights(tmp_path / "rebuilt")
    assert expected.keys() == rebuilt.keys()
    assert all(torch.equal(expected[name], rebuilt[name]) for name in expected)
    assert "holds no evaluations" in (tmp_path / "rebuilt" / "README.md").read_text()


def test_compact_journal_stores_the_best_step(run, tmp_path):
    content = api.open_journal(mezzo.export(run.out, "journal", tmp_path / "j.mezzo"))
    assert content.best == run.best_step
    assert api.best_step(content) == run.best_step
    for invalid in (-1, 10**9, "3", None, [1]):
        header = {**read_compact_header(tmp_path / "j.mezzo"), "best": invalid}
        (tmp_path / "changed.mezzo").write_bytes(replace_compact_header(tmp_path / "j.mezzo", header))
        assert api.best_step(api.open_journal(tmp_path / "changed.mezzo")) == content.steps


@pytest.mark.parametrize("chat", [True, False])
def test_exported_model_is_prompted_and_writes_as_the_run(chat, tmp_path, capsys):
    base = shutil.copytree(locate(LLAMA), tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(base)
    texts = {"chat": chat, "max_new_tokens": 6, "stop": (" a", "zz")}
    options = {"steps": 1, "samples": 1, "batch_size": 2, "eps": 0.05, "threads": 1, "task": "prompts", **texts}
    rows = [{"prompt": f"The {noun} and the"} for noun in ("sea", "sky", "dog", "cat")]
    run = mezzo.finetune(str(base), **options, train=rows, dev=rows, objective=length, out=str(tmp_path / "run"))
    expected = list(mezzo.predict(rows, run.out))
    model = mezzo.export(run.out, "model")
    assert list(mezzo.predict(rows, model)) == expected
    settings = json.loads((model / "mezzo.json").read_text())
    assert {name: settings[name] for name in texts} == {"chat": chat, "max_new_tokens": 6, "stop": [" a", "zz"]}
    named = {"chat": not chat, "max_new_tokens": 16, "stop": ("",)}
    for changes in (named, *({name: value} for name, value in named.items())):
        assert list(mezzo.predict(rows, model, **changes)) == list(mezzo.predict(rows, run.out, **changes))
    assert list(mezzo.predict(rows, model, **named)) != expected, "what is named wins"
    assert main(["train", "--model", str(model), "--task", "prompts", "--objective", "f1", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert f"chat = {str(chat).lower()}" in printed and "max_new_tokens = 6" in printed
    for card in (model / "README.md", mezzo.export(run.out, "adapter") / "README.md"):
        text = card.read_text()
        assert f"| chat | {str(chat).lower()} |" in text and "| max new tokens | 6 |" in text
        assert '| stop | `[" a", "zz"]` |' in text and ("message in the chat template" in text) == chat
        assert all(f"| {name} |" in text for name in ("shaping | zscore", "factors | b", "decay | base"))


def test_merged_model_keeps_the_default_settings_of_the_bundled_model(tmp_path, capsys):
    run = mezzo.finetune(ROBERTA, steps=1, batch_size=2, eval_limit=4, threads=1, out=str(tmp_path / "run"))
    merged = mezzo.export(run.out, "model", tmp_path / "merged")
    for model in (ROBERTA, str(merged)):
        assert main(["train", "--model", model, "--print-config"]) == 0
    printed = capsys.readouterr().out.split("[model]")[1:]
    bundled_settings, merged_settings = (
        [x for x in text.splitlines() if re.match("space|lr|eps|steps|schedule|batch", x)] for text in printed
    )
    assert bundled_settings == merged_settings
    for content, reason in {
        "[]": "it must hold an object of settings by space",
        '{"lora": {"lr": "fast"}}': "lr must be a number or auto, not 'fast'",
        '{"lora": {"remote_code": true}}': "remote_code cannot be set there",
        "{": "Expecting property name",
        '{"lora": 5}': "'lora' must be an object of settings, not 5",
        '{"space": null}': "'space' must be the name of one, not null",
        '{"chat": "please"}': "chat must be true or false, not 'please'",
        '{"max_new_tokens": 1e9}': "max_new_tokens must be at most 65536",
        '{"stop": 5}': "stop must be a list of words, not 5",
    }.items():
        (merged / "mezzo.json").write_text(content)
        with pytest.raises(ModelError, match=rf"mezzo.json cannot be used: {reason}.*; fix or delete it$"):
            mezzo.finetune(str(merged), steps=1)


def test_config_json_of_a_run_reproduces_it(tiny_folder, tiny_data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = {"negative": "terrible", "positive": "great"}
    task = {"columns": ["text"], "template": "{text} All in all it was [MASK].", "words": words}
    rows = [json.loads(line) for line in Path(tiny_data).read_text().splitlines()]
    first = mezzo.finetune(
        tiny_folder, task=task, train=rows, dev=rows, steps=4, batch_size=4, threads=1, out="first/run", seed=5
    )
    assert main(["train", "--config", "first/run/config.json", "--json"]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["digest"] == first.digest
    assert again["out"] != first.out
    assert main(["train", "--config", "first/run", "--out", "third", "--steps", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps"] == 5
    Path("bad.json").write_text('{"stepz": 3}')
    assert main(["train", "--config", "bad.json"]) == 2
    assert "did you mean 'steps'?" in capsys.readouterr().err
    for content, message in (("[1]", "holds no options"), ("{", "is not valid JSON")):
        Path("bad.json").write_text(content)
        assert main(["train", "--config", "bad.json"]) == 2
        assert message in capsys.readouterr().err
