"""A task is proposed from data alone: columns, labels, words and templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo.engines.hf_hub import load_tokenizer
from mezzo.errors import DataError, MezzoError
from mezzo.tasks import load_examples
from mezzo.tasks.label_words import propose_words
from mezzo.tasks.loading import read_table
from mezzo.tasks.proposal import TEMPLATES, Proposal, propose
from mezzo.tasks.tokenizer import TokenizerWrapper
from tests.tickets import make_tickets, write_csv


@pytest.fixture(scope="module")
def words_of_roberta() -> TokenizerWrapper:
    return TokenizerWrapper(load_tokenizer("mezzo/roberta-mini"))


@pytest.fixture(scope="module")
def suggest(words_of_roberta: TokenizerWrapper) -> Any:
    def proposal(source: Any, family: Any = "masked", **options: Any) -> Proposal:
        return propose(read_table(source), words_of_roberta, family, **options)

    return proposal


def rows_of(**columns: Any) -> list[dict[str, Any]]:
    """Forty rows; a value may be a function of the row's number."""
    return [{name: make(n) if callable(make) else make for name, make in columns.items()} for n in range(40)]


def text(number: int) -> str:
    return f"The delivery number {number} came late and nobody answered."


def label(number: int) -> str:
    return ("problem", "question")[number % 2]


# ---- columns

COLUMNS: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "usual names": ({"id": str, "text": text, "label": label}, ("text",), "label"),
    "other usual names": ({"body": text, "stars": lambda n: n % 5 + 1}, ("body",), "stars"),
    "case and spaces": ({"Customer Message": text, "Issue Category": label}, ("Customer Message",), "Issue Category"),
    "camel case": ({"ticketText": text, "issueType": label}, ("ticketText",), "issueType"),
    "by content": ({"when": lambda n: f"2024-05-{n:02}", "words": text, "kind": label}, ("words",), "kind"),
    "names before ids": ({"text": text, "label": lambda n: n % 2, "label_text": label}, ("text",), "label_text"),
    "a message with its type": ({"message_type": label, "wording": text}, ("wording",), "message_type"),
    "a pair by name": (
        {"premise": text, "hypothesis": lambda n: text(n + 7), "label": label},
        ("premise", "hypothesis"),
        "label",
    ),
    "a title and a body": (
        {"body": text, "subject": lambda n: f"Order {n}", "label": label},
        ("subject", "body"),
        "label",
    ),
    "a pair by content": ({"a": text, "b": lambda n: text(n + 7), "c": label}, ("a", "b"), "c"),
    "an answer is no second text": ({"message": text, "reply": text, "class": label}, ("message",), "class"),
    "a number of few values": ({"a": text, "b": lambda n: n % 2, "c": lambda n: n}, ("a",), "b"),
    "an unused score": ({"text": text, "score": lambda n: n / 7, "kind": label}, ("text",), "kind"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_are_found(name: str, suggest: Any) -> None:
    columns, texts, label_column = COLUMNS[name]
    rows = rows_of(**columns)
    proposal = suggest(rows)
    assert proposal.task.columns == texts
    assert proposal.task.label_column == label_column
    assert len(load_examples(rows, proposal.task)) == 40, "the task reads the data"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"text": text, "channel": label, "kind": label},
            "the label could be 'channel' or 'kind'; .*--columns label=NAME",
        ),
        ({"text": text, "note": text}, "no column looks like labels .* among 'text', 'note'; .*--columns label=NAME"),
        ({"label": label, "size": str}, "no column holds texts; found 'label', 'size'; .*--columns text=NAME"),
        ({"text": text, "label": "spam"}, "the label column 'label' holds only 'spam'; training needs at least two"),
        ({"text": text, "kind": label, "label": ""}, None),
    ],
    ids=["two labels", "no label", "no text", "one class", "an empty label column"],
)
def test_columns_that_cannot_be_told_apart_are_asked_for(columns: Any, message: str | None, suggest: Any) -> None:
    if message is None:
        assert suggest(rows_of(**columns)).task.label_column == "kind"
        return
    with pytest.raises(DataError, match=message):
        suggest(rows_of(**columns))


def test_stated_columns_name_the_task_s_columns(suggest: Any) -> None:
    rows = rows_of(note=text, reply=text, channel=label, kind=label)
    proposal = suggest(rows, columns={"text": "reply", "label": "kind"})
    assert (proposal.task.columns, proposal.task.label_column) == (("text",), "label")
    assert proposal.task.template.startswith("{text} ")
    assert load_examples(rows, proposal.task)[1].label == 1, "the task file alone reads the data"
    with pytest.raises(DataError, match="no column 'body' for 'text'; found 'note', 'reply', 'channel', 'kind'"):
        suggest(rows, columns={"text": "body"})


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_file_without_a_header_is_recognised(delimiter: str, suggest: Any, tmp_path: Path) -> None:
    rows = [{key: row[key] for key in ("id", "message", "category")} for row in make_tickets(60)]
    path = write_csv(tmp_path / f"tickets.{'csv' if delimiter == ',' else 'tsv'}", rows, delimiter, header=False)
    proposal = suggest(path)
    assert proposal.sources == {"text": "column 2", "label": "column 3"}
    assert len(load_examples(path, proposal.task)) == 60
    with pytest.raises(DataError, match="no header for --columns to name"):
        suggest(path, columns={"text": "message"})


def test_odd_column_names_do_not_break_the_template(suggest: Any) -> None:
    rows = [{"text {0}: raw": text(n), "7": label(n)} for n in range(40)]
    proposal = suggest(rows)
    assert proposal.task.label_column == "7"
    assert text(3) in proposal.task.render(load_examples(rows, proposal.task)[3])


# ---- labels and words


