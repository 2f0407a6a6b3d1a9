"""Tokenizers of every family, trained here on a few made-up sentences."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mezzo.tasks import list_tasks

ROBERTA = {
    "bos_token": "<s>",
    "cls_token": "<s>",
    "sep_token": "</s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}
BERT = {
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "mask_token": "[MASK]",
}


def corpus() -> list[str]:
    words = sorted({word for task in list_tasks() for word in task.words})
    common = [
        "a",
        "the",
        "it",
        "It",
        "was",
        "is",
        "not",
        "film",
        "movie",
        "man",
        "and",
        "of",
        "on",
        "in",
        "to",
        "This",
        "very",
    ]
    lines = []
    for i in range(600):
        lines.append(" ".join((words + common)[(i * 7 + j * (i % 11 + 3)) % len(words + common)] for j in range(10)))
    punctuation = 'He said: "no, (yes)!" ? . , ; : - \' 0 1 2 3 4 5 6 7 8 9 A B C D x y z Q'
    variants = [f"{word}s {word}ly {word}ness" for word in words]  # Unigram learns what several words share
    return [line + " ." for line in lines] + [punctuation] * 20 + variants


def _specials(names: dict[str, str]) -> list[str]:
    return list(dict.fromkeys(names.values()))


def byte_level(add_prefix_space: bool = False, **options: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=_specials(ROBERTA),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{**ROBERTA, **options})


def unigram(**options: Any) -> PreTrainedTokenizerFast:
    """As in XLM-R, T5 or ALBERT: the special tokens are pieces of the model itself."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400,
        special_tokens=_specials(ROBERTA),
        unk_token="<unk>",
        initial_alphabet=list("<>/[]"),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{**ROBERTA, **options})


def sentencepiece_bpe(**options: Any) -> PreTrainedTokenizerFast:
    """As in Llama 2: a mark is put before the text by the normalizer, and unknown characters become bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=1200, special_tokens=[*_specials(ROBERTA), *alphabet], show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.pre_tokenizer = None
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    fast = json.loads(tokenizer.to_str())
    fast["added_tokens"] = [token for token in fast["added_tokens"] if token["content"] not in alphabet]
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(fast)), **{**ROBERTA, **options})


def wordpiece(**options: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=700, special_tokens=_specials(BERT), show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{**BERT, **options})


def causal(**options: Any) -> PreTrainedTokenizerFast:
    """As in OPT: byte-level, no mask, and a BOS token that the tokenizer adds by itself."""
    made = byte_level(mask_token=None, cls_token=None, sep_token=None, **options)
    bos = ("<s>", made.convert_tokens_to_ids("<s>"))
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    return made


MAKERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte-level": byte_level,
    "byte-level, prefix space": lambda: byte_level(add_prefix_space=True),
    "unigram": unigram,
    "sentencepiece bpe": sentencepiece_bpe,
    "wordpiece": wordpiece,
}


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    """One tokenizer per family, of masked language models."""
    return {name: make() for name, make in MAKERS.items()}


@pytest.fixture(scope="session", params=list(MAKERS))
def tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, PreTrainedTokenizerFast]) -> Any:
    return tokenizers[request.param]


@pytest.fixture(scope="session")
def make() -> SimpleNamespace:
    """The makers themselves, for tokenizers with other special tokens."""
    return SimpleNamespace(byte_level=byte_level, unigram=unigram, wordpiece=wordpiece)


@pytest.fixture(scope="session")
def roberta(tokenizers: dict[str, PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    return tokenizers["byte-level"]


@pytest.fixture(scope="session")
def opt() -> PreTrainedTokenizerFast:
    return causal()
