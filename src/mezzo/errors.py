"""Errors that are explained to the user. Each message says what happened and what to do; the command line exits with 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MezzoError(Exception):
    """Base of all errors that are explained to the user without a traceback."""

    exit_code = 2


class ConfigError(MezzoError):
    """An option is unknown, missing or contradicts another."""


class TaskError(MezzoError):
    """A task, template or label word does not fit the data or the tokenizer."""


class DataError(MezzoError):
    """A data file cannot be read as examples."""


class LabelError(DataError):
    """No column of the data holds labels or right answers."""


class ModelError(MezzoError):
    """A model cannot be found, loaded or perturbed exactly."""


class SpaceError(MezzoError):
    """The chosen tensors cannot be trained."""


class JournalError(MezzoError):
    """A run folder cannot be read, written or resumed."""


class RunFailed(MezzoError):
    """The run itself failed (diverged, disk full, worker lost); what was recorded can be resumed."""

    exit_code = 1


class MezzoWarning(UserWarning):
    """Something was decided for the user that may not be what they meant. The command line shows it in one line."""


class StopTraining(Exception):
    """Raise it in an observer to end a run after the current step; its best checkpoint is then tested as usual."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it is an out-of-memory error. On a CPU neither torch nor oneDNN has an exception class of its own for these."""
    words = ("DefaultCPUAllocator", "could not create a primitive", "bad_alloc")
    by_class = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return by_class or (isinstance(error, RuntimeError) and any(each in str(error) for each in words))


def nearest(word: str, choices: Iterable[str], cutoff: float = 0.5) -> str:
    """`; did you mean 'x'?` when a choice is close to `word`, else an empty string."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=cutoff)
    return f"; did you mean {found[0]!r}?" if found else ""


def join_names(names: Iterable[object], most: int = 12) -> str:
    """`a, b, c`; of many, the first and how many there are."""
    shown = [str(name) for name in names]
    return ", ".join(shown[:most]) + (f", … ({len(shown)} in all)" if len(shown) > most else "")
