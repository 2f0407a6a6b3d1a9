"""Labels are mapped by name or by a declared id order: the same words from every source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pytest
from pyarrow import parquet

from mezzo.errors import DataError
from mezzo.tasks import MLMConfig, get_task, load_examples

# What each id means, as the sources document it.
NLI = {"hub": ("entailment", "neutral", "contradiction"), "lm-bff": ("contradiction", "entailment", "neutral")}
RTE = {"hub": ("entailment", "not_entailment"), "lm-bff": ("entailment", "not_entailment")}
ORDERS: dict[str, dict[str, tuple[str, ...]]] = {
    "mnli": NLI,
    "snli": NLI,
    "rte": RTE,
    "qnli": RTE,
    "trec": {
        "hub": ("expression", "entity", "description", "human", "location", "number"),
        "lm-bff": ("description", "entity", "expression", "human", "location", "number"),
    },
}
WORDS = {
    "entailment": "Yes",
    "not_entailment": "No",
    "contradiction": "No",
    "neutral": "Maybe",
    **{word.lower(): word for word in ("Description", "Entity", "Expression", "Human", "Location", "Number")},
}


def rows(name: str, labels: Any) -> list[dict[str, Any]]:
    texts = dict.fromkeys(get_task(name).columns, "some text")
    return [{**texts, "label": label} for label in labels]


def words(name: str, data: Any, **options: Any) -> list[str]:
    task = get_task(name)
    return [task.words[example.label] for example in load_examples(data, task, **options)]


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("source", ["hub", "lm-bff"])
def test_ids_of_both_sources_map_to_the_right_word(name: str, source: str) -> None:
    order = ORDERS[name][source]
    right = [WORDS[label] for label in order]
    assert words(name, rows(name, range(len(order))), id_order=source) == right
    assert words(name, rows(name, map(str, range(len(order)))), id_order=source) == right
    assert words(name, rows(name, range(len(order))), id_order=order) == right


@pytest.mark.parametrize("name", ORDERS)
def test_label_names_map_to_the_right_word(name: str) -> None:
    order = ORDERS[name]["hub"]
    right = [WORDS[label] for label in order]
    assert words(name, rows(name, order)) == right
    assert words(name, rows(name, [label.upper().replace("_", " ") for label in order])) == right


def test_label_aliases_are_accepted() -> None:
    hub = ["ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM"]
    assert words("trec", rows("trec", hub)) == [WORDS[label] for label in ORDERS["trec"]["hub"]]
    assert words("mrpc", rows("mrpc", ["equivalent", "not_equivalent"])) == ["Yes", "No"]


@pytest.mark.parametrize(("name", "right"), [("rte", ["Yes", "No"]), ("sst-2", ["terrible", "great"])])
def test_ids_on_which_sources_agree_need_no_id_order(name: str, right: list[str]) -> None:
    assert words(name, rows(name, [0, 1])) == right
    assert words(name, rows(name, ["0", 1.0])) == right


@pytest.mark.parametrize("name", ["mnli", "snli", "trec", "subj"])
def test_ids_on_which_sources_disagree_are_rejected(name: str) -> None:
    with pytest.raises(DataError) as caught:
        words(name, rows(name, [1]))
    message = str(caught.value)
    assert message.startswith(f"the data, row 1: label 1 is an id, and task '{name}' knows several id orders (hub: 0 ")
    assert message.endswith("; state one, such as --id-order hub")


def test_id_order_of_the_caller_overrides_that_of_the_task() -> None:
    task = get_task("mnli").replace(id_order="hub")
    read = lambda **options: load_examples(rows("mnli", [0]), task, **options)[0].label  # noqa: E731
    assert task.labels[read()] == "entailment"
    assert task.labels[read(id_order="lm-bff")] == "contradiction"


def test_undeclared_id_order_is_rejected() -> None:
    task = get_task({"columns": ["text"], "template": "[MASK]", "words": {"no": "No", "yes": "Yes"}})
    with pytest.raises(
        DataError, match=r"'custom' declares no id order; state .* in its file: id_order = \['no', 'yes'\]$"
    ):
        load_examples([{"text": "a", "label": 0}], task)
    assert load_examples([{"text": "a", "label": 0}], task, id_order=["yes", "no"])[0].label == 1
    assert load_examples([{"text": "a", "label": 5}], task, id_order={1: "no", 5: "yes"})[0].label == 1
    with pytest.raises(DataError, match=r"'mnli' declares no id order 'hug' \(hub, lm-bff\); .* did you mean 'hub'"):
        load_examples(rows("mnli", [0]), "mnli", id_order="hug")
    with pytest.raises(DataError, match="id_order names 'maybe', but the labels are no, yes"):
        load_examples([{"text": "a", "label": 0}], task, id_order=["maybe", "no"])


def test_mlm_config_ids_are_those_of_the_stated_source() -> None:
    config = MLMConfig(label_word_mapping={0: "Yes", 1: "Maybe", 2: "No"})
    task = config.apply(get_task("mnli"), "hub")
    labels = [example.label for example in load_examples(rows("mnli", [2, "0", "neutral"]), task, id_order="hub")]
    assert [task.words[label] for label in labels] == ["No", "Yes", "Maybe"]


def test_k_shot_folders_and_headerless_files_use_the_lm_bff_order(tmp_path: Path) -> None:
    folder = tmp_path / "trec" / "16-13"
    folder.mkdir(parents=True)
    (folder / "train.csv").write_text('0,What is "it" ?\n2,"What, then ?"\n', encoding="utf-8")
    (tmp_path / "lines.txt").write_text("0 What is it ?\n2 What then ?\n", encoding="utf-8")
    for source, split in ((folder, "train"), (folder / "train.csv", None), (tmp_path / "lines.txt", None)):
        assert words("trec", source, split=split) == ["Description", "Expression"]
        assert words("trec", source, split=split, id_order="hub") == ["Expression", "Description"]
    (folder / "dev.jsonl").write_text(json.dumps(rows("mnli", [0])[0]), encoding="utf-8")
    assert words("mnli", folder, split="dev") == ["No"]


def test_ag_news_counts_from_1_in_its_csv_files_and_from_0_on_the_hub(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text('"4","New chip","A chip was announced."\n"1","Summit","Leaders met."\n', encoding="utf-8")
    assert words("ag-news", path) == ["technology", "world"]
    assert [example.fields["text"] for example in load_examples(path, "ag-news")][1] == "Leaders met."
    assert words("ag-news", rows("ag-news", [3, 0]), id_order="hub") == ["technology", "world"]
    assert words("ag-news", rows("ag-news", ["Sci/Tech", "World"])) == ["technology", "world"]
    with pytest.raises(DataError, match=r"several id orders \(hub: 0 world, .*; csv: 1 world, .* --id-order hub"):
        words("ag-news", rows("ag-news", [1]))


def test_columns_of_topic_data_sets_are_known() -> None:
    assert words("banking77", [{"text": "a", "category": "age_limit"}, {"text": "b", "category": "change pin"}]) == [
        "age",
        "change",
    ]
    assert words("emotion", [{"text": "a", "label": 3}]) == ["angry"]


def test_unknown_label_is_answered_by_what_to_do() -> None:
    with pytest.raises(DataError) as caught:
        words("sst-2", rows("sst-2", ["awful"]))
    remedy = "rename it, or give a task file that lists it under label_aliases"
    assert str(caught.value) == f"the data, row 1: unknown label 'awful'; labels are negative, positive; {remedy}"
    with pytest.raises(DataError, match=r"labels are activate_my_card, .*card_arrival, … \(77 in all\); rename it"):
        words("banking77", rows("banking77", ["???"]))


def test_label_text_outranks_the_id_beside_it() -> None:
    assert words("trec", [{"text": "a", "label": 0, "label_text": "HUM"}]) == ["Human"]
    assert words("sst-2", [{"text": "a", "label": 0, "label_text": "a remark"}]) == ["terrible"]
    assert words("sst-2", [{"text": "a", "label": 0, "label_text": "pos"}], columns={"label": "label"}) == ["terrible"]


def test_label_names_in_a_parquet_file_define_its_ids(tmp_path: Path) -> None:
    table = arrow.Table.from_pylist(rows("mnli", [0, 1, 2]))
    names = {"info": {"features": {"label": {"names": list(NLI["hub"]), "_type": "ClassLabel"}, "premise": {}}}}
    table = table.replace_schema_metadata({"huggingface": json.dumps(names)})
    parquet.write_table(table, tmp_path / "mnli.parquet")
    assert words("mnli", tmp_path / "mnli.parquet") == ["Yes", "Maybe", "No"]


class ClassLabel:
    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names


class Dataset(list[dict[str, Any]]):
    """What is used of a Hugging Face dataset: it iterates over dicts and has features."""

    def __init__(self, data: list[dict[str, Any]], names: tuple[str, ...]) -> None:
        super().__init__(data)
        self.features = {"label": ClassLabel(names), "premise": object()}


def test_label_names_in_a_dataset_define_its_ids() -> None:
    data = Dataset(rows("mnli", [0, 1, 2, -1]), NLI["hub"])
    assert words("mnli", data, labelled="skip") == ["Yes", "Maybe", "No"]
    assert words("mnli", {"train": data}, split="train", labelled="skip") == ["Yes", "Maybe", "No"]
    with pytest.raises(DataError, match="the dataset has the splits train; name one of them, not None"):
        words("mnli", {"train": data})


def test_booleans_are_label_names_not_ids() -> None:
    row = {"passage": "P", "question": "q"}
    for value, word in ((True, "Yes"), (False, "No"), ("true", "Yes"), (1, "Yes"), (0, "No")):
        (example,) = load_examples([{**row, "label": value}], "boolq")
        assert get_task("boolq").words[example.label] == word
    with pytest.raises(DataError, match="unknown label True; labels are negative, positive"):
        load_examples([{"text": "a", "label": True}], "sst-2")


def test_choice_labels_may_be_an_index_or_a_text() -> None:
    copa = {"premise": "P.", "question": "cause", "choice1": "A.", "choice2": "B."}
    assert load_examples([{**copa, "label": 1}], "copa")[0].label == 1
    record = {"passage": "P", "query": "@placeholder", "entities": ["Ann", "Bo", "Ann"], "answers": ["Bo", "Cy"]}
    (example,) = load_examples([record], "record")
    assert (example.label, example.fields["entities"], example.fields["answers"]) == (1, ["Ann", "Bo"], ["Bo", "Cy"])
    with pytest.raises(DataError, match="row 1: label 2 for 2 candidates; give an index from 0"):
        load_examples([{**copa, "label": 2}], "copa")
    with pytest.raises(DataError, match=r"none of the answers \['Di'\] is among the 2 candidates"):
        load_examples([{**record, "answers": ["Di"]}], "record")
