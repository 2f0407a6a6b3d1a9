"""What comes from files and servers of unknown origin: harmless when it is shown; and no secrets in what is shown."""

from __future__ import annotations

import re

# Control codes other than the end of a line and the tab, codes that turn the direction of text, halves of characters.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


# In an address, and in one that was taken for a path: `http:/user:password@host`.
_CREDENTIALS = re.compile(r"(?<=:/)(/?)[^\s/?#]*@")


def without_credentials(text: str) -> str:
    """Text whose addresses have lost user names and passwords."""
    return _CREDENTIALS.sub(r"\1", text)


def printable(text: str) -> str:
    """Text that a terminal shows and does not obey: codes become escapes such as \\u001b, which JSON and TOML read back."""
    return _UNPRINTABLE.sub(lambda code: f"\\u{ord(code[0]):04x}", text)
