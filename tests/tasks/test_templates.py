"""Both ways of writing templates, and the errors of invalid ones."""

from __future__ import annotations

import pytest

from mezzo.errors import TaskError
from mezzo.tasks import Task
from mezzo.tasks.catalogue import T1, T2, T3, T4, T5
from mezzo.tasks.template_ast import LabelWord, Slot, SpecialToken, Text
from mezzo.tasks.templates import append_demonstrations, ends_with_space, parse, render

ONE, TWO = ("text",), ("premise", "hypothesis")
CLS, MASK, SEP = SpecialToken("cls"), SpecialToken("mask"), SpecialToken("sep", advance=True)

TOKENS = {
    "*cls*": SpecialToken("cls"),
    "*bos*": SpecialToken("bos"),
    "*eos*": SpecialToken("eos"),
    "*sep*": SpecialToken("sep"),
    "*sep+*": SpecialToken("sep", advance=True),
    "*sent_0*": Slot(0),
    "*+sent_0*": Slot(0, space=True),
    "*sent-_0*": Slot(0, drop="-"),
    "*sentl_0*": Slot(0, case="l"),
    "*+sentl_0*": Slot(0, space=True, case="l"),
    "*sentl-_0*": Slot(0, case="l", drop="-"),
    "*sentu_0*": Slot(0, case="u"),
    "*+sentu_0*": Slot(0, space=True, case="u"),
    "*+sentu-_0*": Slot(0, space=True, case="u", drop="-"),
    "*label_1*": LabelWord(1),
    "_It_was": Text(" It was"),
    "?": Text("?"),
}


@pytest.mark.parametrize(("token", "node"), TOKENS.items())
def test_star_tokens_parse_to_nodes(token: str, node: object) -> None:
    assert parse(f"*sent_0**mask*{token}", ONE, "masked") == (Slot(0), MASK, node)


def test_demonstration_tokens_refer_to_the_demonstration() -> None:
    nodes = parse("*sent_0**mask**sent_1**labelx_0*", ONE, "masked")
    assert nodes[2:] == (Slot(1), LabelWord(0, of_demo=True))


@pytest.mark.parametrize(
    ("slot", "text", "shown"),
    [
        (Slot(0), "  Hello. \n", "Hello."),
        (Slot(0, drop="-"), "Hello.", "Hello"),
        (Slot(0, drop="-"), "Hello", "Hell"),
        (Slot(0, drop="."), "Hello", "Hello"),
        (Slot(0, drop="."), "Hello.", "Hello"),
        (Slot(0, space=True, case="l", drop="-"), "Hello.", " hello"),
        (Slot(0, case="u"), "élan", "Élan"),
        (Slot(0, case="u", drop="-"), "", ""),
        (Slot(0, space=True), "", " "),
    ],
)
def test_slot_changes_its_text(slot: Slot, text: str, shown: str) -> None:
    assert slot.apply(text) == shown


@pytest.mark.parametrize(
    ("plain", "star", "columns"),
    [
        ("{text} It was [MASK].", T1, ONE),
        ("{0} It was <mask>.", T1, ONE),
        ("It was [MASK].", T1, ONE),
        ("  It was [MASK]. ", T1, ONE),
        ("This is [MASK].", T4, ONE),
        ("[MASK]: {text}", T5, ONE),
        ("{premise:-}? [MASK], {hypothesis:l}", T2, TWO),
        ("{0:.?!}? [MASK], {1:l}", "? [MASK],", TWO),
        ("[MASK],", T3, TWO),
        ("{0}[MASK], {1:l}", T3, TWO),
        ("{0} [MASK], {1:l}", T3, TWO),
        (", so [MASK].", "*cls**sent_0*,_so*mask*.*sep+*", ONE),
        ("[MASK]:", T5, ONE),
        ("[MASK] question:", "*cls**mask*_question:*+sent_0**sep+*", ONE),
        ("{sentence} It was [mask].", T1, ONE),
        ("{Text} It was {mask}.", T1, ONE),
        ("{sentence1:-}? <MASK>, {question2:l}", T2, TWO),
        ("[Review] {text} It was [MASK].", "*cls*[Review]*+sent_0*_It_was*mask*.*sep+*", ONE),
        ("{{x}} {text} [MASK]", "*cls*{x}*+sent_0**mask**sep+*", ONE),
        ("{text:u?}[MASK] *now*", None, ONE),
    ],
)
def test_plain_template_parses_like_its_star_template(plain: str, star: str | None, columns: tuple[str, ...]) -> None:
    nodes = parse(plain, columns, "masked")
    if star is None:
        assert nodes == (CLS, Slot(0, case="u", drop="?"), MASK, Text(" *now*"), SEP)
    else:
        assert nodes == parse(star, columns, "masked")


