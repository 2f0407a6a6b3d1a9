"""The arguments of every command: a table of what each has of its own, and the options of RunConfig."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from mezzo import __version__
from mezzo.cli.error_line import error_line
from mezzo.config import OPTIONS, flatten, is_switch, option_names
from mezzo.config.hints import similar_options
from mezzo.config.option import Option
from mezzo.errors import ConfigError, MezzoError, nearest

GROUPS = {
    "model": "model and engine",
    "task": "task and data",
    "space": "what is trained",
    "method": "method",
    "run": "run",
    "workers": "parallel workers",
}


class Argument:
    """What is passed to `add_argument`."""

    def __init__(self, name: str, help: str, **settings: Any) -> None:
        self.name, self.settings = name, {"help": help, **settings}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a command has besides the options of RunConfig that name it."""

    help: str
    arguments: tuple[Argument, ...] = ()
    function: str = ""
    """The function in `commands`, where its name differs."""
    option_help: Mapping[str, str] = field(default_factory=dict)
    """Options that mean something else to this command."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """What to use instead of options that this command does not have."""


JSON = Argument("--json", "the outcome as JSON on the last line of standard output", action="store_true")
SET = Argument(
    "--set", "set any option by its name, e.g. lr=1e-3; may be repeated", action="append", metavar="NAME=VALUE"
)
AT = Argument("--at", "journal position [the best checkpoint]", type=int, metavar="STEP")
RUN = Argument("run", "run folder or compact journal", metavar="RUN")
RUN_OR_MODEL = Argument("run", "run folder or compact journal; without it, --model as it is", nargs="?", metavar="RUN")
DEVICE = Argument("--device", "where to rebuild [a GPU if there is one]", metavar="D")
BASE_MODEL = Argument("--model", "the base model, if it lies elsewhere than the journal says", metavar="M")
SHAPES = "roberta-mini, roberta-base, roberta-large, llama-mini, llama-1b, llama-7b, or several [roberta-mini]"

# fmt: off
COMMANDS = {
    "train": Command(
        help="fine-tune a model; without options, the bundled one on the bundled questions",
        arguments=(
            Argument("--resume", "continue a run folder where its journal ends", metavar="RUN"),
            Argument("--config", "TOML or YAML file of the options below, or a run folder's config.json", metavar="FILE"),
            Argument("--seeds", "train once per seed, e.g. 13,21,42, and compare with mean ± deviation", metavar="LIST"),
            Argument(
                "--sweep",
                "train once per value of an option, e.g. lr=1e-6,1e-5; several --sweep and --seeds combine. Runs lie side by side"
                " in --out; the same command, or --resume with that folder, goes on where a sweep stopped",
                action="append", metavar="OPTION=LIST",
            ),
            Argument("--print-config", "print the resolved configuration as TOML and exit", action="store_true"),
        ),
    ),
    "eval": Command(
        help="evaluate a run, or a model as it is (zero-shot)",
        arguments=(
            RUN_OR_MODEL,
            AT,
            Argument("--data", "examples to evaluate [the bundled test set of the task]", metavar="FILE"),
            Argument("--linear-probe", "fit a new linear head to --train, on features of the frozen model", action="store_true"),
        ),
        function="evaluate",
    ),
    "predict": Command(
        help="label texts: every row with its own columns and a prediction",
        arguments=(
            Argument("run", "run folder, compact journal or exported model; without it, --model as it is", nargs="?",
                metavar="RUN"),
            Argument("file", "a data file, or lines of text, CSV, TSV or JSON [standard input]", nargs="?", metavar="FILE"),
            AT,
            Argument("--data", "FILE, where no RUN is named", metavar="FILE"),
            Argument("--format", "what is written: jsonl, csv or tsv [jsonl]", choices=("jsonl", "csv", "tsv"), default="jsonl"),
        ),
    ),
    "signal": Command(
        help="measure what slopes different objectives give, before spending compute",
        arguments=(
            Argument("--directions", "random directions [16]", type=int, default=16),
            Argument("--batches", "batches per direction [8]", type=int, default=8),
            Argument(
                "--objectives",
                "comma-separated: an --objective of train, or head; @ sets its eps"
                " [cross_entropy,head,accuracy@1e-3,accuracy@1e-2,accuracy@1e-1]",
                default="",
            ),
        ),
    ),
    "bench": Command(
        help="time a step beside the published recipe and a bare forward, on random weights",
        arguments=(
            Argument("--model", f"shape of the model: {SHAPES}", metavar="M"),
            Argument("--space", "spaces, e.g. lora,full:gaussian,matrices:lowrank [lora,full]", metavar="S"),
            Argument("--length", "tokens of a prompt [32]", type=int, default=32, metavar="L"),
            Argument("--spread", "lengths vary by this share [0]", type=float, default=0.0, metavar="S"),
            Argument("--rounds", "turns of every contender, at least 5 [7]", type=int, default=7, metavar="R"),
            Argument("--sweep", "show growth with batch, length, population or model", metavar="W"),
            Argument("--no-published", "leave out the published recipe, which takes longest", action="store_true"),
            Argument("--plan", "print how each module is computed, and time nothing", action="store_true"),
        ),
        option_help={
            "batch_size": "examples a step [16]",
            "max_length": "tokens that the published recipe pads to [128]",
        },
        missing={
            "noise": "name it with the space, as in --space full:gaussian,matrices:lowrank",
            "steps": "--rounds says how often every contender takes its turn",
        },
    ),
    "export": Command(
        help="write a run as a PEFT adapter, a Hugging Face model or a compact journal",
        arguments=(
            RUN,
            BASE_MODEL,
            Argument("kind", "adapter, model or journal", metavar="KIND"),
            Argument("--out", "where to [inside the run folder]", metavar="PATH"),
            Argument("--push", "upload it to the Hugging Face Hub under this name instead, with its figures", metavar="NAME"),
            Argument("--private", "with --push: let nobody else see it", action="store_true"),
            AT,
            DEVICE,
        ),
    ),
    "verify": Command(
        help="rebuild a run from base model and journal and compare digests",
        arguments=(
            RUN,
            BASE_MODEL,
            DEVICE,
            Argument("--repair", "cut a damaged journal before the damage, and keep a copy of what is cut", action="store_true"),
        ),
    ),
    "report": Command(
        help="write what became of runs as one HTML page, or serve it while they train",
        arguments=(
            Argument("runs", "run folders, or folders of runs; several runs are compared", nargs="+", metavar="RUN"),
            Argument("--out", "where to, the figures of several runs as .csv and .json beside it [in RUN; for several here]",
                metavar="FILE"),
            Argument("--plots", "also write every chart as SVG, and as PNG where matplotlib is installed", metavar="DIR"),
            Argument("--watch", "serve the page on this machine, up to date while runs train", action="store_true"),
            Argument("--port", "port of --watch [a free one]", type=int, default=0, metavar="N"),
        ),
    ),
    "runs": Command(
        help="list runs: what was trained, what became of it, its figure",
        arguments=(Argument("folders", "run folders, or folders of runs [runs]", nargs="*", metavar="FOLDER"),),
    ),
    "workers": Command(
        help="show how many workers a run wants, or give a running one more or fewer",
        arguments=(
            Argument("run", "run folder", metavar="RUN"),
            Argument("count", "from the next step on", nargs="?", type=int, metavar="N"),
        ),
    ),
    "tasks": Command(
        help="list the tasks, show one with a rendered example, or propose one for your own data",
        arguments=(
            Argument(
                "name",
                "task name or TOML file to show ('show NAME' is the same); suggest DATA: propose a task for a data file and rank"
                " its templates; new DATA: write it to a file",
                nargs="*", metavar="NAME",
            ),
            Argument("--family", "which of two tasks of that name", choices=("masked", "causal")),
            Argument("--out", "file that new writes [DATA.toml]", metavar="FILE"),
        ),
    ),
}
# fmt: on


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, with what would have been right."""

    missing: Mapping[str, str] = {}

    def __init__(self, *names: Any, **settings: Any) -> None:
        formatter = partial(argparse.HelpFormatter, max_help_position=32, width=110)
        super().__init__(*names, **{**settings, "formatter_class": formatter, "allow_abbrev": False})

    def find(self, words: Any) -> argparse.Namespace:
        """The arguments that this parser knows, among others."""
        return super().parse_known_args(words)[0]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.words = args
        found, rest = super().parse_known_args(args, namespace)
        if rest and self._subparsers is None:  # here, where the options of the command are known
            self.error(self._unknown(str(rest[0])))
        return found, rest

    def _unknown(self, word: str) -> str:
        """The message about an argument that this command does not have."""
        if not word.startswith("-"):
            return f"one argument too many: {word!r}"
        flag = word.split("=")[0]
        name = flag.lstrip("-").replace("-", "_")
        if name in self.missing:
            return f"unknown option {flag}; {self.missing[name]}"
        flags = {action.dest: action.option_strings[-1] for action in self._actions if action.option_strings}
        if name in OPTIONS and name not in flags:
            return f"unknown option {flag}: 'mezzo train' has it, '{self.prog}' has not"
        hints = [f"'{flags[name]} {value}".rstrip() + "'" for name, value in similar_options(name, flags)]
        return f"unknown option {flag}" + (f"; did you mean {' or '.join(hints)}?" if hints else "")

    def error(self, message: str) -> NoReturn:
        if "unrecognized arguments: " in message:
            message = self._unknown(message.rsplit(": ", 1)[1].split()[0])
        elif "invalid choice: " in message and "choose from" in message:
            word = message.split("invalid choice: ")[1].split(" (")[0].strip("'")
            choices = message.split("choose from ")[1].rstrip(")").replace("'", "").split(", ")
            message = f"{word!r} is not one of {', '.join(choices)}{nearest(word, choices)}"
        self.exit(2, error_line(f"mezzo: {message} ('{self.prog} --help' explains)") + "\n")


