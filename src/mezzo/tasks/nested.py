"""Question-answering files as published: a record per passage is opened into a row per question or answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Row = Mapping[str, Any]


def rows(record: Row) -> Iterator[Row]:
    """The rows inside a record of SQuAD, MultiRC or ReCoRD; any other record is its own row."""
    passage = record.get("passage")
    if isinstance(record.get("paragraphs"), list):
        yield from _squad(record)
    elif isinstance(passage, Mapping) and isinstance(passage.get("questions"), list):
        yield from _multirc(passage)
    elif isinstance(passage, Mapping) and isinstance(record.get("qas"), list):
        yield from _record(passage, record["qas"])
    else:
        yield record


def _squad(article: Row) -> Iterator[Row]:
    for paragraph in article["paragraphs"]:
        for asked in paragraph["qas"]:
            yield {
                "title": article.get("title", ""),
                "context": paragraph["context"],
                "question": asked["question"],
                "answers": _texts(asked),
            }


def _multirc(passage: Row) -> Iterator[Row]:
    for asked in passage["questions"]:
        for answer in asked["answers"]:
            row = {"paragraph": passage["text"], "question": asked["question"], "answer": answer["text"]}
            yield {**row, "label": answer.get("label")}


def _record(passage: Row, asked: list[Row]) -> Iterator[Row]:
    text = passage["text"]
    spans = [text[entity["start"] : entity["end"] + 1] for entity in passage["entities"]]
    for each in asked:
        yield {
            "passage": text,
            "query": each["query"],
            "entities": list(dict.fromkeys(spans)),
            "answers": _texts(each),
        }


def _texts(asked: Row) -> list[str]:
    return [answer["text"] for answer in asked.get("answers", ())]
