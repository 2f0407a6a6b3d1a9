"""Examples from any data source: files, k-shot folders, lists of dicts, Hugging Face datasets, data frames."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mezzo.errors import DataError, nearest
from mezzo.tasks import countdown, nested
from mezzo.tasks.columns import flatten_row, match_columns, name_columns, required_columns
from mezzo.tasks.labels import IdOrder, LabelReader, choice_label, is_missing
from mezzo.tasks.readers import READERS, BadRows, RawTable, Row, Table, read_file, table_from_json
from mezzo.tasks.registry import get_task
from mezzo.tasks.task import Task, as_texts
from mezzo.types import Example

Labelled = bool | Literal["skip", "ignore"]

_SPLITS = (
    ("train", "training"),
    ("dev", "dev_matched", "val", "validation", "valid", "validation_matched", "dev_mismatched"),
    ("test", "test_matched", "eval"),
)
# Of one text. Books have fewer, and no model reads so many.
MAX_CHARACTERS = 1_000_000
# Tasks whose data are made.
GENERATED = {"countdown": countdown.make_rows}
_K_SHOT = re.compile(r"\d+-\d+")


@dataclass(frozen=True, slots=True)
class _LoadOptions:
    """How the caller wants the data to be read."""

    task: Task
    labels: LabelReader
    labelled: Labelled
    columns: Mapping[str, str]


def load_examples(
    source: Any,
    task: Task | str,
    *,
    split: str | None = None,
    id_order: IdOrder = None,
    labelled: Labelled = True,
    columns: Mapping[str, str] | None = None,
    encoding: str | None = None,
) -> list[Example]:
    """Examples of `task` from a path, a folder with splits, a list of dicts, a Hugging Face dataset or a data frame.

    `id_order` says what integer labels mean: the name of an order the task declares, or label names in id order.
    `labelled`: True refuses rows without a label, False keeps them, 'skip' leaves them out, 'ignore' reads no labels.
    `columns` names what cannot be guessed, task column → column of the data. `encoding` is that of a file; None: UTF-8, or
    where that fails that of the task's published files, or latin-1. `hub:NAME` or `hub:NAME:CONFIG` is loaded
    with the `datasets` library.
    """
    if isinstance(source, list | tuple) and source and isinstance(source[0], Example):
        return list(source)
    found = load_rows(
        source, task, split=split, id_order=id_order, labelled=labelled, columns=columns, encoding=encoding
    )
    return [example for _, example in found]


def load_rows(
    source: Any,
    task: Task | str,
    *,
    split: str | None = None,
    id_order: IdOrder = None,
    labelled: Labelled = True,
    columns: Mapping[str, str] | None = None,
    encoding: str | None = None,
) -> list[tuple[Row, Example]]:
    """As `load_examples`, each example with the row it comes from."""
    task = get_task(task)
    options = _LoadOptions(task, LabelReader(task, id_order), labelled, columns or {})
    if files := _find_label_files(source, split, options):
        table = _table_from_label_files(files, task, encoding)
    else:
        table = _name_table(read_table(source, split, encoding, task.encoding), options)
    found = list(_examples(table, options))
    if not found:
        raise DataError(f"{table.source}: no rows{' with a label' if table.rows else ''}; give data that has some")
    return found


def bundled_data(task_name: str, split: str) -> Path | list[dict[str, str]] | None:
    """The file of a split that comes with the package, rows that are made from a seed, or None."""
    if task_name in GENERATED:
        return GENERATED[task_name](split)
    path = Path(__file__).parents[1] / "bundled" / "data" / task_name / f"{split}.jsonl"
    return path if path.is_file() else None


def is_k_shot(folder: Path) -> bool:
    """Is this a folder of LM-BFF's layout, `TASK/K-SEED`?"""
    return _K_SHOT.fullmatch(folder.name) is not None


# --- from a source to a table


