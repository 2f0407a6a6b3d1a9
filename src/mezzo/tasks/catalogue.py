"""The tasks that come with mezzo, as data. A new task is one entry here and nothing else.

An entry holds what both families of models share, and under `masked` and `causal` what they do not: a template, or a table of
fields. A family that an entry does not name does not have the task.
"""

from __future__ import annotations

from typing import Any

from mezzo.tasks.banking_intents import BANKING_INTENTS

Fields = dict[str, Any]

# Fields of every task of a family, unless its entry says otherwise.
DEFAULTS: dict[str, Fields] = {"masked": {}, "causal": {"max_length": 2048}}

T1 = "*cls**sent_0*_It_was*mask*.*sep+*"
T1_FELT = "*cls**sent_0*_I*mask*_it!*sep+*"
T2 = "*cls**sent-_0*?*mask*,*+sentl_1**sep+*"
T3 = "*cls**sent_0**mask*,*+sentl_1**sep+*"
T4 = "*cls**sent_0*_This_is*mask*.*sep+*"
T5 = "*cls**mask*:*+sent_0**sep+*"


def _classes(word_of: dict[str, str], hub: tuple[str, ...] = (), lm_bff: bool = True) -> Fields:
    """Labels with their words, in the id order of LM-BFF's files; `hub` is that of the Hugging Face hub, if it differs."""
    labels = tuple(word_of)
    orders = {"hub": hub or labels, **({"lm-bff": labels} if lm_bff else {})}
    return {"labels": labels, "words": tuple(word_of.values()), "id_orders": orders}


def _long(template: str, **limits: int) -> Fields:
    return {"template": template, "max_length": 256, **limits}


def _short(template: str, **limits: int) -> Fields:
    """As published: the first text has at most 110 tokens."""
    return {"template": template, "first_limit": 110, **limits}


_TEXT: Fields = {"columns": ("text",)}
_PAIR: Fields = {"columns": ("premise", "hypothesis")}
_FACT = {"premise": "A man is playing a guitar on stage.", "hypothesis": "Someone is making music."}

_SENTIMENT: Fields = {
    **_TEXT,
    **_classes({"negative": "terrible", "positive": "great"}),
    "label_aliases": {"neg": "negative", "pos": "positive"},
    "masked": T1,
    "causal": "{text} It was",
}
_INFER = 'Suppose {premise} Can we infer that "{hypothesis}"? Yes, No, or Maybe?\n'
_ENTAIL_3: Fields = {
    **_PAIR,
    **_classes(
        {"contradiction": "No", "entailment": "Yes", "neutral": "Maybe"}, hub=("entailment", "neutral", "contradiction")
    ),
    "masked": _long(T2),
    "causal": _INFER,
}
_ENTAIL_2 = _classes({"entailment": "Yes", "not_entailment": "No"})
_PARAPHRASE: Fields = {
    **_classes({"not_duplicate": "No", "duplicate": "Yes"}),
    "label_aliases": {"not_equivalent": "not_duplicate", "equivalent": "duplicate"},
    "metric": "f1",
    "masked": T3,
}
_FALSE_TRUE: Fields = {
    **_classes({"false": "No", "true": "Yes"}, lm_bff=False),
    "label_aliases": {"no": "false", "yes": "true"},
}
_QUESTION: Fields = {"kind": "generation", "metric": "f1", "label_column": "answers", "answer_end": "\n"}

_TOPICS = {"world": "world", "sports": "sports", "business": "business", "sci/tech": "technology"}

