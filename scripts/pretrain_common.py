"""Shared code of pretrain_mlm.py and pretrain_clm.py: options, training loop, zero-shot evaluation, saving."""

import argparse
import contextlib
import csv
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from pretrain_data import Corpus, Mix, build_corpus, read_documents
from pretrain_tokenizer import SPECIALS, special_id, train_tokenizer, wrap
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

Loss = Callable[[PreTrainedModel, int, int], Tensor]  # (model, rows, length) → the loss of a random batch
Evaluate = Callable[[PreTrainedModel], dict[str, float]]
LABEL_WORDS = (" terrible", " great")


def parse_options(description: str, *, lengths: str, minutes: float, ffn: int) -> argparse.Namespace:
    """Parse the command line. The defaults are those of the bundled models."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("text", type=Path, help="text to train on, one document per line (.txt, .xz or .gz)")
    add("--out", type=Path, required=True, help="folder to write the model and its tokenizer to")
    add("--tokenizer", type=Path, help="folder or tokenizer.json to use; without it one is trained on the text")
    add(
        "--start",
        type=Path,
        help="folder of a model to continue from, with its tokenizer; without it a new model is made",
    )
    add("--vocab", type=int, default=8000, help="vocabulary size of a tokenizer that is trained")
    add("--max-docs", type=int, help="read at most this many documents")
    add("--layers", type=int, default=6, help="transformer layers")
    add("--hidden", type=int, default=256, help="hidden size")
    add("--heads", type=int, default=4, help="attention heads")
    add("--ffn", type=int, default=ffn, help="inner size of the feed-forward layers")
    add("--minutes", type=float, default=minutes, help="training time; the learning rate reaches 0 at its end")
    add("--tokens", type=float, help="train on this many tokens instead of for --minutes")
    add("--lengths", default=lengths, help="row lengths and their shares of the tokens")
    add("--batch-tokens", type=int, default=131_072, help="tokens per step, including padding")
    add("--lr", type=float, default=2e-3, help="peak learning rate, which decays linearly to 0")
    add("--warmup", type=int, default=300, help="steps of linear warm-up")
    add("--weight-decay", type=float, default=0.05, help="weight decay of AdamW on matrices")
    add("--focus", type=float, default=Mix.focus, help="share of rows around a short sentence with an opinion word")
    add("--treebank", type=float, default=Mix.treebank, help="share of rows that begin in SST-2's spelling")
    add("--mixed", type=float, default=Mix.mixed, help="share of these that continue in plain spelling, as prompts do")
    add("--focus-rate", type=float, default=0.35, help="masked LM: probability that an opinion word is predicted")
    add("--mask-rate", type=float, default=0.17, help="masked LM: probability that any other token is predicted")
    add(
        "--spans", type=float, default=Mix.spans, help="share of rows that start and end anywhere, also in mid-sentence"
    )
    add(
        "--heldout",
        type=float,
        default=0.01,
        help="share of the documents, taken from the end, held out for evaluation",
    )
    add("--eval-tsv", type=Path, help="file like SST-2 (sentence, label 0 or 1) for zero-shot accuracy")
    add("--seed", type=int, default=0, help="seed of the weights and of the sampling")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda, cuda:1, cpu")
    add("--compile", action=argparse.BooleanOptionalAction, default=None, help="use torch.compile; default: on a GPU")
    args = parser.parse_args()
    args.compile = torch.device(args.device).type == "cuda" if args.compile is None else args.compile
    try:
        args.lengths = {int(n): float(share) for n, share in (item.split(":") for item in args.lengths.split(","))}
    except ValueError as error:
        raise SystemExit(f"error: --lengths must look like 64:0.5,128:0.5, not {args.lengths!r}") from error
    args.tokenizer = args.tokenizer or args.start
    for path in (args.text, args.tokenizer, args.start, args.eval_tsv):
        if path is not None and not path.exists():
            raise SystemExit(f"error: no such file: {path}")
    if args.minutes <= 0 or (args.tokens is not None and args.tokens < 1):
        raise SystemExit("error: --minutes and --tokens must be positive")
    if args.hidden % args.heads:
        raise SystemExit(f"error: --hidden {args.hidden} is not a multiple of --heads {args.heads}")
    if args.vocab > 32_767:
        raise SystemExit("error: --vocab must be below 32,768: tokens are stored as 16-bit integers")
    return args


@dataclass(frozen=True)
class Setup:
    """Everything a training script needs before it builds its model."""

    args: argparse.Namespace
    tokenizer: Tokenizer
    train: Corpus
    heldout: Corpus
    sentiment: list[tuple[str, int]]  # (sentence, label) of --eval-tsv
    device: torch.device

    @property
    def specials(self) -> tuple[int, int, int]:
        return self.id("bos"), self.id("pad"), self.id("eos")

    def id(self, name: str) -> int:
        """The id of a special token: bos, pad, eos, unk, mask."""
        return special_id(self.tokenizer, name)

    @property
    def mix(self) -> Mix:
        return Mix(self.args.focus, self.args.treebank, self.args.mixed, self.args.spans)

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)


def prepare(args: argparse.Namespace, *, end: bool) -> Setup:
    """Read and tokenise the text. `end`: mark the ends of documents, for a causal model."""
    started = time.monotonic()
    device = torch.device(args.device)
    try:
        documents = read_documents(args.text, args.max_docs)
        sentiment = read_sentiment(args.eval_tsv) if args.eval_tsv else []
        heldout_count = max(1, round(len(documents) * args.heldout))
        if len(documents) < 20:
            raise ValueError(f"{args.text} has {len(documents)} documents; at least 20 are needed, one per line")
        tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else train_tokenizer(documents, args.vocab)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    ids = [special_id(tokenizer, name) for name in ("eos", "bos")] if end else []
    # This starts worker processes, so it must run before the first use of the GPU.
    parts = [
        build_corpus(part, tokenizer, end=ids) for part in (documents[:-heldout_count], documents[-heldout_count:])
    ]
    train, heldout = (part.to(device) for part in parts)
    print(
        f"{len(documents) - heldout_count} documents, {train.plain_tokens / 1e6:.2f}M tokens, "
        f"{heldout_count} held out; ready in {time.monotonic() - started:.0f} s",
        flush=True,
    )
    return Setup(args, tokenizer, train, heldout, sentiment, device)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer from a Hugging Face folder or a tokenizer.json; it must have the special tokens of training."""
    path = path / "tokenizer.json" if path.is_dir() else path
    tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    for name in SPECIALS:
        special_id(tokenizer, name)
    if tokenizer.get_vocab_size() > 32_767:
        raise ValueError(f"{path} has more than 32,767 tokens: they are stored as 16-bit integers")
    return tokenizer


