"""Everything that can be wrong with a data file: one line that names the file, the line and the remedy."""

from __future__ import annotations

import builtins
import csv
import gzip
import io
import json
import lzma
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo.errors import DataError, MezzoWarning
from mezzo.tasks import get_task, load_examples, readers

GOOD = json.dumps({"text": "fine", "label": "positive"})

NO_LABEL = "no label; give one, or leave out such rows with --skip-unlabelled (labelled='skip')"
MAC = ": it has the line endings of old Macs (CR); save it with Unix ones (LF)"

GIVE = "and give one of .jsonl, .ndjson, .json, .tsv, .csv, .txt, .all, .label, .parquet"


def zipped() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("train.csv", "text,label")
    return content.getvalue()


# file name → (content, what comes after the file's path)
BROKEN: dict[str, tuple[bytes, str]] = {
    "seventeen.jsonl": (
        "\n".join([GOOD] * 16 + ['{"text": "x" "label": 1}', GOOD]).encode(),
        ", line 17: bad JSON (Expecting ',' delimiter, column 14); fix or delete that line",
    ),
    "list.jsonl": (b"[1]\n", ", line 1: list is not an object with columns; write one object per row"),
    "numbers.jsonl": (b'{"text": ' + b"9" * 5000 + b"}", ", line 1: bad JSON (ValueError); fix or delete that line"),
    "deep.jsonl": (b"[" * 100_000, ", line 1: bad JSON (RecursionError); fix or delete that line"),
    "empty.jsonl": (b"", ": the file has no rows; give one with data"),
    "blank.jsonl": (b"\n \n", ": the file has no rows; give one with data"),
    "empty.csv": (b"", ": the file has no rows; give one with data"),
    "header.csv": (b"text,label\n", ": a header but no rows; give a file with data"),
    "column.jsonl": (
        b'{"text": "a", "label": 1}\n{"txt": "a", "extra": 1, "label": 1}\n',
        ", line 2: no column 'text'; found 'txt', 'extra', 'label'; rename one, or "
        "say which it is: --columns text=NAME (in Python, columns={'text': NAME})",
    ),
    "unlabelled.jsonl": (
        b'{"text": "a"}\n',
        ", line 1: no column 'label'; found 'text'; rename one, or "
        "say which it is: --columns label=NAME (in Python, columns={'label': NAME})",
    ),
    "null.jsonl": (b'{"text": null, "label": 1}\n', ", line 1: 'text' is null; give a string"),
    "nested.jsonl": (b'{"text": ["a"], "label": 1}\n', ", line 1: 'text' is not text; give a string"),
    "nolabel.jsonl": (
        b'{"text": "a", "label": null}\n',
        f", line 1: {NO_LABEL}",
    ),
    "label.jsonl": (
        b'{"text": "a", "label": "postive"}\n',
        ", line 1: unknown label 'postive'; labels are negative, positive; did you mean 'positive'?",
    ),
    "id.tsv": (
        b"text\tlabel\na\t1\nb\t2\n",
        ", line 3: unknown label '2'; ids are 0 negative, 1 positive; a task file states others by id_order",
    ),
    "several.jsonl": (
        "\n".join([GOOD, "{x", GOOD, "x", "{x"]).encode(),
        ", lines 2, 5: bad JSON (Expecting property name enclosed in double quotes, column 2); fix or delete that line;"
        " also line 4: bad JSON (Expecting value, column 1); fix or delete that line",
    ),
    "labels.csv": (
        b"text,label\na,1\nb,\nc,bad\nd,\n" + b"e,bad\n" * 9,
        f", lines 3, 5: {NO_LABEL}; also lines 4, 6, 7, 8, 9, 10, 11, 12: unknown label 'bad'; labels are negative, positive"
        "; rename it, or give a task file that lists it under label_aliases; and 2 more rows",
    ),
    "unlabelled.csv": (
        b"text,label\n" + b"a,\n" * 13,
        f", lines 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 3 more: {NO_LABEL}",
    ),
    "utf16.csv": (
        "text,label\na,1\n".encode("utf-16"),
        ", line 1: encoded as UTF-16; save the file as UTF-8",
    ),
    "ragged.csv": (
        b"text,label\nfine,1\nfine, really,1\n",
        ", line 3: 3 columns where 2 are expected; quote cells that contain the separator, or delete the line",
    ),
    "ragged.tsv": (
        b"text\tlabel\nfine\n",
        ", line 2: 1 columns where 2 are expected; quote cells that contain the separator, or delete the line",
    ),
    "mac.csv": (b"text,label\rfine,1\rbad,0\r", MAC),
    "mac.tsv": (b"text\tlabel\rfine\t1\rbad\t0", MAC),
    "mac.jsonl": ("\r".join([GOOD, GOOD]).encode(), MAC),
    "quote.csv": (
        b'text,label\nfine,1\n"open,1\nmore,0\n',
        ", line 3: bad csv (unexpected end of data); close or double its quotes",
    ),
    "twice.csv": (b"text,text,label\na,b,1\n", ": the column 'text' appears twice; rename one"),
    "object.json": (
        b'{"text": "a", "label": 1}',
        ": one object that is not a table; give a list of rows, or lists of equal length",
    ),
    "number.json": (b"3", ": int is not a table; give a list of objects, one per row"),
    "bad.json": (b'[\n{"text": }\n]', ", line 2: bad JSON (Expecting value, column 10); fix or delete that line"),
    "empty.json": (b"[]", ": the file has no rows; give one with data"),
    "not.parquet": (b"PAR0", ": not a parquet file ("),
    "data.xml": (
        b"<a/>",
        ": unknown file type '.xml'; use one of .jsonl, .ndjson, .json, .tsv, .csv, .txt, .all, .label, .parquet",
    ),
    "archive.zip": (zipped(), f" is a zip archive, not text; unpack or convert it, {GIVE}"),
    "archive.csv": (zipped(), f" is a zip archive, not text; unpack or convert it, {GIVE}"),
    "lines.txt.gz": (gzip.compress(b"1 fine"), f" is a gzip file, not text; unpack or convert it, {GIVE}"),
    "lines.xz": (lzma.compress(b"1 fine"), f" is an xz file, not text; unpack or convert it, {GIVE}"),
    "table.jsonl": (b"PAR1....", f" is a parquet file, not text; unpack or convert it, {GIVE}"),
    "pickle.csv": (pickle.dumps({"text": "a\0"}), " is a binary file, not text; give one of .jsonl, .ndjson, .json,"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file_gives_a_one_line_error(name: str, tmp_path: Path) -> None:
    content, message = BROKEN[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_examples(path, "sst-2")
    shown = str(caught.value)
    assert "\n" not in shown
    assert shown.startswith(f"{path}{message}")
    assert shown == f"{path}{message}" or message.endswith(("(", ","))  # pyarrow's own words, or a list, follow


def test_semicolons_in_text_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "texts.csv"
    path.write_text("fine; really\nbad\n", encoding="utf-8")
    assert [e.fields["text"] for e in load_examples(path, "sst-2", labelled=False)] == ["fine; really", "bad"]
    path.write_bytes(b"text,label\r\nfine; really,1\r\n")
    assert load_examples(path, "sst-2")[0].fields["text"] == "fine; really"


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("header", ["text{}label\n", "note{}verdict\n", ""])
def test_separator_of_a_csv_file_is_found(delimiter: str, header: str, tmp_path: Path) -> None:
    path = tmp_path / "texts.csv"
    rows = [("fine, really; yes", "1"), ('a "quoted"\tword', "0"), ("two\nlines", "1"), ("", "0")]
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(header.format(delimiter))
        csv.writer(file, delimiter=delimiter).writerows(rows)
    columns = {"text": "note", "label": "verdict"} if "note" in header else None
    found = load_examples(path, "sst-2", columns=columns)
    assert [(example.fields["text"], str(example.label)) for example in found] == rows


def test_missing_file_suggests_a_similar_name(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(GOOD, encoding="utf-8")
    with pytest.raises(DataError, match=r"^no file '.*tran.jsonl'; did you mean 'train.jsonl'\?$"):
        load_examples(tmp_path / "tran.jsonl", "sst-2")
    with pytest.raises(DataError, match=r"^no file '.*x.jsonl'; check the path$"):
        load_examples(tmp_path / "nowhere" / "x.jsonl", "sst-2")


def test_folder_with_a_file_suffix_is_treated_as_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(DataError, match="is a folder: name a split; found no data files"):
        load_examples(tmp_path / "a.jsonl", "sst-2")


def test_overlong_line_is_rejected_before_it_fills_memory(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(readers, "MAX_LINE", 1000)
    path = tmp_path / "one.jsonl"
    path.write_text(GOOD + "\n" + "x" * 1001, encoding="utf-8")
    with pytest.raises(DataError, match=r"one.jsonl, line 2: longer than 1,000 bytes; is this a data file\?$"):
        load_examples(path, "sst-2")


def test_long_cells_are_read(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text("text,label\n" + "x" * 200_000 + ",1\n", encoding="utf-8")
    assert len(load_examples(path, "sst-2")[0].fields["text"]) == 200_000


LATIN = {
    "latin.jsonl": (GOOD.encode() + b'\n{"text": "caf\xe9", "label": 1}\n', "line 2: not UTF-8 (byte 0xe9 at 14)"),
    "latin.json": (b'[\n{"text": "caf\xe9", "label": 1}]', "line 2: not UTF-8 (byte 0xe9 at 14)"),
    "latin.txt": (b"1 caf\xe9\n", "line 1: not UTF-8 (byte 0xe9 at 6)"),
    "latin.csv": (b"text,label\ncaf\xe9,1\n", "line 2: not UTF-8 (byte 0xe9 at 4)"),
    "latin.tsv": (b"text\tlabel\ncaf\xe9\t1\n", "line 2: not UTF-8 (byte 0xe9 at 4)"),
}


@pytest.mark.parametrize("name", LATIN)
def test_file_that_is_not_utf_8_is_read_as_latin_1_with_a_warning(name: str, tmp_path: Path) -> None:
    content, problem = LATIN[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.warns(MezzoWarning) as shown:
        assert load_examples(path, "sst-2")[-1].fields == {"text": "café"}
    assert [str(each.message) for each in shown] == [
        f"{path}, {problem}; the file is read as latin-1 (--encoding NAME if it is another)"
    ]
    with pytest.raises(DataError) as caught:
        load_examples(path, "sst-2", encoding="utf-8")
    assert str(caught.value) == f"{path}, {problem}; save the file as UTF-8, or pass --encoding latin-1"


def test_encoding_of_the_published_files_needs_no_option_and_no_warning(tmp_path: Path) -> None:
    path = tmp_path / "all.txt"
    path.write_bytes(b"1 a souffl\xe9 \x96 of sorts\x85 good\n")
    assert load_examples(path, "mr")[0].fields == {"text": "a soufflé – of sorts… good"}
    assert load_examples(path, get_task("mr", "causal"))[0].fields == {"text": "a soufflé – of sorts… good"}
    path.write_bytes(b"3 Who was Ed Hr\xf0lf ?\n")
    assert load_examples(path, "trec")[0].fields == {"text": "Who was Ed Hrðlf ?"}
    path.write_text("1 a soufflé – of sorts\n", encoding="utf-8")  # a copy that somebody converted
    assert load_examples(path, "mr")[0].fields == {"text": "a soufflé – of sorts"}


def test_encoding_can_be_chosen(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("1 café\n".encode("latin-1"))
    assert load_examples(path, "sst-2", encoding="latin-1")[0].fields == {"text": "café"}
    with pytest.raises(DataError, match="unknown encoding 'latin-one'; use utf-8 or latin-1"):
        load_examples(path, "sst-2", encoding="latin-one")


def test_text_lines_are_rejected_for_pair_tasks(tmp_path: Path) -> None:
    path = tmp_path / "pairs.txt"
    path.write_text("1 a b\n", encoding="utf-8")
    with pytest.raises(DataError, match="a line holds one text, but the task has 'premise', 'hypothesis'; use jsonl"):
        load_examples(path, "rte")


def test_parquet_without_pyarrow_names_the_missing_package(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1")
    real = builtins.__import__

    def no_pyarrow(name: str, *rest: Any, **options: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", no_pyarrow)
    with pytest.raises(DataError, match=r"reading parquet needs pyarrow; pip install pyarrow, or convert it to jsonl$"):
        load_examples(path, "sst-2")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "int is not data; give a path, a list of dicts or a dataset"),
        ([], "the data: no rows; give data that has some"),
        (["a"], "the data, row 1: str is not an object with columns; write one object per row"),
        (
            [{"text": "a", "label": None}],
            f"the data, row 1: {NO_LABEL}",
        ),
    ],
)
def test_wrong_objects_give_a_one_line_error(data: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        load_examples(data, "sst-2")
    assert str(caught.value) == message


def outcome(data: Any, task: str, **options: Any) -> str:
    """The message of the DataError, or nothing when there are examples. Any other exception is a failure."""
    try:
        assert load_examples(data, task, **options)
    except DataError as error:
        return str(error)
    return ""


fragments = st.sampled_from(
    [*'{}[]",:\t\n\r 01x', '"text"', '"label"', "text", "label", "positive", "null", "1e999", "\ufeff", "\x00", "-1"]
)


@pytest.mark.filterwarnings("ignore::mezzo.errors.MezzoWarning")
@settings(max_examples=150)
@given(
    content=st.binary(max_size=60) | st.lists(fragments, max_size=30).map(lambda parts: "".join(parts).encode()),
    suffix=st.sampled_from([".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet"]),
    task=st.sampled_from(["sst-2", "rte", "copa", "record", "squad", "cola"]),
    labelled=st.sampled_from([True, False, "skip"]),
)
def test_arbitrary_bytes_load_or_give_a_one_line_error(
    content: bytes, suffix: str, task: str, labelled: Any, tmp_path: Path
) -> None:
    path = tmp_path / f"any{suffix}"
    path.write_bytes(content)
    shown = outcome(path, task, labelled=labelled)
    assert shown == "" or (str(path) in shown and "\n" not in shown)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["text", "label", "passage", "qas", "answers", "questions", "entities"]), inner
        )
    ),
    max_leaves=10,
)


@settings(max_examples=100)
@given(
    rows=st.lists(
        st.dictionaries(
            st.sampled_from(["text", "label", "passage", "query", "entities", "answers", "qas"]), json_values
        )
    )
)
def test_arbitrary_rows_load_or_give_a_one_line_error(rows: list[dict[str, Any]]) -> None:
    for task in ("sst-2", "record", "multirc", "squad"):
        assert "\n" not in outcome(rows, task, labelled=False)


def test_only_unlabelled_rows_is_an_error_with_skip() -> None:
    with pytest.raises(DataError, match=r"^the data: no rows with a label; give data that has some$"):
        load_examples([{"text": "a", "label": -1}], "sst-2", labelled="skip")
