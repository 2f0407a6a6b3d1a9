"""Split jsonl examples into train, dev and test by a hash of their text, so that new lines do not move old ones.

python scripts/split_data.py INPUT.jsonl [INPUT.jsonl ...] --out FOLDER
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

SHARES = {"test": 36, "dev": 12}
"""Percent of the hash range; the rest is train."""


def split_of(row: dict[str, Any]) -> str:
    """The split of a row, from the SHA-256 of its text modulo 100. Rows that share a premise stay together."""
    key = row.get("premise") or row["text"]
    bucket = int(hashlib.sha256(key.encode()).hexdigest()[:12], 16) % 100
    for split, share in SHARES.items():
        if bucket < share:
            return split
        bucket -= share
    return "train"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = [json.loads(line) for path in options.inputs for line in path.read_text().splitlines() if line.strip()]
    unique = {json.dumps(row, ensure_ascii=False, sort_keys=True): row for row in rows}
    options.out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "dev", "test"):
        # Sort by the hash of the whole line, so that the order does not depend on authors or labels.
        keys = sorted(
            (k for k, row in unique.items() if split_of(row) == split),
            key=lambda k: hashlib.sha256(k.encode()).digest(),
        )
        text = "".join(json.dumps(unique[key], ensure_ascii=False) + "\n" for key in keys)
        (options.out / f"{split}.jsonl").write_text(text)
        print(f"{split}: {len(keys)}")


if __name__ == "__main__":
    main()
