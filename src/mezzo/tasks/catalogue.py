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


def _id_orders(hub: tuple[str, ...], lm_bff: tuple[str, ...] | None = None) -> Fields:
    """Id orders of the Hugging Face hub and of LM-BFF's files; one order when both agree."""
    return {"id_orders": {"hub": hub, "lm-bff": lm_bff or hub}}


_POLARITY = ("negative", "positive")
_DEGREES = ("very negative", "negative", "neutral", "positive", "very positive")
_NLI = ("contradiction", "entailment", "neutral")
_RTE = ("entailment", "not_entailment")
_SAME = ("not_duplicate", "duplicate")
_TREC = ("description", "entity", "expression", "human", "location", "number")
_TREC_HUB = ("expression", "entity", "description", "human", "location", "number")

_SENTENCE: Fields = {"columns": ("text",), "max_length": 128}
_PAIR: Fields = {"columns": ("premise", "hypothesis"), "max_length": 256}
_SENTIMENT: Fields = {
    **_SENTENCE,
    "template": T1,
    "labels": _POLARITY,
    "words": ("terrible", "great"),
    "label_aliases": {"neg": "negative", "pos": "positive"},
    **_id_orders(_POLARITY),
}
_ENTAIL_3: Fields = {
    **_PAIR,
    "template": T2,
    "labels": _NLI,
    "words": ("No", "Yes", "Maybe"),
    **_id_orders(("entailment", "neutral", "contradiction"), _NLI),
}
_ENTAIL_2: Fields = {**_PAIR, "template": T2, "labels": _RTE, "words": ("Yes", "No"), **_id_orders(_RTE)}
_PARAPHRASE: Fields = {
    "template": T3,
    "labels": _SAME,
    "words": ("No", "Yes"),
    "metric": "f1",
    "max_length": 128,
    "label_aliases": {"not_equivalent": "not_duplicate", "equivalent": "duplicate"},
    **_id_orders(_SAME),
}
_FACT: Fields = {"premise": "A man is playing a guitar on stage.", "hypothesis": "Someone is making music."}

MASKED: dict[str, Fields] = {
    "sst-2": {**_SENTIMENT, "sample": {"text": "a warm and witty little film ."}},
    "mr": {**_SENTIMENT, "sample": {"text": "the jokes arrive late and leave early ."}},
    "cr": {**_SENTIMENT, "sample": {"text": "the battery lasts for two full days ."}},
    "mpqa": {**_SENTIMENT, "sample": {"text": "welcomed the decision"}},
    "sst-5": {
        **_SENTENCE,
        "template": T1,
        "labels": _DEGREES,
        "words": ("terrible", "bad", "okay", "good", "great"),
        **_id_orders(_DEGREES),
        "sample": {"text": "pleasant enough , and soon forgotten ."},
    },
    "subj": {
        **_SENTENCE,
        "template": T4,
        "labels": ("subjective", "objective"),
        "words": ("subjective", "objective"),
        **_id_orders(("objective", "subjective"), ("subjective", "objective")),
        "sample": {"text": "two brothers return to their village ."},
    },
    "cola": {
        **_SENTENCE,
        "template": T4,
        "labels": ("unacceptable", "acceptable"),
        "words": ("incorrect", "correct"),
        "metric": "matthews",
        "layout": ("", "label", "", "text"),
        **_id_orders(("unacceptable", "acceptable")),
        "sample": {"text": "The keys was left on the table."},
    },
    "trec": {
        **_SENTENCE,
        "template": T5,
        "labels": _TREC,
        "words": ("Description", "Entity", "Expression", "Human", "Location", "Number"),
        "label_aliases": {
            "desc": "description",
            "enty": "entity",
            "abbr": "expression",
            "abbreviation": "expression",
            "hum": "human",
            "loc": "location",
            "num": "number",
            "numeric": "number",
        },
        **_id_orders(_TREC_HUB, _TREC),
        "sample": {"text": "Which river runs through Vienna ?"},
    },
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
    "sst-2": {**MASKED["sst-2"], **_CAUSAL, "template": "{text} It was"},
    "reviews": {**MASKED["reviews"], **_CAUSAL, "template": "{text} It was", "words": ("terrible", "great")},
    "rte": {
        **MASKED["rte"],
        **_CAUSAL,
        "template": '{premise}\nDoes this mean that "{hypothesis}" is true? Yes or No?\n',
    },
    "cb": {
        **_CAUSAL,
        "columns": ("premise", "hypothesis"),
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
        "column_aliases": {
            "span1": ("span1_text", "target.span1_text"),
            "span2": ("span2_text", "target.span2_text"),
        },
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