TASKS: dict[str, Fields] = {
    # --- one text
    "sst-2": {**_SENTIMENT, "sample": {"text": "a warm and witty little film ."}},
    "sst-5": {
        **_SENTIMENT,
        **_classes(
            {
                "very negative": "terrible",
                "negative": "bad",
                "neutral": "okay",
                "positive": "good",
                "very positive": "great",
            }
        ),
        "masked": _short(T1, other_limit=20),
        "sample": {"text": "pleasant enough , and soon forgotten ."},
    },
    "mr": {
        **_SENTIMENT,
        "encoding": "windows-1252",
        "masked": _short(T1, other_limit=50),
        "sample": {"text": "the jokes arrive late and leave early ."},
    },
    "cr": {
        **_SENTIMENT,
        "encoding": "latin-1",
        "masked": _short(T1, other_limit=50),
        "sample": {"text": "the battery lasts for two full days ."},
    },
    "mpqa": {
        **_SENTIMENT,
        "encoding": "latin-1",
        "masked": _short(T1),
        "sample": {"text": "welcomed the decision"},
    },
    "reviews": {
        **_SENTIMENT,
        "masked": {"template": T1_FELT, "words": ("hated", "loved")},
        "sample": {"text": "A patient, generous film with a quiet ending."},
    },
    "questions": {
        **_TEXT,
        **_classes(
            {kind: kind for kind in ("person", "place", "number", "time", "reason", "way", "meaning", "thing")},
            lm_bff=False,
        ),
        "masked": "The [MASK]: {text}",
        "causal": "Question: {text}\nThe answer is a",
        "sample": {"text": "Who taught you to whistle like that?"},
    },
    "subj": {
        **_TEXT,
        **_classes({"subjective": "subjective", "objective": "objective"}, hub=("objective", "subjective")),
        "label_aliases": {"quote": "subjective", "plot": "objective"},  # how its files are called
        "encoding": "latin-1",
        "masked": _short(T4, other_limit=50),
        "causal": "{text} This is",
        "sample": {"text": "two brothers return to their village ."},
    },
    "cola": {
        **_TEXT,
        **_classes({"unacceptable": "incorrect", "acceptable": "correct"}),
        "metric": "matthews",
        "layout": ("", "label", "", "text"),
        "masked": T4,
        "causal": "{text} This is",
        "sample": {"text": "The keys was left on the table."},
    },
    "trec": {
        **_TEXT,
        **_classes(
            {word.lower(): word for word in ("Description", "Entity", "Expression", "Human", "Location", "Number")},
            hub=("expression", "entity", "description", "human", "location", "number"),
        ),
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
        "encoding": "latin-1",
        "masked": _short(T5),
        "causal": {
            "template": "Question: {text}\nAnswer type:",
            # In lower case they are single tokens for many more models.
            "words": ("description", "thing", "expression", "human", "location", "number"),
        },
        "sample": {"text": "Which river runs through Vienna ?"},
    },
    "ag-news": {
        **_TEXT,
        **_classes(_TOPICS),
        "id_orders": {"hub": tuple(_TOPICS), "csv": ("", *_TOPICS)},  # the csv files count from 1
        "layout": ("label", "title", "text"),
        "column_aliases": {"label": ("class index",), "text": ("description",)},
        "masked": "{text} This news is about [MASK].",
        "causal": "{text} This news is about",
        "sample": {"text": "The central bank left interest rates unchanged on Thursday."},
    },
    "emotion": {
        **_TEXT,
        **_classes(
            {
                "sadness": "sad",
                "joy": "happy",
                "love": "loving",
                "anger": "angry",
                "fear": "afraid",
                "surprise": "surprised",
            },
            lm_bff=False,
        ),
        "column_aliases": {"label": ("emotion",)},
        "masked": "{text} I felt [MASK].",
        "causal": "{text} I felt",
        "sample": {"text": "i can go back to the garden and everything is quiet"},
    },
    "banking77": {
        **_TEXT,
        **_classes(BANKING_INTENTS, lm_bff=False),
        "column_aliases": {"label": ("category", "intent")},
        "masked": "{text} This is about [MASK].",
        "causal": "{text} This is about",
        "sample": {"text": "My card was charged two times for one ticket."},
    },
    # --- several texts
    "mnli": {**_ENTAIL_3, "masked": _long(T2, first_limit=240), "sample": _FACT},
    "snli": {**_ENTAIL_3, "sample": _FACT},
    "pairs": {**_ENTAIL_3, "sample": _FACT},
    "cb": {
        **_PAIR,
        **_classes({"entailment": "Yes", "contradiction": "No", "neutral": "Maybe"}, lm_bff=False),
        "masked": _long(T2),
        "causal": _INFER,
        "sample": {"premise": "I doubt that they sold the boat.", "hypothesis": "they sold the boat"},
    },
    "rte": {
        **_PAIR,
        **_ENTAIL_2,
        "masked": _long(T2, first_limit=240),
        "causal": '{premise}\nDoes this mean that "{hypothesis}" is true? Yes or No?\n',
        "sample": _FACT,
    },
    "qnli": {
        **_ENTAIL_2,
        "columns": ("question", "sentence"),
        "masked": _long(T2),
        "causal": '{sentence}\nDoes this answer the question "{question}"? Yes or No?\n',
        "sample": {"question": "Where do puffins nest?", "sentence": "Puffins nest in burrows on sea cliffs."},
    },
    "mrpc": {
        **_PARAPHRASE,
        "columns": ("sentence1", "sentence2"),
        "column_aliases": {"label": ("quality",)},
        "causal": "{sentence1}\n{sentence2}\nDo these two sentences mean the same? Yes or No?\n",
        "sample": {"sentence1": "The bridge opened on Monday.", "sentence2": "On Monday the bridge was opened."},
    },
    "qqp": {
        **_PARAPHRASE,
        "columns": ("question1", "question2"),
        "causal": "{question1}\n{question2}\nDo these two questions ask the same? Yes or No?\n",
        "sample": {"question1": "How do I learn to swim?", "question2": "What is the best way to learn swimming?"},
    },
    "boolq": {
        **_classes({"true": "Yes", "false": "No"}, hub=("false", "true"), lm_bff=False),
        "columns": ("passage", "question"),
        "label_aliases": _FALSE_TRUE["label_aliases"],
        "column_aliases": {"label": ("answer",)},
        "masked": _long("{passage} {question:u?}? [MASK]."),
        "causal": "{passage} {question:u?}?\n",
        "sample": {"passage": "Basalt is a rock formed from cooled lava.", "question": "is basalt a volcanic rock"},
    },
    "wsc": {
        **_FALSE_TRUE,
        "columns": ("text", "span2", "span1"),
        "column_aliases": {span: (f"{span}_text", f"target.{span}_text") for span in ("span1", "span2")},
        "masked": '{text} Does "{span2:L}" refer to {span1}? [MASK].',
        "causal": '{text}\nIn the previous sentence, does the pronoun "{span2:L}" refer to {span1}? Yes or No?\n',
        "sample": {"text": "The cup fell off the shelf because it was wet.", "span1": "The cup", "span2": "it"},
    },
    "wic": {
        **_FALSE_TRUE,
        "columns": ("word", "sentence1", "sentence2"),
        "masked": '{sentence1} {sentence2} Does "{word}" have the same meaning? [MASK].',
        "causal": (
            'Does the word "{word}" have the same meaning in these two sentences? Yes, No?\n{sentence1}\n{sentence2}\n'
        ),
        "sample": {"word": "bank", "sentence1": "We sat on the bank.", "sentence2": "The bank was closed."},
    },
    "multirc": {
        **_FALSE_TRUE,
        "columns": ("paragraph", "question", "answer"),
        "column_aliases": {"paragraph": ("passage", "passage.text")},
        "masked": _long('{paragraph} {question} Is "{answer}" correct? [MASK].'),
        "causal": '{paragraph}\nQuestion: {question}\nI found this answer "{answer}". Is that correct? Yes or No?\n',
        "sample": {"paragraph": "Mia fed the goats at noon.", "question": "Who fed the goats?", "answer": "Mia"},
    },
    # --- candidates in the row
    "copa": {
        "kind": "choice",
        "columns": ("premise", "question"),
        "causal": "{premise:.} {question} ",
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
        "kind": "choice",
        "columns": ("passage",),
        "causal": "{passage}\n-",
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
        "causal": "Title: {title}\nContext: {context}\nQuestion: {question}\nAnswer:",
        "sample": {
            "title": "Puffin",
            "context": "Puffins nest in burrows.",
            "question": "Where do puffins nest?",
            "answers": ["in burrows"],
        },
    },
    "prompts": {
        **_QUESTION,
        "columns": ("prompt",),
        "causal": "{prompt}",
        "sample": {"prompt": "Once upon a time", "answers": ["there was a king"]},
    },
    "countdown": {
        **_QUESTION,
        "metric": "countdown",
        "columns": ("numbers", "target"),
        "causal": (
            "Write an expression that equals {target}. Use each of the numbers {numbers} exactly once, with + - * / and "
            "parentheses. Answer with the expression alone.\nExpression:"
        ),
        "sample": {"numbers": "3 7 5", "target": "26", "answers": ["3 * 7 + 5"]},
    },
    "drop": {
        **_QUESTION,
        "columns": ("passage", "question"),
        "causal": "Passage: {passage}\nQuestion: {question}\nAnswer:",
        "column_aliases": {"passage": ("context",), "answers": ("answers_spans",)},
        "sample": {
            "passage": "Mia had 3 goats and bought 2 more.",
            "question": "How many goats has Mia now?",
            "answers": ["5"],
        },
    },
}
