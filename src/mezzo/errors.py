"""What a user can get wrong. Every message says what happened and what to do; the command line prints it and exits 2."""

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


class ModelError(MezzoError):
    """A model cannot be found, loaded or perturbed exactly."""


class SpaceError(MezzoError):
    """The chosen tensors cannot be trained."""


class JournalError(MezzoError):
    """A run folder cannot be read, written or resumed."""


class RunFailed(MezzoError):
    """The run itself failed (diverged, disk full, worker lost); what was recorded can be resumed."""

    exit_code = 1


def out_of_memory(error: BaseException) -> bool:
    """Whether it says that memory is short. On a CPU neither torch's allocator nor oneDNN's has a class for its refusals."""
    words = ("DefaultCPUAllocator", "could not create a primitive", "bad_alloc")
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError) and any(each in str(error) for each in words))


def nearest(word: str, choices: Iterable[str], cutoff: float = 0.5) -> str:
    """`; did you mean 'x'?` when a choice is close to `word`, else an empty string."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=cutoff)
    return f"; did you mean {found[0]!r}?" if found else ""
