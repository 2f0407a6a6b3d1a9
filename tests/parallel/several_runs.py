"""`torchrun -m tests.parallel.several_runs FILE`: the runs of a JSON file one after the other, their digests into it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mezzo import api
from mezzo.engines import ENGINES
from mezzo.parallel.transports import torchrun
from mezzo.runs.result import Run
from tests.parallel.faulty import FACTORY, plant


def main(path: Path) -> None:
    with torchrun.among("gloo") as driver:
        if driver:
            found = [finetune(**options) for options in json.loads(path.read_text())]
            path.write_text(json.dumps([{"digest": run.digest, "workers": run.workers} for run in found]))


def finetune(fault: dict[str, Any] | None = None, **options: Any) -> Run:
    """A run, of ranks of which one has a fault."""
    if fault:
        plant(Path(options["model"]), **fault)
        ENGINES["torch"] = FACTORY
    return api.finetune(**options)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
