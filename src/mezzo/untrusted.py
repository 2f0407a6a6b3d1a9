"""What comes from files and servers of unknown origin: bounded when it is read, harmless when it is shown."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Bytes of a file of settings, and dots in one of its keys: tomllib needs memory by the square of these.
MAX_SETTINGS, MAX_DOTS = 2**18, 16
# Strings and comments of TOML. What is not closed extends to the end: such a file is refused anyway.
_TOML_TEXT = re.compile(
    r'"""(?:\\.|[^\\])*?(?:"{3,5}|\\?\Z)|'
    + r"'''.*?(?:'{3,5}|\Z)|"
    + r'"(?:\\.|[^"\\\n])*"?|'
    + r"'[^'\n]*'?|\#[^\n]*",
    re.DOTALL,
)
# Keys and numbers, where no spaces are left.
_TOML_WORD = re.compile(r"[\w.-]+")
# Control codes other than the end of a line and the tab, codes that turn the direction of text, halves of characters.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# In an address, and in one that was taken for a path: `http:/user:password@host`.
_CREDENTIALS = re.compile(r"(?<=:/)(/?)[^\s/?#]*@")
# An address up to its query or fragment, and these where it has them.
_ADDRESS = re.compile(r"(\w:/[^\s\"<>?#]*)([^\s\"<>]*)")
# What may follow an address in a text, a list or a command, and is no part of it.
_AFTER_ADDRESS = "'`,;.:!)]}"
# Digits of an integer: mezzo writes none with more, and a float can hold these.
MAX_DIGITS = 100


def without_credentials(text: str) -> str:
    """Text whose addresses have lost user names, passwords, queries and fragments."""
    return _ADDRESS.sub(_cut_query, _CREDENTIALS.sub(r"\1", text))


def _cut_query(found: re.Match[str]) -> str:
    address, query = found.groups()
    return address + query[len(query.rstrip(_AFTER_ADDRESS)) :]


def values_without_credentials(value: Any) -> Any:
    """A copy of settings or of an event, each of its texts without credentials."""
    if isinstance(value, Mapping):
        return {name: values_without_credentials(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [values_without_credentials(inner) for inner in value]
    return without_credentials(value) if isinstance(value, str) else value


def printable(text: str) -> str:
    """Text that a terminal shows and does not obey: codes become escapes such as \\u001b, which JSON and TOML read back."""
    return _UNPRINTABLE.sub(lambda code: f"\\u{ord(code[0]):04x}", text)


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a file; ValueError if it has more bytes, or may never end."""
    data = read_first_bytes(path, limit + 1)
    if len(data) > limit:
        raise ValueError(f"it has more than {limit:,} bytes")
    return data


def read_first_bytes(path: Path, count: int) -> bytes:
    """The beginning of a file; ValueError if it is not a file, and may never end."""
    if path.exists() and not path.is_file():
        raise ValueError("it is not a file")
    with path.open("rb") as file:
        return file.read(min(count, os.fstat(file.fileno()).st_size + 1))


def parse_json(text: bytes | str) -> Any:
    """A value of JSON; ValueError also for an integer that no float could hold, RecursionError if it is nested too deeply."""
    return json.loads(text, cls=_BoundedDecoder)


class _BoundedDecoder(json.JSONDecoder):
    def __init__(self) -> None:
        super().__init__(parse_int=_parse_int)


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has more than {MAX_DIGITS} digits")
    return int(digits)


def read_settings(path: Path) -> Any:
    """The content of a JSON, YAML or TOML file; ValueError or RecursionError if it cannot be one of settings."""
    text = read_bytes(path, MAX_SETTINGS).decode()
    if path.suffix == ".json":
        return parse_json(text)
    if path.suffix in (".yaml", ".yml"):
        return _bounded(_read_yaml(text))
    words = _TOML_WORD.findall(_TOML_TEXT.sub("", text).replace(" ", "").replace("\t", ""))
    if any(word.count(".") >= MAX_DOTS for word in words):
        raise ValueError(f"a key has {MAX_DOTS} dots or more")
    return _bounded(tomllib.loads(text))


def _bounded(value: Any) -> Any:
    """Settings as they are; ValueError for a key that is not text, or an integer that no float could hold."""
    if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:  # hexadecimal ones are parsed at any length
        raise ValueError(f"a number has more than {MAX_DIGITS} digits")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(f"the key {str(_bounded(key))[:80]} is not text; put it in quotes")
            _bounded(inner)
    elif isinstance(value, list | tuple | set):
        for inner in value:
            _bounded(inner)
    return value


def _read_yaml(text: str) -> Any:
    """Plain values only. Numbers such as 1e-3, which YAML reads as text, are left to the options that they belong to."""
    import yaml  # transformers needs it too

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):  # a few of them can stand for more values than a memory holds
                raise ValueError("it has an alias (*), which settings do not need")
            return super().compose_node(parent, index)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except (KeyError, AttributeError, IndexError, TypeError):  # a tag on what is not of its type, such as !!bool maybe
        raise ValueError("a value is not of the type that its tag names") from None
