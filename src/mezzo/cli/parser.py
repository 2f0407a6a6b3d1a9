"""The arguments of every verb. The options of `train` are the fields of RunConfig: one source of names, defaults and help."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, TypeAlias

from mezzo import __version__
from mezzo.config import ELSEWHERE, RunConfig, options
from mezzo.errors import nearest

GROUPS = {
    "model": "model and engine",
    "task": "task and data",
    "space": "what is trained",
    "method": "method",
    "run": "run",
    "workers": "parallel workers",
}
MODEL_OPTIONS = (
    "model",
    "engine",
    "device",
    "dtype",
    "quantize",
    "micro_batch",
    "cache_mb",
    "threads",
    "tp",
    "url",
    "remote_code",
)
TASK_OPTIONS = ("task", "id_order", "columns", "encoding", "template", "words", "max_length", "readout")
BENCH_OPTIONS = (
    "device",
    "dtype",
    "micro_batch",
    "threads",
    "max_length",
    "rank",
    "noise_rank",
    "batch_size",
    "samples",
)


SIGNAL_OPTIONS = (
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
    "prefix_tokens",
    "only",
    "layers",
    "noise",
    "noise_rank",
)


class Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=110)


class Parser(argparse.ArgumentParser):
    """Mistakes in one line, with the nearest word that would have been right."""

    elsewhere: Mapping[str, str] = {}
    """What an option that this verb does not have is called here."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = super().parse_known_args(args, namespace)
        if rest and self._subparsers is None:  # a verb knows its own options; the program would name those of all
            self.error(self._unknown(str(rest[0])))
        return found, rest

    def _unknown(self, word: str) -> str:
        name = word.split("=")[0].lstrip("-")
        if not word.startswith("-"):
            return f"one argument too many: {word!r}"
        own = [flag for action in self._actions for flag in action.option_strings]
        called = ELSEWHERE.get(name.replace("-", "_"), "").replace("_", "-")
        if name in self.elsewhere:
            return f"unknown option --{name}; {self.elsewhere[name]}"
        if f"--{called}" in own:
            return f"unknown option --{name}; did you mean '--{called}'?"
        if any(option.name.replace("_", "-") == name for option in options()):
            return f"unknown option --{name}: 'mezzo train' has it, '{self.prog}' has not"
        flag = word.split("=")[0]
        return f"unknown option {flag}{nearest(flag, own, cutoff=0.7)}"  # two dashes are alike everywhere

    def error(self, message: str) -> NoReturn:
        if "unrecognized arguments: " in message:
            message = self._unknown(message.rsplit(": ", 1)[1].split()[0])
        elif "invalid choice: " in message and "choose from" in message:
            word = message.split("invalid choice: ")[1].split(" (")[0].strip("'")
            choices = message.split("choose from ")[1].rstrip(")").replace("'", "").split(", ")
            message = f"{word!r} is not one of {', '.join(choices)}{nearest(word, choices)}"
        self.exit(2, f"mezzo: {message} ('{self.prog} --help' explains)\n")


Verbs: TypeAlias = "argparse._SubParsersAction[Parser]"


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
    for add in (_train, _eval, _predict, _signal, _bench, _export, _verify, _report, _workers, _tasks):
        add(verbs)
    return parser


def _train(verbs: Verbs) -> None:
    verb = _verb(verbs, "train", "fine-tune a model; without options, the bundled one on the bundled reviews")
    verb.add_argument("--resume", metavar="RUN", help="continue a run folder where its journal ends")
    verb.add_argument(
        "--config", metavar="FILE", help="TOML file with any of the options below, or a run folder's config.json"
    )
    verb.add_argument("--print-config", action="store_true", help="print the resolved configuration as TOML and exit")
    _options(verb, [f.name for f in options()])


def _eval(verbs: Verbs) -> None:
    verb = _verb(verbs, "eval", "evaluate a run, or a model as it is (zero-shot)")
    verb.set_defaults(verb="evaluate")
    _run_or_model(verb)
    verb.add_argument("--data", metavar="FILE", help="examples to evaluate [the bundled test set of the task]")
    _options(verb, [*MODEL_OPTIONS, *TASK_OPTIONS, "eval_limit", "demonstrations", "train", "k", "data_seed", "seed"])


def _predict(verbs: Verbs) -> None:
    verb = _verb(verbs, "predict", "label texts: one JSON line per input")
    _run_or_model(verb)
    verb.add_argument("--data", metavar="FILE", help="a data file, or lines of text or JSON [standard input]")
    _options(verb, [*MODEL_OPTIONS, *TASK_OPTIONS])


def _signal(verbs: Verbs) -> None:
    verb = _verb(verbs, "signal", "measure what slopes different objectives give, before spending compute")
    verb.add_argument("--directions", type=int, default=16, help="random directions [16]")
    verb.add_argument("--batches", type=int, default=8, help="batches per direction [8]")
    verb.add_argument(
        "--objectives", default="", help="comma-separated, e.g. cross_entropy,accuracy@1e-3,head [all of these]"
    )
    _options(verb, [*MODEL_OPTIONS, *TASK_OPTIONS, *SIGNAL_OPTIONS])


