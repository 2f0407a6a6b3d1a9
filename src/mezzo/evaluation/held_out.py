"""A held-out text: its perplexity along a run shows whether training on a reward makes the model forget how to write."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Any

from mezzo.errors import DataError
from mezzo.types import Batch, Prompt, Readout
from mezzo.untrusted import read_first_bytes

# Tokens of a piece, and pieces at most: enough to see forgetting, and cheap beside generation.
PIECE, MAX_PIECES = 64, 64
# Bytes of a file that are read: more than these tokens have.
MAX_BYTES = 100 * PIECE * MAX_PIECES


def held_out_batch(tokenizer: Any, path: str | None, longest: int) -> Batch:
    """The text in pieces, each the continuation of its first token: their mean score is minus the log of the perplexity."""
    text = HELD_OUT_TEXT
    if path is not None:
        try:
            # A decoder, because the last character may be cut.
            text = codecs.getincrementaldecoder("utf-8")().decode(read_first_bytes(Path(path), MAX_BYTES))
            text = text.replace("\r\n", "\n")
        except (OSError, ValueError) as error:
            raise DataError(f"--held-out {path} cannot be read as UTF-8 text: {error}") from None
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    size = min(PIECE, longest)
    starts = range(0, min(len(ids), size * MAX_PIECES), size)
    pieces = [tuple(piece) for start in starts if len(piece := ids[start : start + size]) > 1]
    if not pieces:
        raise DataError(f"--held-out {path} holds no text to measure a perplexity on")
    prompts = (Prompt(piece[:1], label=0, position=0, candidates=(piece[1:],)) for piece in pieces)
    return Batch(tuple(prompts), Readout("candidates"))


HELD_OUT_TEXT = (
    "The harbour was quiet in the early morning. A fisherman mended his nets on the steps and told the children who had come "
    "to watch him about a storm that had taken the roof off the old market. Nobody had been hurt, he said, but for weeks the "
    "baker had sold his bread from a boat. In summer the town fills with visitors, and the water is warm enough to swim in "
    "until late in the year. A small museum shows maps, letters and the tools of shipbuilders. Most people walk up to the "
    "lighthouse, from which one can see the islands on a clear day. The road there is steep, so it is wise to bring something "
    "to drink. When the ferry leaves in the evening, the shops close one after another and the lamps along the quay are lit."
)