class ModelHelp(argparse.Action):
    """`--help` with the defaults of the model, space and method that stand beside it."""

    NAMED = ("model", "space", "method", "engine", "dtype")

    def __call__(self, parser: Any, *_: Any) -> None:
        finder = Parser(add_help=False)
        for name in self.NAMED:
            finder.add_argument(OPTIONS[name].flag)
        given = {name: value for name, value in vars(finder.find(parser.words)).items() if value is not None}
        with contextlib.suppress(MezzoError):  # a mistake is told when it is run
            from mezzo.runs.defaults import describe_defaults

            defaults = describe_defaults(given)
            for action in parser._actions:
                if action.dest in defaults and action.dest not in given:
                    action.help = f"{action.help.partition(' [')[0]} [{defaults[action.dest]}]"
            if defaults:
                model = given.get("model", OPTIONS["model"].default)
                parser.epilog = f"Defaults are those of {model}; with another --model, --help shows its own."
        parser.print_help()
        parser.exit()


def build_parser() -> Parser:
    parser = Parser(
        "mezzo",
        description="Fine-tune language models with forward passes only.",
        epilog="'mezzo train' alone fine-tunes a bundled model on bundled questions. "
        "'mezzo COMMAND --help' explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"mezzo {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        about = commands.add_parser(name, help=command.help, description=command.help, add_help=name != "train")
        if name == "train":
            about.add_argument("-h", "--help", action=ModelHelp, nargs=0, help="show this help message and exit")
        _add_arguments(about, name, command)
    return parser


def _add_arguments(parser: Parser, name: str, command: Command) -> None:
    parser.missing = command.missing
    parser.set_defaults(function=command.function or name)
    has_options = name == "train" or option_names(commands=name)
    for each in (JSON, *([SET] if has_options else []), *command.arguments):
        parser.add_argument(each.name, **each.settings)
    groups = {group: parser.add_argument_group(title) for group, title in GROUPS.items()}
    for option_name in OPTIONS if name == "train" else option_names(commands=name):
        option = OPTIONS[option_name]
        _add_option(groups[option.group], option, command.option_help.get(option_name, option.help))


def _add_option(group: argparse._ArgumentGroup, option: Option, help: str) -> None:
    """Values stay text and unset options None: RunConfig converts, checks and has the defaults."""
    shown = help.replace("%", "%%")
    if option.default not in (None, "", (), False) and "[" not in shown:
        shown += f" [{option.default}]"
    if is_switch(option.name):
        group.add_argument(option.flag, action="store_const", const=True, default=None, help=shown)
    else:
        group.add_argument(option.flag, metavar=option.name[0].upper(), default=None, help=shown)


def given_options(namespace: argparse.Namespace) -> dict[str, Any]:
    """The options of RunConfig that were set on the command line, by their flags or by --set."""
    flags = {name: value for name in OPTIONS if (value := getattr(namespace, name, None)) is not None}
    words = [word.partition("=") for word in getattr(namespace, "set", None) or ()]
    for name, sign, value in words:
        if not sign or not name.strip() or not value:
            raise ConfigError(f"--set takes NAME=VALUE, such as --set lr=1e-3, not {name + sign + value!r}")
    named = flatten({name.strip(): value for name, _, value in words})
    if twice := sorted(set(named) & set(flags)):
        raise ConfigError(f"{twice[0]} is given twice, by {OPTIONS[twice[0]].flag} and by --set: leave one out")
    return {**named, **flags}
