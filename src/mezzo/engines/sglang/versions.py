"""Which SGLang is there, and whether it is one this engine was run with."""

from __future__ import annotations

import importlib.metadata
import re

from mezzo.errors import ConfigError

OLDEST, NEWEST = (0, 5, 17), (0, 5, 23)
"""The range that is accepted. CI runs the newest; where the oldest differs is known from its source, and detected."""

INSTALL = (
    "pip install 'mezzo[sglang]' beside a GPU; without one, scripts/sglang_env/build.sh FOLDER makes an environment "
    "in which SGLang runs on the CPU (see docs/sglang.md)"
)


def check_version(found: str | None = None) -> str:
    """The installed version, or an explanation of what to install."""
    if found is None:
        try:
            found = importlib.metadata.version("sglang")
        except importlib.metadata.PackageNotFoundError:
            raise ConfigError(f"the sglang engine needs SGLang, which is not installed: {INSTALL}") from None
    refuse_version(found)
    return found


def refuse_version(found: str, where: str = "") -> None:
    """Raise unless `found` lies in the supported range."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", found)
    if not numbers or not OLDEST <= tuple(int(n) for n in numbers.groups()) <= NEWEST:
        shown = " to ".join(".".join(map(str, version)) for version in (OLDEST, NEWEST))
        raise ConfigError(
            f"{where}SGLang {found} is not supported: this engine reaches into SGLang's workers and knows versions "
            f"{shown}. Install one of these, e.g. pip install sglang=={'.'.join(map(str, NEWEST))}"
        )
