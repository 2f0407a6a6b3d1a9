"""The tasks that come with mezzo, as data. A new task is one entry here and nothing else."""

from __future__ import annotations

from typing import Any

T1 = "*cls**sent_0*_It_was*mask*.*sep+*"
T1_FELT = "*cls**sent_0*_I*mask*_it!*sep+*"
T2 = "*cls**sent-_0*?*mask*,*+sentl_1**sep+*"
T3 = "*cls**sent_0**mask*,*+sentl_1**sep+*"
T4 = "*cls**sent_0*_This_is*mask*.*sep+*"
T5 = "*cls**mask*:*+sent_0**sep+*"

Fields = dict[str, Any]


def _masked(
    columns: tuple[str, ...], template: str, labels: tuple[str, ...], words: tuple[str, ...], **others: Any
) -> Fields:
    """A task whose labels are in the id order of LM-BFF's files; `hub` is that of the Hugging Face hub, if it differs."""
    orders = {"hub": others.pop("hub", labels), "lm-bff": labels}
    return {"columns": columns, "template": template, "labels": labels, "words": words, "id_orders": orders, **others}


_POLARITY = ("negative", "positive")
_DEGREES = ("very negative", "negative", "neutral", "positive", "very positive")
_NLI = ("contradiction", "entailment", "neutral")
_RTE = ("entailment", "not_entailment")
_SAME = ("not_duplicate", "duplicate")
_TREC = ("description", "entity", "expression", "human", "location", "number")
_TEXT = ("text",)
_PAIR = ("premise", "hypothesis")

_SENTIMENT_ALIASES = {"neg": "negative", "pos": "positive"}
_SENTIMENT = _masked(_TEXT, T1, _POLARITY, ("terrible", "great"), label_aliases=_SENTIMENT_ALIASES)
_NLI_HUB = ("entailment", "neutral", "contradiction")
_ENTAIL_3 = _masked(_PAIR, T2, _NLI, ("No", "Yes", "Maybe"), hub=_NLI_HUB, max_length=256)
_ENTAIL_2 = _masked(_PAIR, T2, _RTE, ("Yes", "No"), max_length=256)
_SAME_ALIASES = {"not_equivalent": "not_duplicate", "equivalent": "duplicate"}
_PARAPHRASE = _masked((), T3, _SAME, ("No", "Yes"), metric="f1", label_aliases=_SAME_ALIASES)
_FACT: Fields = {"premise": "A man is playing a guitar on stage.", "hypothesis": "Someone is making music."}

MASKED: dict[str, Fields] = {
    "sst-2": {**_SENTIMENT, "sample": {"text": "a warm and witty little film ."}},
    "mr": {**_SENTIMENT, "sample": {"text": "the jokes arrive late and leave early ."}},
    "cr": {**_SENTIMENT, "sample": {"text": "the battery lasts for two full days ."}},
    "mpqa": {**_SENTIMENT, "sample": {"text": "welcomed the decision"}},
    "sst-5": _masked(
        _TEXT,
        T1,
        _DEGREES,
        ("terrible", "bad", "okay", "good", "great"),
        sample={"text": "pleasant enough , and soon forgotten ."},
    ),
    "subj": _masked(
        _TEXT,
        T4,
        ("subjective", "objective"),
        ("subjective", "objective"),
        hub=("objective", "subjective"),
        sample={"text": "two brothers return to their village ."},
    ),
    "cola": _masked(
        _TEXT,
        T4,
        ("unacceptable", "acceptable"),
        ("incorrect", "correct"),
        metric="matthews",
        layout=("", "label", "", "text"),
        sample={"text": "The keys was left on the table."},
    ),
    "trec": _masked(
        _TEXT,
        T5,
        _TREC,
        ("Description", "Entity", "Expression", "Human", "Location", "Number"),
        hub=("expression", "entity", "description", "human", "location", "number"),
        label_aliases={
            "desc": "description",
            "enty": "entity",
            "abbr": "expression",
            "abbreviation": "expression",
            "hum": "human",
            "loc": "location",
            "num": "number",
            "numeric": "number",
        },
        sample={"text": "Which river runs through Vienna ?"},
    ),
    "mnli": {**_ENTAIL_3, "sample": _FACT},
    "snli": {**_ENTAIL_3, "sample": _FACT},
    "qnli": {
        **_ENTAIL_2,
        "columns": ("question", "sentence"),
        "sample": {"question": "Where do puffins nest?", "sentence": "Puffins nest in burrows on sea cliffs."},
    },
    "rte": {**_ENTAIL_2, "sample": _FACT},
    "mrpc": {
        **_PARAPHRASE,
        "columns": ("sentence1", "sentence2"),
        "column_aliases": {"label": ("quality",)},
        "sample": {"sentence1": "The bridge opened on Monday.", "sentence2": "On Monday the bridge was opened."},
    },
    "qqp": {
        **_PARAPHRASE,
        "columns": ("question1", "question2"),
        "sample": {"question1": "How do I learn to swim?", "question2": "What is the best way to learn swimming?"},
    },
    "reviews": {
        **_SENTIMENT,
        "template": T1_FELT,
        "words": ("hated", "loved"),
        "sample": {"text": "A patient, generous film with a quiet ending."},
    },
    "pairs": {**_ENTAIL_3, "sample": _FACT},
}