def read_table(
    source: Any, split: str | None = None, encoding: str | None = None, published_encoding: str = ""
) -> Table | RawTable:
    """The rows of a source, before it is known which column is which."""
    if isinstance(source, Table):
        return source
    if isinstance(source, str) and source.startswith("hub:"):
        source = _load_from_hub(source.removeprefix("hub:"))
    if not isinstance(source, str | Path):
        return _table_from_object(source, split)
    path = Path(source)
    if path.is_dir():
        if (file := find_split(path, split)) is None:
            found = ", ".join(sorted(file.name for file in _data_files(path).values())) or "no data files"
            problem = "name a split" if split is None else f"no file for split {split!r}"
            raise DataError(f"{path} is a folder: {problem}; found {found}")
        path = file
    if not path.exists():
        neighbours = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(f"no file {str(path)!r}{nearest(path.name, neighbours) or '; check the path'}")
    return read_file(path, encoding, published_encoding)


def _name_table(table: Table | RawTable, options: _LoadOptions) -> Table:
    in_k_shot_folder, has_header = is_k_shot(Path(table.source).parent), True
    if isinstance(table, RawTable):
        needs_label = options.labelled not in (False, "ignore")
        table, has_header = name_columns(options.task, table, options.labels, needs_label, options.columns)
    if not has_header or in_k_shot_folder:
        options.labels.use_layout_order("lm-bff", "csv")  # whose files have no header, or lie in K-SEED folders
    return table


def find_split(folder: Path, split: str | None) -> Path | None:
    """The file of a split in a folder."""
    files = _data_files(folder)
    name = name_split(files, split)
    return None if name is None else files[name]


def name_split(found: Iterable[str], split: str | None) -> str | None:
    """What a split is called among those found: `validation` may be dev."""
    synonyms = next((names for names in _SPLITS if split in names), ())
    return next((name for name in (split or "", *synonyms) if name in found), None)


def has_splits(source: Any) -> bool:
    """Is this a dictionary of Hugging Face datasets?"""
    return isinstance(source, Mapping) and any(hasattr(part, "features") for part in source.values())


def _data_files(folder: Path) -> dict[str, Path]:
    return {path.stem: path for suffix in reversed(READERS) for path in sorted(folder.glob(f"*{suffix}"))}


def _find_label_files(source: Any, split: str | None, options: _LoadOptions) -> dict[int, Path]:
    """Label → its file in a folder with one file of lines per label (`rt-polarity.pos`, `quote.tok.gt9.5000`)."""
    task, labels = options.task, options.labels
    if split not in (None, "train") or len(task.columns) > 1 or not isinstance(source, str | Path):
        return {}
    folder = Path(source)
    if not folder.is_dir() or find_split(folder, split):
        return {}
    named = [(part, path) for path in sorted(folder.iterdir()) for part in path.name.split(".") if labels.is_name(part)]
    files = {labels.read(part): path for part, path in named}
    return files if len(task.labels) == len(named) == len(files) else {}


def _table_from_label_files(files: Mapping[int, Path], task: Task, encoding: str | None) -> Table:
    tables = {label: read_file(path, encoding, task.encoding, suffix=".txt") for label, path in files.items()}
    rows = [
        {task.label_column: task.labels[label], task.columns[0]: cells[0]}
        for label, table in tables.items()
        if isinstance(table, RawTable)
        for _, cells in table.rows
    ]
    return Table(str(next(iter(files.values())).parent), list(enumerate(rows, 1)), "row")


def _load_from_hub(name: str) -> Any:
    try:
        import datasets  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise DataError(f"hub:{name} needs the datasets library; pip install datasets, or give a file") from None
    path, _, config = name.partition(":")
    try:
        return datasets.load_dataset(path, config or None)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"hub:{name} cannot be loaded ({reason[:200]}); check the name and the network") from None


