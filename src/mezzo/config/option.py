"""What is known of one option besides its type: all that the command line, files and journals need."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from mezzo.errors import ConfigError, nearest

# What an integer without a bound of its own may be at most: floats and the integers of arrays hold it.
MAX_INTEGER = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The metadata of a field of RunConfig. Only group, default and help are always given."""

    name: str = ""
    """That of the field."""
    group: str
    """The table in a TOML file, the section in `--help`."""
    default: Any
    help: str
    at_least: int | None = None
    at_most: int | None = None
    """Where a slip, or a configuration of unknown origin, would exhaust the machine."""
    positive: bool = False
    words: tuple[str, ...] = ()
    """What may be given instead of a number."""
    choices: tuple[str, ...] | str = ()
    """The allowed values, or the table that has them as keys: `module:name`, imported when it is needed."""
    open_choices: bool = False
    """Other values are allowed too; the code that uses them checks them."""
    pairs: str = ""
    """An example, where the values are `key=value` pairs."""
    aliases: tuple[str, ...] = ()
    """What other programs call this option, for hints."""
    commands: tuple[str, ...] = ()
    """The commands that have this option besides `train`."""
    resumable: bool = False
    """It may change when a run is resumed."""
    reopen: Literal["", "machine", "question"] = ""
    """It may differ when the weights of a journal are rebuilt: it names the machine, or what is asked of the weights."""
    of_method: tuple[str, ...] = ()
    """The values of `--method` that read it; empty: every one."""
    per_model: bool = False
    """The `mezzo.json` of a model may set it."""
    contacts: Callable[[Any], bool] | None = None
    """Whether a value makes the run contact other machines: it sends prompts, weights or figures there, asks there for a
    model or data, or lets a cluster run code here."""
    address: bool = False
    """A network address. It is stored with the run, so it must not hold credentials."""
    runs_code: Callable[[Any], bool] | None = None
    """Whether a value runs code that does not come with this package."""
    exhausts: Callable[[Any], bool] | None = None
    """Whether a value may be more than this machine can run."""
    placeholder: str = ""
    """What stands for the value where a message says how to name it on the command line."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def values(self) -> tuple[str, ...]:
        """The choices; empty where any value is allowed."""
        if isinstance(self.choices, tuple):
            return self.choices
        module, _, table = self.choices.partition(":")
        return tuple(getattr(importlib.import_module(module), table))

    def unsafe(self, value: Any) -> bool:
        """Whether only the user may set this value: a file or a journal may come from a stranger."""
        return any(danger is not None and danger(value) for danger in (self.contacts, self.runs_code, self.exhausts))

    def check(self, value: Any) -> None:
        """Raise ConfigError for a value outside the bounds or the choices."""
        if value is None or value == self.default or value in self.words:
            return
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{self.name} must be a finite number, not {value}")
        if self.positive and value <= 0:
            raise ConfigError(f"{self.name} must be positive, not {value}")
        if self.at_least is not None and value < self.at_least:
            raise ConfigError(f"{self.name} must be at least {self.at_least}, not {value}")
        most = MAX_INTEGER if self.at_most is None and isinstance(value, int) else self.at_most
        if most is not None and value > most:
            raise ConfigError(f"{self.name} must be at most {most}, not {value}")
        if self.address and any(sign in str(value) for sign in "@?#"):
            raise ConfigError(
                f"{self.flag} holds more than an address: a password or key would be stored with the run. "
                "Leave it out; an API key is read from the environment variable MEZZO_API_KEY"
            )
        if self.pairs:
            self.split_pairs(value)
        if self.choices and not self.open_choices:
            values = self.values
            for word in value if isinstance(value, tuple) else (value,):
                if word not in values:
                    raise ConfigError(f"{self.name} is one of {', '.join(values)}, not {word!r}{nearest(word, values)}")

    def split_pairs(self, words: tuple[str, ...] | None) -> dict[str, str]:
        """The `key=value` pairs as a dict."""
        split = [word.partition("=") for word in words or ()]
        if not all(key.strip() and value.strip() for key, _, value in split):
            raise ConfigError(f"{self.name} are pairs such as {self.pairs}, not {','.join(words or ())!r}")
        return {key.strip(): value.strip() for key, _, value in split}


def option(group: str, default: Any, help: str, **facts: Any) -> Any:
    """A field of RunConfig with its metadata; `facts` are fields of Option."""
    return field(default=default, metadata={"option": Option(group=group, default=default, help=help, **facts)})
