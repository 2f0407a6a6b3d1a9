"""Trained tensors on disk at some journal positions: a cache. Deleting it costs only time."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mezzo.errors import JournalError
from mezzo.journal.atomic_files import explain_os_errors, write_atomically
from mezzo.types import TrainedTensor

NAME = re.compile(r"step-(\d{9})\.safetensors$")
# Bytes of a safetensors file besides the values: names and shapes.
MAX_HEADER = 2**24
Tensors = dict[str, npt.NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Snapshots:
    """The snapshot folder of a run."""

    folder: Path

    def save(self, step: int, tensors: Tensors, digest: str, keep: tuple[int, ...] = ()) -> None:
        """Write a snapshot, then delete all others but those of the steps in `keep`."""
        from safetensors.numpy import save

        data = save(dict(tensors), metadata={"step": str(step), "digest": digest})
        write_atomically(self.path(step), data)
        with explain_os_errors(self.folder):
            for other in self.steps():
                if other != step and other not in keep:
                    self.path(other).unlink(missing_ok=True)

    def load(self, step: int, trained: Sequence[TrainedTensor]) -> Tensors | None:
        """The tensors; None when the file is missing or broken, or too large to hold these: it is then not opened."""
        from safetensors import SafetensorError, safe_open

        largest = 4 * sum(math.prod(t.shape) for t in trained) + MAX_HEADER
        try:
            if not self.path(step).is_file() or self.path(step).stat().st_size > largest:
                return None  # a pipe would be waited for
            with safe_open(self.path(step), framework="numpy") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, ValueError, KeyError, JournalError):
            return None

    def steps(self) -> list[int]:
        """Steps with a snapshot, newest first."""
        if not self.folder.is_dir():
            return []
        found = (NAME.match(name) for name in os.listdir(self.folder))
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:09d}.safetensors"
