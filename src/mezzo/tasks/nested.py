"""Question-answering files as published: a record per passage is expanded into a row per question or answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mezzo.tasks.readers import Row


def expand(record: Row) -> Iterator[Row]:
    """The rows inside a record of SQuAD, MultiRC or ReCoRD; any other record is a row itself."""
    passage = record.get("passage")
    if isinstance(record.get("paragraphs"), list):
        yield from _expand_squad(record)
    elif isinstance(passage, Mapping) and isinstance(passage.get("questions"), list):
        yield from _expand_multirc(passage)
    elif isinstance(passage, Mapping) and isinstance(record.get("qas"), list):
        yield from _expand_record(passage, record["qas"])
    else:
        yield record


def _expand_squad(article: Row) -> Iterator[Row]:
    for paragraph in article["paragraphs"]:
        for question in paragraph["qas"]:
            yield {
                "title": article.get("title", ""),
                "context": paragraph["context"],
                "question": question["question"],
                "answers": _answer_texts(question),
            }


def _expand_multirc(passage: Row) -> Iterator[Row]:
    for question in passage["questions"]:
        for answer in question["answers"]:
            row = {"paragraph": passage["text"], "question": question["question"], "answer": answer["text"]}
            yield {**row, "label": answer.get("label")}


def _expand_record(passage: Row, questions: list[Row]) -> Iterator[Row]:
    text = passage["text"]
    spans = [text[entity["start"] : entity["end"] + 1] for entity in passage["entities"]]
    for question in questions:
        yield {
            "passage": text,
            "query": question["query"],
            "entities": list(dict.fromkeys(spans)),
            "answers": _answer_texts(question),
        }


def _answer_texts(question: Row) -> list[str]:
    return [answer["text"] for answer in question.get("answers", ())]
