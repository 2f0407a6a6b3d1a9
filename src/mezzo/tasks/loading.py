"""From data, wherever it is, to examples: files, k-shot folders, lists of dicts, Hugging Face datasets, data frames."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mezzo.errors import DataError, nearest
from mezzo.tasks import columns as layout
from mezzo.tasks import nested
from mezzo.tasks.labels import IdOrder, Labels, choice_label, is_missing
from mezzo.tasks.readers import Records, Sheet, from_json, read
from mezzo.tasks.registry import get_task
from mezzo.tasks.task import Task, as_texts
from mezzo.types import Example

Labelled = bool | Literal["skip", "ignore"]

_SPLITS = (
    ("train", "training"),
    ("dev", "dev_matched", "val", "validation", "valid", "validation_matched", "dev_mismatched"),
    ("test", "test_matched", "eval"),
)
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".tsv", ".csv", ".txt", ".parquet")
_K_SHOT = re.compile(r"\d+-\d+")


@dataclass(frozen=True, slots=True)
class _Ask:
    """What the caller wants of the data."""

    task: Task
    labels: Labels
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
    encoding: str = "utf-8",
) -> list[Example]:
    """Examples of `task` from a path, a folder with splits, a list of dicts, a Hugging Face dataset or a data frame.

    `id_order` says what integer labels mean: the name of an order the task declares, or label names in id order.
    `labelled`: True refuses rows without a label, False keeps them, 'skip' leaves them out, 'ignore' looks at no label.
    `columns` names what
    cannot be guessed, task column → column of the data. `hub:NAME` or `hub:NAME:CONFIG` asks the `datasets` library.
    """
    task = get_task(task)
    ask = _Ask(task, Labels(task, id_order), labelled, columns or {})
    if isinstance(source, list | tuple) and source and isinstance(source[0], Example):
        return list(source)
    if isinstance(source, str) and source.startswith("hub:"):
        source = _from_hub(source.removeprefix("hub:"), split)
    if isinstance(source, str | Path):
        found = _from_path(Path(source), ask, split, encoding)
    else:
        found = _from_object(source, split)
    examples = list(_examples(found, ask))
    if not examples:
        raise DataError(f"{found.source}: no rows{' with a label' if found.rows else ''}; give data with some")
    return examples


def bundled_data(task_name: str, split: str) -> Path | None:
    """The file of a split that comes with the package, or None."""
    path = Path(__file__).parents[1] / "bundled" / "data" / task_name / f"{split}.jsonl"
    return path if path.is_file() else None


# --- where rows come from


def _from_path(path: Path, ask: _Ask, split: str | None, encoding: str) -> Records:
    if path.is_dir():
        path = _split_file(path, split)
    if not path.exists():
        beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(f"no file {str(path)!r}{nearest(path.name, beside) or '; check the path'}")
    content = read(path, encoding)
    bare = False
    if isinstance(content, Sheet):
        content, bare = layout.records(
            ask.task, content, ask.labels, ask.labelled not in (False, "ignore"), ask.columns
        )
    if bare or _K_SHOT.fullmatch(path.parent.name):
        ask.labels.suggest("lm-bff")  # its files, and no hub's, are without a header or in K-SEED folders
    return content


def _split_file(folder: Path, split: str | None) -> Path:
    files = {path.stem: path for suffix in reversed(_SUFFIXES) for path in sorted(folder.glob(f"*{suffix}"))}
    if split is not None:
        names = next((names for names in _SPLITS if split in names), ())
        for name in (split, *names):
            if name in files:
                return files[name]
    found = ", ".join(sorted(path.name for path in files.values())) or "no data files"
    wanted = "state a split" if split is None else f"no file for split {split!r}"
    raise DataError(f"{folder} is a folder: {wanted}; found {found}")


def _from_hub(name: str, split: str | None) -> Any:
    try:
        import datasets  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise DataError(f"hub:{name} needs the datasets library; pip install datasets, or give a file") from None
    path, _, config = name.partition(":")
    try:
        return datasets.load_dataset(path, config or None, split=split)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        about = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"hub:{name} cannot be loaded ({about[:200]}); check the name and the network") from None


def _from_object(source: Any, split: str | None) -> Records:
    if isinstance(source, Mapping) and any(hasattr(part, "features") for part in source.values()):
        if split not in source:
            raise DataError(f"the dataset has the splits {', '.join(map(str, source))}; state one, and not {split!r}")
        source = source[split]
    features = getattr(source, "features", None)
    if hasattr(source, "to_dict") and hasattr(source, "columns"):
        source = source.to_dict("records")
    if isinstance(source, Mapping):
        return from_json(dict(source), "the data")
    if isinstance(source, str | bytes) or not isinstance(source, Iterable):
        raise DataError(f"a {type(source).__name__} is not data; give a path, a list of dicts or a dataset")
    made = from_json(list(source), "the data")
    names = {
        name: tuple(feature.names) for name, feature in (features or {}).items() if getattr(feature, "names", None)
    }
    return Records(made.source, made.rows, made.unit, names)


# --- from rows to examples


def _examples(found: Records, ask: _Ask) -> Iterator[Example]:
    task, labels, labelled = ask.task, ask.labels, ask.labelled
    chosen: dict[str, str] = {}
    known: tuple[str, ...] | None = None
    for number, raw in _opened(found):
        where = found.where(number)
        row = layout.flat(raw)
        if known != (known := tuple(row)):  # rows of a table have the same columns; lines of JSON may not
            chosen = layout.resolve(task, known, where, ask.columns, labelled is True)
            labels.data_names(found.names.get(chosen.get(task.label_column, ""), ()))
        fields = {column: _field(row[chosen[column]], column, task, where) for column in layout.needed(task)}
        value = row.get(chosen.get(task.label_column, ""))
        if (
            labelled == "ignore" and task.kind == "classification"
        ):  # a prediction asks for no label, whatever stands there
            yield Example(fields)
        elif is_missing(value) and not (task.labels and isinstance(value, str) and labels.knows(value)):
            if labelled is True:
                raise DataError(
                    f"{where}: no label; give one, or delete the row (in Python, load_examples skips such rows: labelled='skip')"
                )
            if labelled in (False, "ignore"):
                yield Example(fields)
        elif task.kind == "generation":
            yield Example({**fields, task.label_column: as_texts(value)}, 0)
        elif task.kind == "choice":
            candidates = [text for column in task.candidates for text in as_texts(fields[column])]
            right = {} if isinstance(value, int) else {task.label_column: as_texts(value)}
            yield Example({**fields, **right}, choice_label(value, candidates, where))
        else:
            yield Example(fields, labels.read(value, where))


def _opened(found: Records) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, record in found.rows:
        try:
            yield from ((number, row) for row in nested.rows(record))
        except (KeyError, TypeError) as error:
            raise DataError(
                f"{found.where(number)}: a nested record without {error}; give one row per question"
            ) from None


def _whole(text: str, column: str, where: str) -> str:
    """JSON can hold half a character, which no file can be written with and no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {column!r} holds half a character (a lone surrogate at {error.start + 1})") from None
    return text


def _field(value: Any, column: str, task: Task, where: str) -> str | list[str]:
    if column in task.candidates and isinstance(value, list | tuple):
        return [_whole(text, column, where) for text in as_texts(value)]
    if isinstance(value, str):
        return _whole(value, column, where)
    if value is None or isinstance(value, list | tuple | Mapping):
        raise DataError(f"{where}: {column!r} is {'null' if value is None else 'not text'}; give a string")
    return str(value)