def _bench(verbs: Verbs) -> None:
    verb = _verb(verbs, "bench", "time a step beside the published recipe and a bare forward, on random weights")
    verb.elsewhere = {
        "noise": "name it with the space, as in --space full:gaussian,matrices:lowrank",
        "steps": "--rounds says how often every contender takes its turn",
    }
    shapes = "roberta-mini, roberta-base, roberta-large, llama-mini, llama-1b, llama-7b, or several [roberta-mini]"
    verb.add_argument("--model", metavar="M", help=f"shape of the model: {shapes}")
    verb.add_argument("--space", metavar="S", help="spaces, e.g. lora,full:gaussian,matrices:lowrank [lora,full]")
    verb.add_argument("--length", type=int, default=32, metavar="L", help="tokens of a prompt [32]")
    verb.add_argument("--spread", type=float, default=0.0, metavar="S", help="lengths vary by this share [0]")
    verb.add_argument("--rounds", type=int, default=7, metavar="R", help="turns of every contender, at least 5 [7]")
    verb.add_argument("--sweep", metavar="W", help="show growth with batch, length, population or model")
    verb.add_argument("--no-published", action="store_true", help="leave out the published recipe, which takes longest")
    _options(
        verb,
        BENCH_OPTIONS,
        batch_size="examples a step [16]",
        max_length="tokens that the published recipe pads to [128]",
    )


def _export(verbs: Verbs) -> None:
    verb = _verb(verbs, "export", "write a run as a PEFT adapter, a Hugging Face model or a compact journal")
    _run(verb)
    verb.add_argument("kind", metavar="KIND", help="adapter, model or journal")
    verb.add_argument("--out", metavar="PATH", help="where to [inside the run folder]")
    _position(verb)


def _verify(verbs: Verbs) -> None:
    verb = _verb(verbs, "verify", "rebuild a run from base model and journal and compare digests")
    _run(verb)
    verb.add_argument("--device", metavar="D", help="where to rebuild [a GPU if there is one]")


def _workers(verbs: Verbs) -> None:
    verb = _verb(verbs, "workers", "show how many workers a run wants, or give a running one more or fewer")
    verb.add_argument("run", metavar="RUN", help="run folder")
    verb.add_argument("count", nargs="?", type=int, metavar="N", help="from the next step on")


def _report(verbs: Verbs) -> None:
    verb = _verb(verbs, "report", "write what became of runs as one HTML page, or serve it while they train")
    verb.add_argument("runs", nargs="+", metavar="RUN", help="run folders; several are compared")
    verb.add_argument("--out", metavar="FILE", help="where to [RUN/report.html; report.html for several runs]")
    verb.add_argument(
        "--plots", metavar="DIR", help="also write every chart as SVG, and as PNG where matplotlib is installed"
    )
    verb.add_argument(
        "--watch", action="store_true", help="serve the page on this machine, up to date while runs train"
    )
    verb.add_argument("--port", type=int, default=0, metavar="N", help="port of --watch [a free one]")


def _tasks(verbs: Verbs) -> None:
    verb = _verb(verbs, "tasks", "list the tasks, or show one with a rendered example")
    verb.add_argument("action", nargs="?", choices=("list", "show"), default="list", help="list or show")
    verb.add_argument("name", nargs="?", metavar="NAME", help="task name or TOML file")
    verb.add_argument("--family", choices=("masked", "causal"), help="which of two tasks of that name")


def _run(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("run", metavar="RUN", help="run folder or compact journal")
    verb.add_argument("--model", metavar="M", help="the base model, if it lies elsewhere than the journal says")


def _run_or_model(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "run", nargs="?", metavar="RUN", help="run folder or compact journal; without it, --model as it is"
    )
    _position(verb)


def _position(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--at", type=int, metavar="STEP", help="journal position [the best checkpoint]")


def _verb(verbs: Verbs, name: str, help: str) -> Parser:
    parser = verbs.add_parser(name, help=help, description=help, formatter_class=Formatter, allow_abbrev=False)
    parser.set_defaults(verb=name)
    parser.add_argument("--json", action="store_true", help="the outcome as JSON on the last line of standard output")
    return parser


def _options(parser: argparse.ArgumentParser, names: Iterable[str], **helps: str) -> None:
    """Options of RunConfig by name; `helps` says what some of them mean to this verb alone."""
    wanted = set(names)
    groups = {name: parser.add_argument_group(title) for name, title in GROUPS.items()}
    for option in options():
        if option.name in wanted:
            _add(groups[option.metadata["group"]], option, helps.get(option.name, option.metadata["help"]))


def _add(group: argparse._ArgumentGroup, option: dataclasses.Field[object], help: str) -> None:
    flag = "--" + option.name.replace("_", "-")
    shown = help.replace("%", "%%")
    if option.default not in (None, "", (), False) and "[" not in shown:
        shown += f" [{option.default}]"
    if isinstance(option.default, bool):
        group.add_argument(flag, action="store_const", const=True, default=None, help=shown)
    else:
        group.add_argument(flag, metavar=option.name[0].upper(), default=None, help=shown)


def given(namespace: argparse.Namespace) -> dict[str, Any]:
    """The RunConfig options that were set on the command line."""
    return {f.name: v for f in dataclasses.fields(RunConfig) if (v := getattr(namespace, f.name, None)) is not None}
