"""`torchrun -m tests.parallel.torchrun_runs FILE`: the runs that a JSON file lists, whose results replace the list."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from mezzo import api
from mezzo.engines import ENGINES
from mezzo.parallel.transports import torchrun
from mezzo.runs.result import Run
from tests.parallel.faulty_engine import FACTORY, set_fault


def main(path: Path) -> None:
    with torchrun.join_ranks("gloo") as is_driver:
        if is_driver:
            runs = [finetune(**options) for options in json.loads(path.read_text())]
            path.write_text(json.dumps([{"digest": run.digest, "workers": run.workers} for run in runs]))


def finetune(fault: dict[str, Any] | None = None, **options: Any) -> Run:
    """A run in which one rank may have a fault."""
    if fault:
        set_fault(Path(options["model"]), **fault)
        ENGINES["torch"] = dataclasses.replace(ENGINES["torch"], factory=FACTORY)
    return api.finetune(**options)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
