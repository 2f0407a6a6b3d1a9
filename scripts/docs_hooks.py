"""mkdocs hooks: insert the table of options, and show the paths of repository files instead of links to them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

OUTSIDE_LINK = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)(?:#[^)\s]*)?\)")
"""A link from a page to a file outside docs/, which a checkout has and the site does not."""
OPTIONS_MARKER = "<!-- the table of options -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    if OPTIONS_MARKER in markdown:
        markdown = markdown.replace(OPTIONS_MARKER, options_table())
    return OUTSIDE_LINK.sub(lambda link: link[1] if "`" in link[1] else f"{link[1]} (`{link[2]}`)", markdown)


def options_table() -> str:
    """A Markdown table of every option, from the metadata in the code."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
    try:
        from mezzo.config import OPTIONS
    finally:
        sys.path.pop(0)
    rows = ["| option | group | default | |", "|---|---|---|---|"]
    for option in OPTIONS.values():
        default = "" if option.default in (None, "", ()) else f"`{option.default}`"
        description = option.help.replace("|", "\\|").replace("*", "\\*")
        rows.append(f"| `{option.name}` | {option.group} | {default} | {description} |")
    return "\n".join(rows)
