"""Figures as they are shown: shares as percentages, rewards, which may have any scale, as plain numbers."""

from __future__ import annotations

import math

# The metric of a user's own reward; that of a reward by name ends with it, as in `countdown reward`.
REWARD = "reward"
LARGEST_LOSS = 700.0


def is_reward_metric(metric: str) -> bool:
    return metric.endswith(REWARD)


def format_figure(value: float, metric: str) -> str:
    """`87.5%`, or a reward as a plain number."""
    return f"{value:.4g}" if is_reward_metric(metric) else f"{value:.1%}"


def perplexity(loss: float) -> float:
    """Of a text with this loss per token; of one that no model would write, a number that a float holds."""
    return math.exp(min(loss, LARGEST_LOSS))


def format_perplexity(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= value < 1e9 else f"{value:.4g}"


def describe_loss(loss: float, metric: str, prefix: str = "") -> str:
    """The loss beside a figure; beside a reward it is that of a held-out text, and shown as its perplexity."""
    if is_reward_metric(metric):
        return f"held-out perplexity {format_perplexity(perplexity(loss))}"
    return f"{prefix}loss {loss:.4f}"


def describe_failed(failed: float) -> str:
    """What follows a mean reward where some texts have none of their own."""
    return f", {failed:.0f} failed reward{'s' * (failed > 1)}" if failed else ""