def read_sentiment(path: Path) -> list[tuple[str, int]]:
    """Read a tsv like that of SST-2: a header, then rows of a sentence and 0 (negative) or 1 (positive)."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
    if not rows or any(len(row) != 2 or row[1] not in ("0", "1") for row in rows):
        raise ValueError(f"{path} is not a tsv with a header and the columns sentence, label (0 or 1)")
    return [(row[0].strip(), int(row[1])) for row in rows]


def zero_shot(margins: Tensor, labels: list[int]) -> dict[str, float]:
    """Accuracy of margin > 0, and of margin > median, which is calibrated without labels, in percent."""
    gold = torch.tensor(labels, device=margins.device, dtype=torch.bool)
    return {
        "zero_shot": 100 * ((margins > 0) == gold).float().mean().item(),
        "zero_shot_calibrated": 100 * ((margins > margins.median()) == gold).float().mean().item(),
        "said_positive": 100 * (margins > 0).float().mean().item(),
    }


def sentiment(
    model: PreTrainedModel, setup: Setup, prompt: list[int], read: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """Zero-shot accuracy with `prompt` after each sentence. `read`: padded ids → hidden state that predicts the label."""
    bos, pad, _ = setup.specials
    words = [setup.tokenizer.encode(word, add_special_tokens=False).ids[0] for word in LABEL_WORDS]
    max_text = max(setup.args.lengths) - len(prompt) - 1
    rows = [
        torch.tensor([bos, *setup.tokenizer.encode(text, add_special_tokens=False).ids[:max_text], *prompt])
        for text, _ in setup.sentiment
    ]
    margins = []
    for i in range(0, len(rows), 256):
        ids = torch.nn.utils.rnn.pad_sequence(rows[i : i + 256], batch_first=True, padding_value=pad).to(setup.device)
        scores = model.lm_head(read(ids))[:, words].float()
        margins.append(scores[:, 1] - scores[:, 0])
    return zero_shot(torch.cat(margins), [label for _, label in setup.sentiment])


def fit(model: PreTrainedModel, setup: Setup, loss_of: Loss, evaluate: Evaluate) -> dict[str, float]:
    """Train for the given time or tokens; return the cost. The learning rate follows that progress and ends at 0."""
    args, cuda = setup.args, setup.device.type == "cuda"
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=cuda)
    lengths, shares = list(args.lengths), list(args.lengths.values())
    rng = random.Random(args.seed)
    step, tokens, next_report, started = 0, 0, 0.0, time.monotonic()
    model.train()
    while (progress := tokens / args.tokens if args.tokens else (time.monotonic() - started) / (60 * args.minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1, (step + 1) / args.warmup) * (1 - progress)
        length = rng.choices(lengths, shares)[0]
        rows = max(1, args.batch_tokens // length)
        with autocast(setup.device):
            loss = loss_of(model, rows, length)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + rows * length
        if step % 25 == 0 or args.tokens:
            value = loss.item()  # synchronises the device; otherwise progress would run ahead of it
            if progress >= next_report:
                next_report += 0.1
                seconds = time.monotonic() - started
                results = " ".join(f"{k} {v:.3f}" for k, v in check(model, setup.device, evaluate).items())
                print(
                    f"{progress:4.0%} step {step} loss {value:.3f} {tokens / seconds / 1e6:.2f}M tok/s; {results}",
                    flush=True,
                )
    if cuda:
        torch.cuda.synchronize()
    return {"steps": step, "tokens": tokens, "seconds": round(time.monotonic() - started, 1)}


def autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def check(model: PreTrainedModel, device: torch.device, evaluate: Evaluate) -> dict[str, float]:
    """Evaluate in eval mode, uncompiled: other shapes would cause recompilation."""
    model.eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), autocast(device):
        results = evaluate(model)
    model.train()
    return results


def finish(
    model: PreTrainedModel, setup: Setup, tokenizer: PreTrainedTokenizerFast, cost: dict[str, float], evaluate: Evaluate
) -> None:
    """Round the weights to fp16, evaluate the rounded weights in fp32, and write the Hugging Face folder."""
    out: Path = setup.args.out
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())
    model.eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        results = {name: round(value, 4) for name, value in evaluate(model).items()}
    model.half().save_pretrained(out)
    tokenizer.save_pretrained(out)
    options = {k: v.name if isinstance(v, Path) else v for k, v in vars(setup.args).items() if k != "out"}
    gpu = torch.cuda.get_device_name(setup.device) if setup.device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    record = {"options": options, "device": gpu, "torch": torch.__version__, **cost, "results": results}
    (out / "pretraining.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps({**cost, **results}))
    print(f"{model.num_parameters() / 1e6:.2f}M parameters written to {out}")


def train(model: PreTrainedModel, setup: Setup, loss_of: Loss, evaluate: Evaluate, *, eos: bool) -> None:
    """Train the model and save it. `eos`: whether its tokenizer ends a text with `</s>`."""
    cost = fit(model, setup, loss_of, evaluate)
    finish(model, setup, wrap(setup.tokenizer, eos=eos, max_length=max(setup.args.lengths)), cost, evaluate)