def _table_from_object(source: Any, split: str | None) -> Table:
    if has_splits(source):
        if (found := name_split(source, split)) is None:
            raise DataError(
                f"the dataset has the splits {', '.join(map(str, source))}; name one of them, not {split!r}"
            )
        source = source[found]
    features = getattr(source, "features", None)
    if hasattr(source, "to_dict") and hasattr(source, "columns"):
        source = source.to_dict("records")
    if isinstance(source, Mapping):
        return table_from_json(dict(source), "the data")
    if isinstance(source, str | bytes) or not isinstance(source, Iterable):
        raise DataError(f"{type(source).__name__} is not data; give a path, a list of dicts or a dataset")
    table = table_from_json(list(source), "the data")
    label_names = {
        name: tuple(feature.names) for name, feature in (features or {}).items() if getattr(feature, "names", None)
    }
    return Table(table.source, table.rows, table.unit, label_names)


# --- from rows to examples


def _examples(table: Table, options: _LoadOptions) -> Iterator[tuple[Row, Example]]:
    task, labels = options.task, options.labels
    columns: dict[str, str] = {}
    names: tuple[str, ...] | None = None
    bad = BadRows(table.source, table.unit)
    for number, raw in _expand_rows(table):
        row = flatten_row(raw)
        if names != (names := tuple(row)):  # rows of a table have the same columns; lines of JSON may not
            columns = match_columns(task, names, table.location(number), options.columns, options.labelled is True)
            labels.use_data_names(table.label_names.get(columns.get(task.label_column, ""), ()))
        value = row.get(columns.get(task.label_column, ""))
        if task.label_column not in options.columns and labels.is_name(row.get("label_text", "")):
            value = row["label_text"]  # beside an id, whose meaning a copy of a data set may have changed
        try:
            fields = {column: _field(row[columns[column]], column, task) for column in required_columns(task)}
            if task.kind == "generation":  # a reward may ask for anything that the row has
                fields = {**raw, **fields}
            example = _example(fields, value, options)
        except DataError as error:
            bad.add(number, str(error))
            continue
        if example is not None:
            yield raw, example
    bad.refuse()


def _example(fields: dict[str, Any], value: Any, options: _LoadOptions) -> Example | None:
    """The example of a row whose label column holds `value`; None for one to leave out."""
    task, labels, labelled = options.task, options.labels, options.labelled
    if labelled == "ignore" and task.kind == "classification":
        return Example(fields)
    if is_missing(value) and not (task.labels and isinstance(value, str | int) and labels.could_be_label(value)):
        if labelled is True:
            raise DataError("no label; give one, or leave out such rows with --skip-unlabelled (labelled='skip')")
        return None if labelled == "skip" else Example(fields)
    if task.kind == "generation":
        return Example({**fields, task.label_column: as_texts(value)}, 0)
    if task.kind == "choice":
        candidates = task.choices(fields)
        answers = {} if isinstance(value, int) else {task.label_column: as_texts(value)}
        return Example({**fields, **answers}, choice_label(value, candidates))
    return Example(fields, labels.read(value))


def _expand_rows(table: Table) -> Iterator[tuple[int, Row]]:
    for number, record in table.rows:
        try:
            yield from ((number, row) for row in nested.expand(record))
        except (KeyError, TypeError) as error:
            raise DataError(
                f"{table.location(number)}: a nested record without {error}; give one row per question"
            ) from None


def _field(value: Any, column: str, task: Task) -> str | list[str]:
    if column in task.candidates and isinstance(value, list | tuple):
        return [_check_encodable(text, column) for text in as_texts(value)]
    if value is None or isinstance(value, list | tuple | Mapping):
        raise DataError(f"{column!r} is {'null' if value is None else 'not text'}; give a string")
    return _check_encodable(str(value), column)


def _check_encodable(text: str, column: str) -> str:
    """JSON can hold half a character, which can be neither written to a file nor tokenized. A long text takes minutes, and
    memory by the gigabyte, although the model reads its beginning."""
    if len(text) > MAX_CHARACTERS:
        raise DataError(f"{column!r} has {len(text):,} characters; cut it, {MAX_CHARACTERS:,} are the most")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{column!r} holds half a character (a lone surrogate at {error.start + 1})") from None
    return text