def test_labels_become_words(words_of_roberta: TokenizerWrapper) -> None:
    def words(*labels: str) -> Any:
        found = propose_words(words_of_roberta, labels, space=True)
        return list(found.values()) if found else None

    assert words("Problem", "question") == ["problem", "question"]
    assert words("billing_issue", "Technical problem", "account-access") == ["issue", "problem", "access"]
    assert words("AccountOrder", "BankMoney") == ["order", "money"]
    assert words("1", "2", "3", "4", "5") == ["terrible", "bad", "okay", "good", "great"]
    assert words("0", "1") == ["0", "1"]
    assert words("contradiction", "entailment", "neutral") == ["No", "Yes", "Maybe"]
    assert words("order_problem", "bank_problem") == ["order", "bank"], "what labels share tells nothing"
    assert words("problem", "order_problem") == ["problem", "order"]
    assert words("refund", "login") is None, "no word of similar spelling instead"


def test_labels_are_merged_sorted_and_counted(suggest: Any) -> None:
    spellings = ("Question", "question", "PROBLEM", "problem ", "")
    rows = rows_of(text=text, label=lambda n: spellings[n % 5])
    proposal = suggest(rows)
    assert proposal.counts == {"PROBLEM": 16, "Question": 16}
    assert len(load_examples(rows, proposal.task, labelled="skip")) == 32
    numbers = suggest(rows_of(text=text, stars=lambda n: (10.0, 9.0, "", 1)[n % 4]))
    assert list(numbers.counts) == ["1", "9", "10"]
    assert len(load_examples(rows_of(text=text, stars=lambda n: (10.0, "9.0", 1)[n % 3]), numbers.task)) == 40
    assert "the labels are numbers" in str(numbers)
    assert "the labels are numbers" in str(suggest(rows_of(text=text, label=lambda n: n % 2), words={}))


@pytest.mark.parametrize("as_text", [int, str])
def test_minus_one_is_a_label_beside_zero_and_one_only(as_text: Any, suggest: Any) -> None:
    opinions = rows_of(text=text, label=lambda n: as_text(n % 3 - 1))
    proposal = suggest(opinions)
    assert list(proposal.counts) == ["-1", "0", "1"]
    assert [example.label for example in load_examples(opinions, proposal.task)[:3]] == [0, 1, 2]
    gaps = suggest(rows_of(text=text, label=lambda n: as_text(n % 4 - 1)))
    assert list(gaps.counts) == ["0", "1", "2"]


def test_three_texts_need_a_template(suggest: Any) -> None:
    rows = rows_of(a=text, b=text, c=text, label=label)
    with pytest.raises(DataError, match="for more than two texts, write the template"):
        suggest(rows, columns={"x": "a", "y": "b", "z": "c"})
    assert suggest(rows, template="{a} {b} {c} [MASK]").task.columns == ("a", "b", "c")


def test_labels_without_words_get_a_head(suggest: Any) -> None:
    rows = rows_of(text=text, label=lambda n: ("refund", "login")[n % 2])
    proposal = suggest(rows)
    assert proposal.head
    assert "a fresh classification head is trained instead" in str(proposal)
    assert "→" not in str(proposal)
    assert not suggest(rows, head=False).head
    asked = suggest(rows_of(text=text, label=label), head=True)
    assert asked.head and "note" not in str(asked)


def test_names_of_ids_are_the_labels(suggest: Any) -> None:
    class Names:
        names = ("question", "problem")

    class Dataset(list[dict[str, Any]]):
        features = {"label": Names()}

    rows = Dataset(rows_of(text=text, label=lambda n: n % 2))
    proposal = suggest(rows)
    assert proposal.task.labels == ("problem", "question")
    assert load_examples(rows, proposal.task)[0].label == 1


# ---- templates


@pytest.mark.parametrize("family", ["masked", "causal"])
@pytest.mark.parametrize("texts", [1, 2])
def test_every_template_is_valid(family: Any, texts: int, suggest: Any) -> None:
    second = {"hypothesis": text} if texts == 2 else {}
    proposal = suggest(rows_of(premise=text, **second, label=label), family)
    assert len(proposal.templates) == len(TEMPLATES[family, texts])
    for template in proposal.templates:
        assert "{premise" in proposal.task.replace(template=template).template


def test_own_template_and_words_define_the_task(suggest: Any) -> None:
    rows = rows_of(body=text, kind=lambda n: ("refund", "login", "refund")[n % 3])
    own = suggest(rows, template="{body} They want [MASK].", words={"refund": "money", "login": "access"})
    assert own.task.columns == ("body",)
    assert own.task.word_of == {"refund": "money", "login": "access"}
    assert own.templates == ("{body} They want [MASK].",)
    other_name = suggest(rows, template="{text} They want [MASK].", words={"refund": "money", "login": "access"})
    assert other_name.task.columns == ("text",), "as the template names it"
    assert len(load_examples(rows, other_name.task)) == 40
    assert suggest(rows, template="They want [MASK].", words={"refund": "money", "login": "access"}).task.columns == (
        "body",
    )


cells = st.sampled_from(["", "yes", "no", "a b c d", "1", "2.5", "{x}", "nan", "text", '"', "ä€"]) | st.text(max_size=6)


@settings(max_examples=100)
@given(names=st.lists(cells, min_size=1, max_size=4, unique=True), data=st.data())
def test_arbitrary_rows_give_a_task_or_a_one_line_error(names: list[str], data: Any, words_of_roberta: Any) -> None:
    rows = data.draw(st.lists(st.fixed_dictionaries({name: cells | st.none() | st.integers() for name in names})))
    message = ""
    try:
        assert load_examples(rows, propose(read_table(rows), words_of_roberta, "masked").task, labelled=False)
    except MezzoError as error:
        message = str(error)
    assert "\n" not in message
