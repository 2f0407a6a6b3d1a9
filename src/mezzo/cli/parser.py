"""The arguments of every verb. The options of `train` are the fields of RunConfig: one source of names, defaults and help."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable
from typing import Any, NoReturn

from mezzo import __version__
from mezzo.config import RunConfig, options
from mezzo.errors import nearest

GROUPS = {
    "model": "model and engine",
    "task": "task and data",
    "space": "what is trained",
    "method": "method",
    "run": "run",
}
MODEL_OPTIONS = ("model", "engine", "device", "dtype", "micro_batch", "threads", "tp", "url", "remote_code")
TASK_OPTIONS = ("task", "id_order", "encoding", "template", "words", "max_length", "readout")


class Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=110)


class Parser(argparse.ArgumentParser):
    """Mistakes in one line, with the nearest word that would have been right."""

    def error(self, message: str) -> NoReturn:
        if "unrecognized arguments: " in message:
            word = message.rsplit(": ", 1)[1].split()[0]
            known = ["--" + option.name.replace("_", "-") for option in options()]
            message = f"unknown option {word}{nearest(word, [*known, *self._option_string_actions])}"
        elif "invalid choice: " in message and "choose from" in message:
            word = message.split("invalid choice: ")[1].split(" (")[0].strip("'")
            choices = message.split("choose from ")[1].rstrip(")").replace("'", "").split(", ")
            message = f"{word!r} is not one of {', '.join(choices)}{nearest(word, choices)}"
        self.exit(2, f"mezzo: {message} ('{self.prog} --help' explains)\n")


def build() -> argparse.ArgumentParser:
    parser = Parser(
        "mezzo",
        description="Fine-tune language models with forward passes only.",
        epilog="'mezzo train' alone fine-tunes a bundled model on bundled film reviews. 'mezzo VERB --help' explains a verb.",
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mezzo {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    train = _verb(verbs, "train", "fine-tune a model; without options, the bundled one on the bundled reviews")
    train.add_argument("--resume", metavar="RUN", help="continue a run folder where its journal ends")
    train.add_argument("--config", metavar="FILE", help="TOML file with any of the options below")
    train.add_argument("--print-config", action="store_true", help="print the resolved configuration as TOML and exit")
    _options(train, [f.name for f in options()])

    evaluate = _verb(verbs, "eval", "evaluate a run, or a model as it is (zero-shot)")
    evaluate.set_defaults(verb="evaluate")
    evaluate.add_argument(
        "run", nargs="?", metavar="RUN", help="run folder or compact journal; without it, --model as it is"
    )
    evaluate.add_argument("--data", metavar="FILE", help="examples to evaluate [the bundled test set of the task]")
    evaluate.add_argument("--at", type=int, metavar="STEP", help="journal position [the best checkpoint]")
    _options(
        evaluate, [*MODEL_OPTIONS, *TASK_OPTIONS, "eval_limit", "demonstrations", "train", "k", "data_seed", "seed"]
    )

    predict = _verb(verbs, "predict", "label texts: one JSON line per input")
    predict.add_argument(
        "run", nargs="?", metavar="RUN", help="run folder or compact journal; without it, --model as it is"
    )
    predict.add_argument("--data", metavar="FILE", help="text lines, or jsonl with the task's columns [standard input]")
    predict.add_argument("--at", type=int, metavar="STEP", help="journal position [the best checkpoint]")
    _options(predict, [*MODEL_OPTIONS, *TASK_OPTIONS])

    signal = _verb(verbs, "signal", "measure what slopes different objectives give, before spending compute")
    signal.add_argument("--directions", type=int, default=16, help="random directions [16]")
    signal.add_argument("--batches", type=int, default=8, help="batches per direction [8]")
    signal.add_argument(
        "--objectives", default="", help="comma-separated, e.g. cross_entropy,accuracy@1e-3,head [all of these]"
    )
    train_like = (
        "train",
        "k",
        "data_seed",
        "batch_size",
        "eps",
        "seed",
        "space",
        "rank",
        "alpha",
        "targets",
        "noise",
        "noise_rank",
    )
    _options(signal, [*MODEL_OPTIONS, *TASK_OPTIONS, *train_like])

    export = _verb(verbs, "export", "write a run as a PEFT adapter, a Hugging Face model or a compact journal")
    export.add_argument("run", metavar="RUN", help="run folder or compact journal")
    export.add_argument("kind", metavar="KIND", help="adapter, model or journal")
    export.add_argument("--out", metavar="PATH", help="where to [inside the run folder]")
    export.add_argument("--at", type=int, metavar="STEP", help="journal position [the best checkpoint]")
    export.add_argument("--model", metavar="M", help="the base model, if it lies elsewhere than the journal says")

    verify = _verb(verbs, "verify", "rebuild a run from base model and journal and compare digests")
    verify.add_argument("run", metavar="RUN", help="run folder or compact journal")
    verify.add_argument("--model", metavar="M", help="the base model, if it lies elsewhere than the journal says")
    verify.add_argument("--device", metavar="D", help="where to rebuild [as the run]")

    tasks = _verb(verbs, "tasks", "list the tasks, or show one with a rendered example")
    tasks.add_argument("action", nargs="?", choices=("list", "show"), default="list", help="list or show")
    tasks.add_argument("name", nargs="?", metavar="NAME", help="task name or TOML file")
    tasks.add_argument("--family", choices=("masked", "causal"), help="which of two tasks of that name")
    return parser


def _verb(verbs: argparse._SubParsersAction[Parser], name: str, help: str) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=help, description=help, formatter_class=Formatter, allow_abbrev=False)
    parser.set_defaults(verb=name)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line of standard output")
    return parser


def _options(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    wanted = set(names)
    groups = {name: parser.add_argument_group(title) for name, title in GROUPS.items()}
    for option in options():
        if option.name in wanted:
            _add(groups[option.metadata["group"]], option)


def _add(group: argparse._ArgumentGroup, option: dataclasses.Field[object]) -> None:
    flag = "--" + option.name.replace("_", "-")
    shown = str(option.metadata["help"]).replace("%", "%%")
    if option.default not in (None, "", (), False) and "[" not in shown:
        shown += f" [{option.default}]"
    if isinstance(option.default, bool):
        group.add_argument(flag, action="store_const", const=True, default=None, help=shown)
    else:
        group.add_argument(flag, metavar=option.name[0].upper(), default=None, help=shown)


def given(namespace: argparse.Namespace) -> dict[str, Any]:
    """The RunConfig options that were set on the command line."""
    return {f.name: v for f in dataclasses.fields(RunConfig) if (v := getattr(namespace, f.name, None)) is not None}