_CAUSAL: Fields = {"family": "causal", "max_length": 2048}
_FALSE_TRUE: Fields = {
    **_CAUSAL,
    "labels": ("false", "true"),
    "words": ("No", "Yes"),
    "label_aliases": {"no": "false", "yes": "true"},
    "id_orders": {"hub": ("false", "true")},
}
_QUESTION: Fields = {**_CAUSAL, "kind": "generation", "metric": "f1", "label_column": "answers", "answer_end": "\n"}

CAUSAL: dict[str, Fields] = {
    **{
        name: {**MASKED[name], **_CAUSAL, "template": "{text} It was"}
        for name in ("sst-2", "sst-5", "mr", "cr", "mpqa")
    },
    "trec": {**MASKED["trec"], **_CAUSAL, "template": "Question: {text}\nAnswer type:"},
    "reviews": {**MASKED["reviews"], **_CAUSAL, "template": "{text} It was", "words": ("terrible", "great")},
    "rte": {
        **MASKED["rte"],
        **_CAUSAL,
        "template": '{premise}\nDoes this mean that "{hypothesis}" is true? Yes or No?\n',
    },
    "cb": {
        **_CAUSAL,
        "columns": _PAIR,
        "template": 'Suppose {premise} Can we infer that "{hypothesis}"? Yes, No, or Maybe?\n',
        "labels": ("entailment", "contradiction", "neutral"),
        "words": ("Yes", "No", "Maybe"),
        "id_orders": {"hub": ("entailment", "contradiction", "neutral")},
        "sample": {"premise": "I doubt that they sold the boat.", "hypothesis": "they sold the boat"},
    },
    "boolq": {
        **_FALSE_TRUE,
        "columns": ("passage", "question"),
        "template": "{passage} {question:?}?\n",
        "labels": ("true", "false"),
        "words": ("Yes", "No"),
        "column_aliases": {"label": ("answer",)},
        "sample": {"passage": "Basalt is a rock formed from cooled lava.", "question": "is basalt a volcanic rock"},
    },
    "wsc": {
        **_FALSE_TRUE,
        "columns": ("text", "span2", "span1"),
        "template": '{text}\nIn the previous sentence, does the pronoun "{span2}" refer to {span1}? Yes or No?\n',
        "column_aliases": {span: (f"{span}_text", f"target.{span}_text") for span in ("span1", "span2")},
        "sample": {"text": "The cup fell off the shelf because it was wet.", "span1": "The cup", "span2": "it"},
    },
    "wic": {
        **_FALSE_TRUE,
        "columns": ("word", "sentence1", "sentence2"),
        "template": (
            'Does the word "{word}" have the same meaning in these two sentences? Yes, No?\n{sentence1}\n{sentence2}\n'
        ),
        "sample": {"word": "bank", "sentence1": "We sat on the bank.", "sentence2": "The bank was closed."},
    },
    "multirc": {
        **_FALSE_TRUE,
        "columns": ("paragraph", "question", "answer"),
        "template": '{paragraph}\nQuestion: {question}\nI found this answer "{answer}". Is that correct? Yes or No?\n',
        "column_aliases": {"paragraph": ("passage", "passage.text")},
        "sample": {"paragraph": "Mia fed the goats at noon.", "question": "Who fed the goats?", "answer": "Mia"},
    },
    "copa": {
        **_CAUSAL,
        "kind": "choice",
        "columns": ("premise", "question"),
        "template": "{premise:.} {question} ",
        "rewrite": {"question": {"cause": "because", "effect": "so"}},
        "candidates": ("choice1", "choice2"),
        "lower_candidates": True,
        "sample": {
            "premise": "The pavement was wet.",
            "question": "cause",
            "choice1": "It had rained.",
            "choice2": "It was noon.",
        },
    },
    "record": {
        **_CAUSAL,
        "kind": "choice",
        "columns": ("passage",),
        "template": "{passage}\n-",
        "rewrite": {"passage": {"@highlight\n": "- "}},
        "candidates": ("entities",),
        "fill": ("query", "@placeholder"),
        "label_column": "answers",
        "sample": {
            "passage": "Vienna lies on the Danube.\n@highlight\nThe city is old",
            "query": "The river runs through @placeholder",
            "entities": ["Vienna", "Danube"],
        },
    },
    "squad": {
        **_QUESTION,
        "columns": ("title", "context", "question"),
        "template": "Title: {title}\nContext: {context}\nQuestion: {question}\nAnswer:",
        "sample": {
            "title": "Puffin",
            "context": "Puffins nest in burrows.",
            "question": "Where do puffins nest?",
            "answers": ["in burrows"],
        },
    },
    "drop": {
        **_QUESTION,
        "columns": ("passage", "question"),
        "template": "Passage: {passage}\nQuestion: {question}\nAnswer:",
        "column_aliases": {"passage": ("context",), "answers": ("answers_spans",)},
        "sample": {
            "passage": "Mia had 3 goats and bought 2 more.",
            "question": "How many goats has Mia now?",
            "answers": ["5"],
        },
    },
}
