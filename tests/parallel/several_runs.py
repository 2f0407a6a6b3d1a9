"""`torchrun -m tests.parallel.several_runs FILE`: the runs of a JSON file one after the other, their digests into it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mezzo import api
from mezzo.parallel import ranks


def main(path: Path) -> None:
    with ranks.among("gloo") as driver:
        if driver:
            found = [api.finetune(**options) for options in json.loads(path.read_text())]
            path.write_text(json.dumps([{"digest": run.digest, "workers": run.workers} for run in found]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
