"""Text for pre-training: read documents, split and restyle sentences, and sample training rows on the device."""

import gzip
import lzma
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from itertools import chain, islice, pairwise
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path
from typing import IO

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

OPENERS: dict[str, Callable[..., IO[str]]] = {".xz": lzma.open, ".gz": gzip.open}
_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!\b[A-Z]\.)(?<!Mr\.)(?<!Dr\.)(?<!Mrs\.)[\"')]*\s+(?=[\"'(]?[A-Z0-9])")
_WORD = re.compile(r" ?[^ ]+")
_TREEBANK = [
    (re.compile(r'"([^"]*)"'), r"`` \1 ''"),
    (re.compile(r"(\w)(n't)\b"), r"\1 \2"),
    (re.compile(r"(?<=\w)('(?:s|re|ve|ll|d|m)\b)"), r" \1"),
    (re.compile(r"\.{2,}"), " ... "),
    (re.compile(r"-{2,}"), " -- "),
    (re.compile(r"[;!?()\[\]]|[,:](?!\d)"), r" \g<0> "),
    (re.compile(r"(?<!\.)\.(?=[\s')\"]*$)"), " ."),
]
# Opinion words about films. Predicting one of them requires understanding the writer's opinion, so these words, and short
# sentences that contain one, are sampled more often than they occur.
FOCUS_WORDS = (  # noqa: SIM905
    "great terrible good bad okay awful wonderful excellent horrible boring amazing brilliant best worst perfect poor "
    "stupid fantastic beautiful dull funny fun superb ridiculous lame pathetic disappointing entertaining enjoyable "
    "nice fine decent mediocre weak strong interesting hilarious annoying silly predictable powerful impressive "
    "memorable charming moving touching ugly cheap crap waste masterpiece garbage loved hated favorite solid "
    "outstanding incredible painful awesome lovely clever dumb slow disappointed unfortunately recommend avoid worth "
    "classic mess fails worse better exciting intelligent original refreshing delightful bland laughable tedious "
    "pointless ok magnificent engaging compelling enjoyed"
).split()


def read_documents(path: Path, limit: int | None = None) -> list[str]:
    """The non-empty lines of a text file, plain or compressed."""
    with OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
        return list(islice((line.strip() for line in file if line.strip()), limit))


def sentences(document: str) -> list[str]:
    """Split a document into sentences; joined with spaces they give the document, except for its spacing."""
    cuts = [0, *(match.end() for match in _SENTENCE_END.finditer(document)), len(document)]
    return [sentence for a, b in pairwise(cuts) if (sentence := " ".join(document[a:b].split()))]


def treebank_form(sentence: str) -> str:
    """The sentence as written in SST-2: lower case, spaces around punctuation, `n't` and `'s` split off."""
    for pattern, replacement in _TREEBANK:
        sentence = pattern.sub(replacement, sentence)
    return " ".join(sentence.lower().split())


class _Words(dict[str, list[int]]):
    """Word → token ids. Byte-level BPE never merges across a space, so each distinct word is encoded once."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    def __missing__(self, word: str) -> list[int]:
        self[word] = self.tokenizer.encode(word, add_special_tokens=False).ids
        return self[word]


def _encode(
    documents: list[tuple[int, str]], tokenizer_json: str
) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """Encode numbered documents: tokens and sentence lengths in both forms, and the sentence count of each document."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.encode_special_tokens = True  # a "<mask>" in the text is text
    split = [sentences(document) for _, document in documents]
    # One document in 32 has a line break after each sentence, so that the line-break token is trained.
    plain = [
        f"{s}\n" if i % 32 == 0 else f" {s}" for (i, _), parts in zip(documents, split, strict=True) for s in parts
    ]
    treebank = [f" {treebank_form(s)}" for parts in split for s in parts]
    tokens, lengths = [], []
    words = _Words(tokenizer)
    for form in (plain, treebank):
        ids = [[t for word in _WORD.findall(sentence) for t in words[word]] for sentence in form]
        tokens.append(np.fromiter(chain.from_iterable(ids), dtype=np.int16))
        lengths.append(np.fromiter(map(len, ids), dtype=np.int64))
    return tokens, lengths, np.fromiter(map(len, split), dtype=np.int64)


