"""Labels, or generated answers, for rows of data."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from mezzo.engines.base import Engine
from mezzo.errors import DataError
from mezzo.evaluation.evaluate import probabilities, refuse_nan, score_prompts
from mezzo.evaluation.rewards import read_texts
from mezzo.runs import datasets
from mezzo.runs.setup import Setup
from mezzo.tasks import load_rows
from mezzo.tasks.readers import MAX_LINE, Row, Table, read_lines
from mezzo.tasks.streams import read_stream
from mezzo.types import Batch, Example, Probe, Prompt, Readout


def predict_rows(engine: Engine, setup: Setup, source: Any, batch: int) -> Iterator[dict[str, Any]]:
    """Every row of a path, an open file or an iterable, with all its columns, `prediction` and `probabilities`."""
    for found in _read_batches(setup, source, batch):
        rows, examples = zip(*found, strict=True)
        for row, answer in zip(rows, _predict(engine, setup, examples), strict=True):
            yield {**row, **answer}


def _read_batches(setup: Setup, source: Any, batch: int) -> Iterator[list[tuple[Row, Example]]]:
    """Rows with their examples, in parts; labels in the source are ignored."""
    options = {"labelled": "ignore", **datasets.reading_options(setup.config)}
    if isinstance(source, (str, Path)) and not _holds_lines(source):
        found = load_rows(source, setup.task, split="test", **options)
        yield from (found[start : start + batch] for start in range(0, len(found), batch))
        return
    name = _name_source(source)
    rows = ((n, _to_row(setup, row, f"{name}, row {n}")) for n, row in enumerate(_read_rows(setup, source, name), 1))
    while part := list(itertools.islice(rows, batch)):
        yield load_rows(Table(name, part, "row"), setup.task, **options)


def _holds_lines(source: str | Path) -> bool:
    """Whether it is read as standard input is; otherwise by its suffix, or as a folder or a data set of the hub."""
    return (
        Path(source).suffix.lower() in ("", ".txt") and not str(source).startswith("hub:") and not Path(source).is_dir()
    )


def _name_source(source: Any) -> str:
    """What messages call it."""
    if not isinstance(source, (str, Path)) and not hasattr(source, "readline"):
        return "the data"
    name = str(getattr(source, "name", "the file")) if hasattr(source, "readline") else str(source)
    return "standard input" if name == "<stdin>" else name


def _read_rows(setup: Setup, source: Any, name: str) -> Iterable[Any]:
    named = datasets.column_names(setup.config)
    if isinstance(source, (str, Path)):
        path = Path(source)
        if not path.exists():
            raise DataError(f"no file {name!r}; check the path")
        return read_stream(read_lines(path, setup.config.encoding), name, setup.task, named)
    if hasattr(source, "readline"):
        return read_stream(_lines_of(source, name), name, setup.task, named)
    return source  # type: ignore[no-any-return]


def _lines_of(file: TextIO, name: str) -> Iterator[str]:
    """Lines as they come, none so long that it fills the memory."""
    try:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), ""), 1):
            if len(line) > MAX_LINE:
                raise DataError(f"{name}, line {number}: longer than {MAX_LINE:,} characters; is this text?")
            yield line
    except OSError as error:
        raise DataError(f"{name}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise DataError(f"{name} is not UTF-8 text; convert it, or name it as a file, which may be latin-1") from None


def _to_row(setup: Setup, row: Any, where: str) -> Mapping[str, Any]:
    """A row by column; a bare text is a row where the task has one column."""
    columns = setup.task.columns
    if isinstance(row, str) and len(columns) == 1:
        return {datasets.column_names(setup.config).get(columns[0], columns[0]): row}
    if not isinstance(row, Mapping):
        raise DataError(
            f"{where}: a row of task {setup.task.name!r} is an object with {', '.join(columns)}, not {str(row)[:40]!r}"
        )
    return row


def _refuse_nan_after(engine: Engine, prompts: Sequence[Prompt]) -> None:
    """Refuse a model without finite scores of what follows a prompt: the text it generates would be empty or random."""
    any_token = [replace(prompt, label=0, candidates=(prompt.ids[:1],)) for prompt in prompts]
    refuse_nan(score_prompts(engine, any_token, Readout("candidates")))


def _predict(engine: Engine, setup: Setup, examples: tuple[Example, ...]) -> Iterator[dict[str, Any]]:
    """Each example's label and probabilities, or the text that is generated for it."""
    prompts = setup.encode(examples)
    if setup.task.kind == "generation":
        _refuse_nan_after(engine, prompts)
        answers = engine.generate(Batch(prompts, setup.readout), [Probe()], setup.generation)
        for drawn in read_texts(answers, setup.decode, setup.stop)[0]:
            yield {"prediction": drawn[0], **({"draws": drawn} if len(drawn) > 1 else {})}
        return
    if any(not (p.candidates or setup.readout.kind != "candidates") for p in prompts):
        raise DataError(f"a row of task {setup.task.name!r} has no candidates to choose from")
    scores = score_prompts(engine, prompts, setup.readout)
    refuse_nan(scores)
    for row in probabilities(scores):
        names = setup.task.labels or tuple(str(i) for i in range(len(row)))
        shown = {name: round(float(p), 6) for name, p in zip(names, row, strict=False)}
        yield {"prediction": names[int(row.argmax())], "probabilities": shown}
