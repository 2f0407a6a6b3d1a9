"""List sentences of different splits that resemble each other; exit 1 where there are any.

python scripts/near_duplicates.py FOLDER [--above 0.4]

Two sentences resemble each other by the share of five-letter sequences that they have in common (Jaccard).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path

Pair = tuple[float, str, str]


def sequences(text: str) -> frozenset[str]:
    """The five-letter sequences of a sentence, without case and punctuation."""
    plain = " ".join(re.findall(r"[a-z0-9']+", text.lower()))
    return frozenset(plain[start : start + 5] for start in range(max(1, len(plain) - 4)))


def near_duplicates(splits: dict[str, list[str]], above: float) -> list[Pair]:
    """Pairs across splits whose resemblance is above the limit, the closest first."""
    rows = [(split, text, sequences(text)) for split, texts in splits.items() for text in texts]
    places: dict[str, list[int]] = {}
    found: list[Pair] = []
    for number, (split, text, own) in enumerate(rows):
        common = Counter(other for sequence in own for other in places.get(sequence, ()))
        for other, count in common.items():
            resemblance = count / (len(own) + len(rows[other][2]) - count)
            if resemblance > above and rows[other][0] != split:
                found.append((resemblance, rows[other][1], text))
        for sequence in own:
            places.setdefault(sequence, []).append(number)
    return sorted(found, reverse=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--above", type=float, default=0.4)
    options = parser.parse_args()
    splits = {
        path.stem: [json.loads(line)["text"] for line in path.read_text().splitlines()]
        for path in sorted(options.folder.glob("*.jsonl"))
    }
    found = near_duplicates(splits, options.above)
    for resemblance, one, other in found:
        print(f"{resemblance:.2f}  {one}  |  {other}")
    print(f"{len(found)} pairs above {options.above:g} in {sum(map(len, splits.values()))} sentences")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
