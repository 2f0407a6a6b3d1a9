"""What mkdocs is told beside mkdocs.yml: the table of options, and that files of the repository are named, not linked to."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)(?:#[^)\s]*)?\)")
"""A link from a page to a file outside docs/, which a checkout has and the site does not."""


OPTIONS = "<!-- the table of options -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    if OPTIONS in markdown:
        markdown = markdown.replace(OPTIONS, table_of_options())
    return OUTSIDE.sub(lambda link: link[1] if "`" in link[1] else f"{link[1]} (`{link[2]}`)", markdown)


def table_of_options() -> str:
    """Every option of a run, from the one place that defines them."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
    try:
        from mezzo.config import OPTIONS
    finally:
        sys.path.pop(0)
    rows = ["| option | group | default | |", "|---|---|---|---|"]
    for option in OPTIONS.values():
        default = "" if option.default in (None, "", ()) else f"`{option.default}`"
        about = option.help.replace("|", "\\|").replace("*", "\\*")
        rows.append(f"| `{option.name}` | {option.group} | {default} | {about} |")
    return "\n".join(rows)
