"""Figures as they are shown: shares as percentages, rewards, which may have any scale, as plain numbers."""

from __future__ import annotations

import math

# The metric of a user's own reward; that of a reward by name ends with it, as in `countdown reward`.
REWARD = "reward"


def is_reward_metric(metric: str) -> bool:
    return metric.endswith(REWARD)


def format_figure(value: float, metric: str) -> str:
    """`87.5%`, or a reward as a plain number."""
    return f"{value:.4g}" if is_reward_metric(metric) else f"{value:.1%}"


def describe_loss(loss: float, metric: str, prefix: str = "") -> str:
    """The loss beside a figure; beside a reward it is that of a held-out text, and shown as its perplexity."""
    if is_reward_metric(metric):
        return f"held-out perplexity {math.exp(min(loss, 700)):.4g}"
    return f"{prefix}loss {loss:.4f}"


def describe_failed(failed: float) -> str:
    """What follows a mean reward where some texts have none of their own."""
    return f", {failed:.0f} failed reward{'s' * (failed > 1)}" if failed else ""
