"""Train the byte-level BPE tokenizer of the bundled models: `python scripts/pretrain_tokenizer.py TEXT --out DIR`."""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

from pretrain_data import read_documents, sentences, treebank_form
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIALS = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}  # ids 0..4, as in RoBERTa
LABEL_WORDS = (  # noqa: SIM905
    "terrible great bad okay good subjective objective incorrect correct "
    "Description Entity Expression Human Location Number Yes No Maybe"
).split()
BARE_WORDS = ["Yes", "No", "Maybe"]
# BPE merges in order of frequency, and the last merges of an 8,000-token vocabulary on 130 MB occur about 500 times.
# A word repeated this often becomes one token whatever the text contains, and the other counts hardly change.
REPEATS = 20_000


def _training_text(documents: Iterable[str]) -> Iterator[str]:
    """The documents, every fourth one in treebank form, then the words that must be single tokens."""
    for i, document in enumerate(documents):
        yield " ".join(map(treebank_form, sentences(document))) if i % 4 == 3 else document
    for _ in range(REPEATS // 100):
        yield "".join(f" {word}" for word in LABEL_WORDS) * 100
        # A line break ends a pre-token, so the word after it has no leading space.
        yield "".join(f"{word}\n" for word in BARE_WORDS) * 100


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE with RoBERTa's five special tokens in which every label word is one token."""
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIALS["unk"]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(t, lstrip=t == SPECIALS["mask"], normalized=False, special=True) for t in SPECIALS.values()]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(documents), trainer)
    single_words = [f" {word}" for word in LABEL_WORDS] + BARE_WORDS
    split_words = [word for word in single_words if len(tokenizer.encode(word).ids) != 1]
    if split_words:
        raise ValueError(f"{split_words} are not single tokens in a vocabulary of {vocab_size}; use a larger --vocab")
    return tokenizer


def special_id(tokenizer: Tokenizer, name: str) -> int:
    """The id of a special token, by its name in SPECIALS."""
    token_id = tokenizer.token_to_id(SPECIALS[name])
    if token_id is None:
        raise ValueError(f"the tokenizer has no {SPECIALS[name]}")
    return token_id


def wrap(tokenizer: Tokenizer, *, eos: bool, max_length: int) -> PreTrainedTokenizerFast:
    """A Hugging Face tokenizer that gives `<s> text </s>` for a masked model (`eos`), `<s> text` for a causal one."""
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    end = f" {SPECIALS['eos']}" if eos else ""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIALS['bos']} $A{end}",
        pair=f"{SPECIALS['bos']} $A{end}{end} $B{end}",
        special_tokens=[(SPECIALS[name], special_id(tokenizer, name)) for name in ("bos", "eos")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        mask_token=AddedToken(SPECIALS["mask"], lstrip=True, normalized=False, special=True),
        **{f"{name}_token": SPECIALS[name] for name in ("bos", "pad", "eos", "unk")},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, help="text, one document per line (.txt, .xz or .gz)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the Hugging Face tokenizer to")
    parser.add_argument("--vocab", type=int, default=8000, help="number of tokens (default: %(default)s)")
    args = parser.parse_args()
    try:
        tokenizer = train_tokenizer(read_documents(args.text), args.vocab)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    wrap(tokenizer, eos=True, max_length=256).save_pretrained(args.out)
    print(f"{tokenizer.get_vocab_size()} tokens written to {args.out}")


if __name__ == "__main__":
    main()
