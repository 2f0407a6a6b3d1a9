"""Write the table of architectures in docs/sglang.md: how far SGLang's scores are from the torch engine's, by tiny models.

.venv-sglang/bin/python scripts/sglang_architectures.py              # all of them: two engine starts each, about half an hour
.venv-sglang/bin/python scripts/sglang_architectures.py opt bert     # these; the other rows stay as they are
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "sglang.md"
BEGIN, END = "<!-- table of architectures: begin -->\n", "<!-- table of architectures: end -->\n"
HEAD = "| model | class | `lora` | `matrices` |\n|---|---|---|---|\n"
# Examples of what is refused before SGLang starts.
REFUSED = {"gpt2": "causal", "gpt_neox": "causal", "phi3": "causal", "modernbert": "masked", "distilbert": "masked"}
HEADS = "classification head"


def expected_rows() -> list[str]:
    """The first cells of the table, in its order."""
    from mezzo.engines.sglang.support import ARCHITECTURES, ENCODERS

    return [*ARCHITECTURES, *ENCODERS, *REFUSED, HEADS]


def read_table(page: str) -> dict[str, str]:
    """The lines of the table by their first cells."""
    table = page.partition(BEGIN + HEAD)[2].partition(END)[0]
    return {
        line.split("`")[1] if "`" in line.split("|")[1] else line.split("|")[1].strip(): line
        for line in table.splitlines()
    }


def make_row(name: str) -> str:
    """Run a tiny model of a type in both spaces and say how far its scores are off, or why it is refused."""
    from tests.sglang.tiny_models import CAUSAL, MASKED, SPACES, save_tiny, score_difference

    from mezzo.engines.sglang.support import ENCODERS, refuse_architecture, refuse_head
    from mezzo.errors import MezzoError

    try:
        if name == HEADS:
            refuse_head(2)
        if name in REFUSED:
            refuse_architecture(name, REFUSED[name])  # type: ignore[arg-type]
    except MezzoError as error:
        cell = name if name == HEADS else f"`{name}`"
        return (
            f"| {cell} | {'any' if name == HEADS else class_name(name, REFUSED[name])} | {refusal(error)} | as `lora` |"
        )
    family = "masked" if name in ENCODERS else "causal"
    cells = [f"`{name}`", class_name(name, family)]
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny(name, folder, family, **(CAUSAL | MASKED)[name])
        for space in SPACES.values():
            try:
                cells.append(f"{score_difference(model, family, space):.0e}")  # type: ignore[arg-type]
            except MezzoError as error:
                cells.append(refusal(error))
    return f"| {' | '.join(cells)} |"


def refusal(error: Exception) -> str:
    """The line of a refusal, without the list of what is not refused."""
    return "refused: " + str(error).splitlines()[0].partition(" (tested:")[0].replace("|", "\\|").replace("*", "\\*")


def class_name(model_type: str, family: str) -> str:
    from transformers.models.auto import modeling_auto

    names = {
        "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    }
    return f"`{names[family][model_type]}`"


def main(names: list[str]) -> None:
    if unknown := set(names) - set(expected_rows()):
        sys.exit(f"{', '.join(sorted(unknown))} is no row of the table; rows: {', '.join(expected_rows())}")
    for name in names or expected_rows():
        row = make_row(name)
        print(row, flush=True)
        before, _, rest = PAGE.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        rows = read_table(PAGE.read_text()) | {name: row}
        lines = "".join(f"{rows[each]}\n" for each in expected_rows() if each in rows)
        PAGE.write_text(before + BEGIN + HEAD + lines + END + after)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(sys.argv[1:])
