"""What the forwards of single modules must know about the forward pass they are part of."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mezzo.engines.torch.forward.probe_point import ProbePoint


@dataclass(slots=True)
class ForwardContext:
    """One forward pass of a population. `Population.context` holds the current one."""

    point: ProbePoint
    """The members; without any, every module computes what its own code says."""
    rows: int = 0
    """Rows of each member."""
    length: int = 0
    """Tokens of a row."""
    words: Tensor | None = None
    """Label words whose logits are read; None: those of the whole vocabulary."""
    positions: Tensor | None = None
    """[P·rows, k]: the positions whose hidden states are still to be selected; None: none, or it has been done."""
    own_tokens: bool = False
    """True where members read different tokens: the text that each of them generated."""
    trim_last_layer: bool = True
    """False: the last layer computes every position, as its own code does."""

    def claim_positions(self) -> Tensor | None:
        """The positions to select, for the first module that can: it is done once."""
        positions, self.positions = self.positions, None
        return positions
