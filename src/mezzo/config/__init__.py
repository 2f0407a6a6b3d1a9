"""The configuration of a run: its options, and how values become a checked RunConfig."""

from mezzo.config.reading import convert, flatten, from_file, from_mapping, is_switch, unnamed_options
from mezzo.config.run_config import OPTIONS, RunConfig, option_names

__all__ = [
    "OPTIONS",
    "RunConfig",
    "convert",
    "flatten",
    "from_file",
    "from_mapping",
    "is_switch",
    "option_names",
    "unnamed_options",
]
