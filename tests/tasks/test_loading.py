"""Every data source gives the same examples, and k-shot sampling follows the published rule."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as arrow
import pytest
from pyarrow import parquet

from mezzo.errors import DataError
from mezzo.tasks import get_task, k_shot, load_examples
from mezzo.types import Example

ROWS = [{"text": 'a "fine", film', "label": "positive"}, {"text": "dull\nand long", "label": "negative"}]
EXAMPLES = [Example({"text": 'a "fine", film'}, 1), Example({"text": "dull\nand long"}, 0)]


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(encoding))
    return path


FILES = {
    "rows.jsonl": "\n".join(map(json.dumps, ROWS)) + "\n\n",
    "lines.json": "\n".join(map(json.dumps, ROWS)),
    "list.json": json.dumps(ROWS, indent=1),
    "data.json": json.dumps({"version": 1, "data": ROWS}),
    "columns.json": json.dumps({key: [row[key] for row in ROWS] for key in ROWS[0]}),
    "bom.jsonl": "\ufeff" + "\n".join(map(json.dumps, ROWS)),
    "windows.jsonl": "\r\n".join(map(json.dumps, ROWS)) + "\r\n",
    "quoted.csv": 'text,label\r\n"a ""fine"", film",positive\r\n"dull\nand long",negative\r\n',
    "other.csv": 'Review,id,Sentiment\n"a ""fine"", film",7,pos\n"dull\nand long",8,NEG\n',
    "bare.csv": '1,"a ""fine"", film"\n0,"dull\nand long"\n',
    "last.csv": '"a ""fine"", film",1\n"dull\nand long",0\n',
}


@pytest.mark.parametrize("name", FILES)
def test_every_file_format_gives_the_same_examples(name: str, tmp_path: Path) -> None:
    assert load_examples(write(tmp_path / name, FILES[name]), "sst-2") == EXAMPLES


def test_parquet_lists_and_data_frames_give_the_same_examples(tmp_path: Path) -> None:
    parquet.write_table(arrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    assert load_examples(tmp_path / "rows.parquet", "sst-2") == EXAMPLES
    assert load_examples(ROWS, "sst-2") == EXAMPLES
    assert load_examples({key: [row[key] for row in ROWS] for key in ROWS[0]}, "sst-2") == EXAMPLES
    assert load_examples(EXAMPLES, "sst-2") == EXAMPLES

    class Frame:  # what is used of a pandas data frame
        columns = ("text", "label")

        def to_dict(self, orient: str) -> list[dict[str, Any]]:
            assert orient == "records"
            return ROWS

    assert load_examples(Frame(), "sst-2") == EXAMPLES


# GLUE's files as they are: task → file, its content, the texts and labels it holds.
GLUE = {
    "sst-2": ("train.tsv", "sentence\tlabel\nfun \t1\n", ["fun "], "positive"),
    "rte": ("dev.tsv", "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\tentailment\n", ["A.", "B."], "entailment"),
    "qnli": (
        "dev.tsv",
        "index\tquestion\tsentence\tlabel\n0\tA?\tB.\tnot_entailment\n",
        ["A?", "B."],
        "not_entailment",
    ),
    "mrpc": ("msr.tsv", "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\tA.\tB.\n", ["A.", "B."], "duplicate"),
    "qqp": (
        "train.tsv",
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n0\t1\t2\tA?\tB?\t0\n",
        ["A?", "B?"],
        "not_duplicate",
    ),
    "cola": ("train.tsv", "gj04\t1\t\tA.\ngj04\t0\t*\tB.\n", ["A."], "acceptable"),
    "mnli": (
        "dev_matched.tsv",
        "index\tpromptID\tgenre\tsentence1_parse\tsentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label\n"
        "0\t1\tfiction\t(A)\t(B)\tA.\tB.\tneutral\tcontradiction\n",
        ["A.", "B."],
        "contradiction",
    ),
    "snli": (  # rows may hold more annotators' labels than the header names
        "dev.tsv",
        "index\tsentence1\tsentence2\tlabel1\tgold_label\n0\tA.\tB.\tneutral\tneutral\tneutral\tneutral\tentailment\tneutral\n",
        ["A.", "B."],
        "neutral",
    ),
    "sst-5": ("test.txt", "3 good fun\n\n1 less so\n", ["good fun"], "positive"),
    "trec": ("train.csv", "3,Who ?\n5,How many ?\n", ["Who ?"], "human"),
}


@pytest.mark.parametrize("name", GLUE)
def test_published_file_layouts_are_read(name: str, tmp_path: Path) -> None:
    file, content, texts, label = GLUE[name]
    task = get_task(name)
    first = load_examples(write(tmp_path / file, content), task)[0]
    assert first == Example(dict(zip(task.columns, texts, strict=True)), task.labels.index(label))


# Files of the public archives by task: name, bytes, and what is read from them.
ARCHIVES: dict[str, tuple[str, dict[str, bytes], list[tuple[str, str]]]] = {
    "trec": ("trec", {"train_5500.label": b"HUM:ind Who was Hr\xf0lf ?\n"}, [("Who was Hrðlf ?", "human")]),
    "trec of sent-conv": ("trec", {"TREC.train.all": b"3 Who was Hr\xf0lf ?\n"}, [("Who was Hrðlf ?", "human")]),
    "mr of sent-conv": ("mr", {"rt-polarity.all": b"1 a souffl\xe9\n"}, [("a soufflé", "positive")]),
    "mr": (
        "mr",
        {"rt-polarity.neg": b"dull \x96 so dull\n", "rt-polarity.pos": b"fun\n", "README.txt": b"1 about"},
        [("dull – so dull", "negative"), ("fun", "positive")],
    ),
    "cr": (
        "cr",
        {"custrev.pos": b"it works\n", "custrev.neg": b"caf\xe9\nit broke\n"},
        [("café", "negative"), ("it broke", "negative"), ("it works", "positive")],
    ),
    "mpqa": (
        "mpqa",
        {"mpqa.pos": b"welcomed\n", "mpqa.neg": b"feared\n"},
        [("feared", "negative"), ("welcomed", "positive")],
    ),
    "subj": (
        "subj",
        {"plot.tok.gt9.5000": b"two men leave\n", "quote.tok.gt9.5000": b"a na\xefve film\n"},
        [("two men leave", "objective"), ("a naïve film", "subjective")],
    ),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_files_of_public_archives_are_read_as_they_are(name: str, tmp_path: Path) -> None:
    task, files, expected = ARCHIVES[name]
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    source = tmp_path if len(files) > 1 else tmp_path / next(iter(files))
    read = load_examples(source, task, split="train")
    assert [(example.fields["text"], get_task(task).labels[example.label]) for example in read] == expected


def test_folder_without_a_file_for_every_label_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "rt-polarity.neg", "dull\n")
    with pytest.raises(DataError, match=r"is a folder: no file for split 'train'; found no data files$"):
        load_examples(tmp_path, "mr", split="train")
    write(tmp_path / "rt-polarity.pos", "fun\n")
    with pytest.raises(DataError, match=r"is a folder: no file for split 'test'; found no data files$"):
        load_examples(tmp_path, "mr", split="test")
    write(tmp_path / "train.txt", "1 good\n")
    assert [example.fields["text"] for example in load_examples(tmp_path, "mr", split="train")] == ["good"]


def test_tsv_quotes_are_text_unless_the_cell_was_quoted(tmp_path: Path) -> None:
    lines = ['"no" he said\t0', '"Yes!"\t1', '"a ""big"" film"\t1', 'an "odd\t0']
    path = write(tmp_path / "a.tsv", "text\tlabel\n" + "\n".join(lines))
    texts = [example.fields["text"] for example in load_examples(path, "sst-2")]
    assert texts == ['"no" he said', '"Yes!"', 'a "big" film', 'an "odd']


def test_hub_columns_of_trec_and_superglue_are_recognised() -> None:
    (trec,) = load_examples([{"text": "Who ?", "coarse_label": 3, "fine_label": 20}], "trec", id_order="hub")
    assert get_task("trec").words[trec.label] == "Human"
    nested = {"text": "T", "target": {"span1_text": "the cup", "span2_text": "it"}, "label": True}
    (wsc,) = load_examples([nested], "wsc")
    assert (wsc.fields, wsc.label) == ({"text": "T", "span2": "it", "span1": "the cup"}, 1)
    (drop,) = load_examples(
        [{"passage": "P", "question": "Q", "answers_spans": {"spans": ["5", "five"], "types": []}}], "drop"
    )
    assert drop.fields["answers"] == ["5", "five"]
    row = {"title": "T", "context": "C", "question": "Q", "answers": {"text": ["x", "x"], "answer_start": [1, 2]}}
    (squad,) = load_examples([row], "squad")
    assert (squad.fields["answers"], squad.label) == (["x"], 0)


def test_nested_question_answering_files_are_expanded(tmp_path: Path) -> None:
    asked = [{"question": "Q1", "answers": [{"text": "a"}]}, {"question": "Q2", "answers": [{"text": "b"}]}]
    squad = {"version": "1.1", "data": [{"title": "T", "paragraphs": [{"context": "C", "qas": asked}]}]}
    path = write(tmp_path / "squad.json", json.dumps(squad))
    assert [example.fields["question"] for example in load_examples(path, "squad")] == ["Q1", "Q2"]
    multirc = {
        "passage": {
            "text": "P",
            "questions": [{"question": "Q", "answers": [{"text": "a", "label": 1}, {"text": "b", "label": 0}]}],
        }
    }
    assert [example.label for example in load_examples([multirc], "multirc")] == [1, 0]
    record = {
        "passage": {"text": "Ann met Bo", "entities": [{"start": 0, "end": 2}, {"start": 8, "end": 9}]},
        "qas": [{"query": "@placeholder left", "answers": [{"text": "Bo"}]}],
    }
    (example,) = load_examples([record], "record")
    assert (example.fields["entities"], example.label) == (["Ann", "Bo"], 1)
    with pytest.raises(DataError, match="row 1: a nested record without 'qas'; give one row per question"):
        load_examples([{"title": "T", "paragraphs": [{"context": "C"}]}], "squad")


def test_split_is_chosen_from_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "SST-2" / "16-13"
    for split, label in (("train", 0), ("dev_matched", 1), ("test", 1)):
        write(folder / f"{split}.tsv", f"sentence\tlabel\nfun\t{label}\n")
    assert load_examples(folder, "sst-2", split="train")[0].label == 0
    assert load_examples(str(folder), "sst-2", split="dev")[0].label == 1
    assert load_examples(str(folder), "sst-2", split="validation")[0].label == 1
    found = "found dev_matched.tsv, test.tsv, train.tsv"
    with pytest.raises(DataError, match=f"is a folder: name a split; {found}$"):
        load_examples(folder, "sst-2")
    with pytest.raises(DataError, match=f"is a folder: no file for split 'extra'; {found}$"):
        load_examples(folder, "sst-2", split="extra")


def test_unlabelled_rows_are_kept_or_skipped_only_on_request(tmp_path: Path) -> None:
    path = write(tmp_path / "test.tsv", "index\tsentence\n0\tfun\n1\tdull\n")
    assert [example.label for example in load_examples(path, "sst-2", labelled=False)] == [-1, -1]
    rows = [{"text": "a", "label": value} for value in (1, -1, None, "", "-", float("nan"))]
    assert [e.label for e in load_examples(rows, "sst-2", labelled=False)] == [1, -1, -1, -1, -1, -1]
    assert [e.label for e in load_examples(rows, "sst-2", labelled="skip")] == [1]
    lines = write(tmp_path / "plain.txt", "A film about 2 men.\n1 more film\n")
    texts = [example.fields["text"] for example in load_examples(lines, "sst-2", labelled=False)]
    assert texts == ["A film about 2 men.", "1 more film"]
    none = get_task({"columns": ["text"], "template": "[MASK]", "words": {"none": "No", "some": "Yes"}})
    assert load_examples([{"text": "a", "label": "None"}], none)[0].label == 0  # a label may be called that


def test_columns_are_inferred_only_when_unambiguous() -> None:
    assert load_examples([{"stuff": "a", "label": 1}], "sst-2")[0].fields == {"text": "a"}
    assert load_examples([{"TEXT": "a", "Label": 1}], "sst-2")[0].fields == {"text": "a"}
    both = [{"review": "a", "content": "b", "label": 1}]
    with pytest.raises(DataError, match=r"could be 'review' or 'content'; say which it is: --columns text=NAME"):
        load_examples(both, "sst-2")
    assert load_examples(both, "sst-2", columns={"text": "content"})[0].fields == {"text": "b"}
    with pytest.raises(DataError, match="no column 'contents' for 'text'; found 'review', 'content', 'label'"):
        load_examples(both, "sst-2", columns={"text": "contents"})
    (pair,) = load_examples([{"sentence2": "B", "sentence1": "A", "label": 0}], "rte")
    assert pair.fields == {"premise": "A", "hypothesis": "B"}


def test_numbers_become_text() -> None:
    assert load_examples([{"text": 7, "label": 1}], "sst-2")[0].fields == {"text": "7"}


def test_hub_names_are_loaded_with_the_datasets_library(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    class Dataset(list[dict[str, Any]]):
        features: ClassVar = {}

    def load_dataset(path: str, config: str | None) -> dict[str, Dataset]:
        asked.append((path, config))
        if path == "none":
            raise ValueError("no such dataset\nand more")
        return {"train": Dataset(ROWS), "validation": Dataset(ROWS[:1])}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert load_examples("hub:nyu-mll/glue:sst2", "sst-2", split="train") == EXAMPLES
    assert asked == [("nyu-mll/glue", "sst2")]
    assert load_examples("hub:nyu-mll/glue:sst2", "sst-2", split="dev") == EXAMPLES[:1], "validation is dev"
    with pytest.raises(DataError, match="the dataset has the splits train, validation; name one of them, not 'test'"):
        load_examples("hub:nyu-mll/glue:sst2", "sst-2", split="test")
    with pytest.raises(DataError, match=r"^hub:none cannot be loaded \(no such dataset\); check the name"):
        load_examples("hub:none", "sst-2")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"^hub:x needs the datasets library; pip install datasets, or give a file$"):
        load_examples("hub:x", "sst-2")


# --- k-shot


def train_set(n: int = 200) -> list[Example]:
    return [Example({"text": f"row {i}"}, (i * i) % 3) for i in range(n)]


@pytest.mark.parametrize("seed", [13, 21, 42, 87, 100])
def test_k_shot_follows_the_published_rule(seed: int) -> None:
    examples = [example for example in train_set() if example.label < 2]
    shuffled = list(examples)
    np.random.seed(seed)
    np.random.shuffle(shuffled)  # as in the published script
    by_label: dict[int, list[Example]] = {}
    for example in shuffled:
        by_label.setdefault(example.label, []).append(example)
    train, dev = k_shot(examples, 16, seed, labels=("a", "b"))
    assert train == [example for rows in by_label.values() for example in rows[:16]]
    assert dev == [example for rows in by_label.values() for example in rows[16:32]]
    assert (train, dev) == k_shot(examples, 16, seed, labels=("a", "b"))


def test_k_shot_differs_between_seeds_and_does_not_modify_its_input() -> None:
    examples = train_set()
    before = list(examples)
    assert k_shot(examples, 4, 13, labels=("a", "b")) != k_shot(examples, 4, 21, labels=("a", "b"))
    assert examples == before


def test_k_shot_names_the_label_with_too_few_rows() -> None:
    message = r"^label 'c' has 0 rows, but k=4 needs 8 \(4 train, 4 dev\); give more data, or k=0$"
    with pytest.raises(DataError, match=message):
        k_shot(train_set(), 4, 13, labels=("a", "b", "c"))
    with pytest.raises(DataError, match="k is 0; give at least 1 example per label"):
        k_shot(train_set(), 0, 13, labels=("a", "b"))