@dataclass(frozen=True)
class Corpus:
    """Tokenised text in two forms (plain, treebank) with sentence and document bounds, on the training device."""

    tokens: Tensor  # int16: the plain form, then the treebank form
    start: Tensor  # (2, sentences + 1): where each sentence starts in `tokens`, by form
    first: Tensor  # per sentence: the first sentence of its document
    last: Tensor  # per sentence: one past the last sentence of its document
    focus: Tensor  # per token id: whether it is a focus word
    focus_sentences: Tensor  # short sentences with a focus word that do not begin their document
    focus_weights: Tensor  # their cumulative sampling weights
    bare: Tensor  # token of " word" → token of "word", where both exist

    @property
    def plain_tokens(self) -> int:
        return int(self.start[0, -1])

    def to(self, device: torch.device) -> "Corpus":
        return Corpus(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def build_corpus(
    documents: list[str], tokenizer: Tokenizer, *, end: Sequence[int] = (), balance: float = 0.7
) -> Corpus:
    """Tokenise documents on all cores.

    `end`: tokens appended to each document. `balance`: how much rare focus words are favoured, from 0 (not at all) to
    1 (all focus words equally frequent).
    """
    numbered, size = list(enumerate(documents)), 2000
    chunks = [numbered[i : i + size] for i in range(0, len(numbered), size)]
    json = tokenizer.to_str()
    if len(chunks) > 1:
        # Fork where possible: a spawned process would import torch and transformers again.
        context = get_context("fork" if "fork" in get_all_start_methods() else None)
        with ProcessPoolExecutor(min(os.cpu_count() or 1, len(chunks)), mp_context=context) as pool:
            parts = list(pool.map(_encode, chunks, [json] * len(chunks)))
    else:
        parts = [_encode(chunk, json) for chunk in chunks]
    counts = np.concatenate([part[2] for part in parts])
    last = np.cumsum(counts)
    streams: list[np.ndarray] = []
    starts: list[np.ndarray] = []
    for form in (0, 1):
        tokens = np.concatenate([part[0][form] for part in parts])
        lengths = np.concatenate([part[1][form] for part in parts])
        if end:
            tokens = np.insert(tokens, np.repeat(np.cumsum(lengths)[last - 1], len(end)), np.tile(end, len(last)))
            lengths[last - 1] += len(end)
        starts.append(np.concatenate([[0], np.cumsum(lengths)]) + (starts[0][-1] if starts else 0))
        streams.append(tokens)
    first_of = np.repeat(last - counts, counts)
    focus, chosen, weights = _focus(streams[0], starts[0], first_of, tokenizer, balance)
    arrays = {
        "tokens": np.concatenate(streams),
        "start": np.stack(starts),
        "first": first_of,
        "last": np.repeat(last, counts),
        "focus": focus,
        "focus_sentences": chosen,
        "focus_weights": np.cumsum(weights),
        "bare": _bare(tokenizer),
    }
    return Corpus(**{name: torch.from_numpy(array) for name, array in arrays.items()})


def _focus(
    tokens: np.ndarray, start: np.ndarray, first: np.ndarray, tokenizer: Tokenizer, balance: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which ids are focus words; the short sentences that contain one; and their weights, by their rarest focus word."""
    encoded = [tokenizer.encode(f" {word}", add_special_tokens=False).ids for word in FOCUS_WORDS]
    focus = np.zeros(tokenizer.get_vocab_size(), dtype=bool)
    focus[[ids[0] for ids in encoded if len(ids) == 1]] = True
    where = np.flatnonzero(focus[tokens])
    sentence = np.searchsorted(start, where, side="right") - 1
    rarity = np.bincount(tokens, minlength=len(focus)).clip(1).astype(float) ** -balance
    weights = np.zeros(len(first))
    np.maximum.at(weights, sentence, rarity[tokens[where]])
    weights[(np.diff(start) > 40) | (first == np.arange(len(first)))] = 0
    chosen = np.flatnonzero(weights)
    return focus, chosen, weights[chosen]


def _bare(tokenizer: Tokenizer) -> np.ndarray:
    vocabulary = tokenizer.get_vocab()
    bare = np.arange(tokenizer.get_vocab_size())
    for token, i in vocabulary.items():
        if token.startswith("Ġ"):
            bare[i] = vocabulary.get(token[1:], i)
    return bare


@dataclass(frozen=True)
class Mix:
    """The kinds of training rows, as shares of rows."""

    focus: float = 0.35  # rows around a short sentence with a focus word
    treebank: float = 0.4  # rows that begin in treebank form
    mixed: float = 0.5  # of those, the share that continues in plain form, as prompts do
    spans: float = 0.0  # rows that start and end anywhere in a document, also in mid-sentence


def sample_rows(
    corpus: Corpus,
    rows: int,
    length: int,
    mix: Mix,
    specials: tuple[int, int, int],
    generator: torch.Generator,
    fill: bool,
) -> Tensor:
    """Sample random rows of `length` token ids, on the device.

    A row is `<s>`, some sentences before a pivot sentence, the pivot and the text after it. With `fill` the row continues
    to its full length, across document ends; otherwise it ends with a sentence and `</s>`, and is padded.
    """
    bos, pad, eos = specials
    device, count = corpus.tokens.device, corpus.first.numel()
    flat = corpus.start.flatten()  # sorted: the second form follows the first
    draw = torch.rand(7, rows, device=device, generator=generator, dtype=torch.float64)
    pivot = (draw[0] * count).long()
    if mix.focus and corpus.focus_sentences.numel():
        hit = torch.searchsorted(corpus.focus_weights, draw[0] * corpus.focus_weights[-1], right=True)
        hit = hit.clamp(max=corpus.focus_sentences.numel() - 1)
        pivot = torch.where(draw[1] < mix.focus, corpus.focus_sentences[hit], pivot)
    lead = torch.maximum(pivot - (draw[2] * (1 + length // 32)).long(), corpus.first[pivot])
    form_a = draw[3] < mix.treebank
    form_b = form_a & (draw[4] >= mix.mixed)
    room = length - (1 if fill else 2)
    a_end, b = flat[form_a * (count + 1) + pivot], flat[form_b * (count + 1) + pivot]
    a = torch.maximum(flat[form_a * (count + 1) + lead], a_end - 3 * room // 4)
    len_a = a_end - a
    if fill:
        len_b = room - len_a
    else:
        # Half of the short rows end after the pivot, as prompts of sentence tasks do.
        single = (draw[5] < 0.5) & (length <= 64)
        stop = flat[form_b * (count + 1) + torch.where(single, pivot + 1, corpus.last[pivot])]
        limit = torch.minimum(stop, b + room - len_a)
        sentence_end = flat[torch.searchsorted(flat, limit, right=True) - 1]
        len_b = torch.where(sentence_end > b, sentence_end, limit) - b
        if mix.spans:
            anywhere = draw[6] < mix.spans
            start = (draw[0] * corpus.start[0, -1]).long()
            inside = torch.searchsorted(corpus.start[0], start, right=True) - 1
            form = form_a * (count + 1)  # start at the same token of the sentence, or at its last, in the row's form
            begin = torch.minimum(flat[form + inside] + start - corpus.start[0, inside], flat[form + inside + 1] - 1)
            stop = torch.minimum(begin + room, flat[form + corpus.last[inside]])
            len_a, b = torch.where(anywhere, 0, len_a), torch.where(anywhere, begin, b)
            len_b = torch.where(anywhere, stop - begin, len_b)
    at, len_a, size = torch.arange(-1, length - 1, device=device), len_a[:, None], (len_a + len_b)[:, None]
    source = torch.where(at < len_a, a[:, None] + at, b[:, None] - len_a + at)
    ids = corpus.tokens[source % corpus.tokens.numel()].long()
    ids[:, 0] = bos
    ids[:, 1:] = torch.where(ids[:, :-1] == bos, corpus.bare[ids[:, 1:]], ids[:, 1:])
    return ids if fill else torch.where(at < size, ids, torch.where(at == size, eos, pad))
