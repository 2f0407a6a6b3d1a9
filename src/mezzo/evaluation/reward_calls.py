"""One call of a reward function: its rewards as numbers, or why there are none."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mezzo.method.objectives import describe_failure
from mezzo.types import LARGEST_REWARD

Call = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Failure:
    """What became of a call that has no rewards: `kind` is error, too large, time-out, memory or killed."""

    kind: str
    text: str


Outcome = list[float] | Failure


def call_function(function: Callable[..., Any], call: Call) -> Outcome:
    """The rewards that a function returns, one or several; a Failure where they are no finite numbers."""
    try:
        rewards = _read_rewards(function(**call))
    except KeyboardInterrupt:
        raise
    except MemoryError:
        return Failure("memory", "it needed more memory than it may have")
    except _NoReward as error:
        return Failure("error", str(error))
    except BaseException as error:  # whatever a user's function raises, sys.exit() too
        return Failure("error", describe_failure(error))
    if not all(map(math.isfinite, rewards)):
        return Failure("error", "it returned a reward that is not a finite number")
    if (largest := max(rewards, key=abs, default=0.0)) and abs(largest) > LARGEST_REWARD:
        return Failure("too large", f"it returned the reward {largest:g}, beyond ±{LARGEST_REWARD:,.0f}: scale it down")
    return rewards


class _NoReward(Exception):
    """A function returned something else than numbers."""


def _read_rewards(result: Any) -> list[float]:
    """One number, or any sequence of them: arrays and tensors, also of no dimension, and generators."""
    if not isinstance(result, (str, bytes, Mapping)):
        with contextlib.suppress(TypeError):
            result = iter(result)
    return [_read_number(value) for value in result] if isinstance(result, Iterator) else [_read_number(result)]


def _read_number(value: Any) -> float:
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except OverflowError:  # an integer
        return sys.float_info.max if value > 0 else -sys.float_info.max
    except (TypeError, ValueError, RuntimeError):
        pass
    raise _NoReward(f"it returned a value of type {type(value).__name__}, and a reward is a number")