def test_causal_prompt_keeps_trailing_newlines_but_not_spaces() -> None:
    assert parse("{text} It was  ", ONE, "causal") == (Slot(0), Text(" It was"))
    assert not ends_with_space(parse("{text} because ", ONE, "causal"))
    assert ends_with_space(parse("{text} Yes or No?\n", ONE, "causal"))
    assert parse("It was", ONE, "causal") == parse("{text} It was", ONE, "causal")


INVALID = {
    ("", ONE, "masked"): "the template is empty; write one such as '{text} It was [MASK].'",
    ("{text} It was.", ONE, "masked"): (
        "the template '{text} It was.' has no mask; put [MASK] (or *mask*) where the label word goes"
    ),
    ("{text} [MASK] [MASK]", ONE, "masked"): "the template '{text} [MASK] [MASK]' has 2 masks; keep one",
    ("{text} It was [MASK].", ONE, "causal"): (
        "the template '{text} It was [MASK].' has a mask, but the task is causal; end it where the answer begins"
    ),
    ("{premise}? [MASK]", TWO, "masked"): (
        "the template '{premise}? [MASK]' has no slot for 'hypothesis'; add {hypothesis} (or *sent_1*)"
    ),
    (T1, TWO, "masked"): f"the template {T1!r} has no slot for 'hypothesis'; add {{hypothesis}} (or *sent_1*)",
    ("{txt} [MASK]", ONE, "masked"): "the template has {txt}, and the task's texts are {text}; did you mean 'text'?",
    ("{text}? [MASK], {hypothesis}", TWO, "masked"): (
        "the template has {text}, and the task's texts are {premise}, {hypothesis}"
    ),
    (
        "[TEXT] It was [MASK].",
        ONE,
        "masked",
    ): "'[TEXT]' in the template would be ordinary text; write {text} for the text",
    ("[X] It was", ONE, "causal"): "'[X]' in the template would be ordinary text; write {text} for the text",
    ("[sentence] It was [MASK].", ONE, "masked"): (
        "'[sentence]' in the template would be ordinary text; write {text} for the text"
    ),
    ("[PREMISE]? [MASK], {hypothesis}", TWO, "masked"): (
        "'[PREMISE]' in the template would be ordinary text; write {premise} for the text"
    ),
    ("[CLS] {text} It was [MASK].", ONE, "masked"): (
        "'[CLS]' in the template would be ordinary text; leave it out, it is added by itself"
    ),
    ("{text} It was [MASK].</s>", ONE, "masked"): (
        "'</s>' in the template would be ordinary text; leave it out, it is added by itself"
    ),
    ("{2} {0} {1} [MASK]", TWO, "masked"): (
        "the template '{2} {0} {1} [MASK]' has a slot 2, but the task's texts are 0 to 1 (premise, hypothesis)"
    ),
    ("*cls**sent_0**maks**sep+*", ONE, "masked"): "unknown token '*maks*' in the template; did you mean 'mask'?",
    ("*cls**sent_x**mask*", ONE, "masked"): "unknown token '*sent_x*' in the template; did you mean 'sent_0'?",
    ("{text [MASK]", ONE, "masked"): "a lone '{' in the template; write '{{' for the character itself",
    ("{text:k} [MASK]", ONE, "masked"): (
        "unknown change 'k' in '{text:k}'; use l or u (first letter), L (all letters), - or some of ?!.,;:"
    ),
    ("so [MASK]", ("a", "b", "c"), "masked"): (
        "a template without slots fits one or two texts, but the task has a, b, c; add slots"
    ),
}


@pytest.mark.parametrize(("template", "columns", "family"), INVALID)
def test_invalid_template_is_rejected_with_a_remedy(template: str, columns: tuple[str, ...], family: str) -> None:
    with pytest.raises(TaskError) as caught:
        parse(template, columns, family)
    assert str(caught.value) == INVALID[template, columns, family]


def test_template_errors_name_the_task() -> None:
    with pytest.raises(TaskError, match=r"^task 'mine': the template .* has no mask"):
        Task(name="mine", template="{text}", columns=ONE, labels=("a", "b"), words=("x", "y"))


def test_masked_demonstrations_follow_the_query_with_masks_filled() -> None:
    nodes = append_demonstrations(parse(T2, TWO, "masked"), columns=2, count=2)
    explicit = (
        T2
        + "*sent-_2*?*labelx_0*,*+sentl_3**sep+*"  # the first demonstration, without cls
        + "*sent-_4*?*labelx_1*,*+sentl_5**sep+*"
    )
    assert nodes == parse(explicit, TWO, "masked")


def test_render_without_a_tokenizer() -> None:
    for template in (T2, "? [MASK],"):
        nodes = parse(template, TWO, "masked")
        assert render(nodes, [" It rains. ", "Roads are wet."]) == "It rains? [MASK], roads are wet."
    assert render(nodes, ["It rains", "So."]) == render(nodes, ["It rains!", "So."]) == "It rains? [MASK], so."
    assert render(parse(T5, ONE, "masked"), ["Who?"]) == "[MASK]: Who?"
