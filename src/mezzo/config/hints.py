"""What an unknown option was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from mezzo.config.run_config import OPTIONS

# From which similarity on a word counts as misspelt: above that of `lora` and `lr`, or `num_train` and `train`.
SIMILAR = 0.75
SHORTEST_START = 3
MOST_HINTS = 2


def similar_options(word: str, names: Collection[str]) -> list[tuple[str, str]]:
    """Options among `names` that `word` may stand for, each with the value that it names, or with an empty string.

    In this order: what another program calls the option, a value of an option, the start of a name, a misspelt name.
    """
    aliases = {alias: name for name in names if name in OPTIONS for alias in OPTIONS[name].aliases}
    if word in names or word in aliases:
        return [(aliases.get(word, word), "")]
    found = [(name, word) for name in names if name in OPTIONS and word in OPTIONS[name].values]
    if not found and len(word) >= SHORTEST_START:
        found = [(name, "") for name in names if name.startswith(word)]
    if 0 < len(found) <= MOST_HINTS:
        return found
    close = difflib.get_close_matches(word, [*names, *aliases], n=1, cutoff=SIMILAR)
    return [(aliases.get(match, match), "") for match in close]
