"""Which version of SGLang is installed or running, and whether this engine supports it."""

from __future__ import annotations

import importlib.metadata
import re

from mezzo.errors import ConfigError

# The supported range. CI runs the newest; where the oldest differs is known from its source, and detected.
OLDEST, NEWEST = (0, 5, 17), (0, 5, 23)

INSTALL = (
    "pip install 'mezzo[sglang]' beside a GPU; without one, scripts/sglang_env/build.sh FOLDER makes an environment "
    "in which SGLang runs on the CPU (see docs/sglang.md)"
)


def installed_version() -> str:
    """The installed version; raise ConfigError if there is none, or an unsupported one."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"the sglang engine needs SGLang, which is not installed: {INSTALL}") from None
    refuse_version(version)
    return version


def refuse_version(version: str, where: str = "") -> None:
    """Raise ConfigError unless `version` lies in the supported range."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if not numbers or not OLDEST <= tuple(int(n) for n in numbers.groups()) <= NEWEST:
        supported = " to ".join(".".join(map(str, each)) for each in (OLDEST, NEWEST))
        raise ConfigError(
            f"{where}SGLang {version} is not supported: this engine depends on SGLang's internals and supports versions "
            f"{supported}. Install one of these, e.g. pip install sglang=={'.'.join(map(str, NEWEST))}"
        )
