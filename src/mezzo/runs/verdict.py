"""The verdict on a finished run: what became of it, in a few words and a sentence."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

from mezzo.evaluation.evaluate import Z95
from mezzo.evaluation.figures import format_figure, is_reward_metric
from mezzo.runs.outcome import Gain, Gains

Tone = Literal["good", "active", "neutral", "bad"]
# All other verdicts are bad.
TONES: dict[str, Tone] = {
    "worked": "good",
    "unclear": "neutral",
    "not tested": "neutral",
    "nothing to gain": "neutral",
    "better than zero-shot, below calibrated": "neutral",
    "better than zero-shot, below the majority class": "neutral",
}
# By method, what to lower where steps are skipped.
SMALLER = {"solve": "--eps", "spsa": "--lr or --eps", "es": "--lr or --eps", "adam": "--lr"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a run: a few words, whether that is good, and why."""

    word: str
    tone: Tone
    reason: str

    def __str__(self) -> str:
        return f"{self.word}: {self.reason}"


def parse_verdict(text: str) -> Verdict:
    """The verdict that a run recorded."""
    word, _, reason = text.partition(": ")
    return _verdict(word, reason)


def _verdict(word: str, reason: str) -> Verdict:
    return Verdict(word, TONES.get(word, "bad"), reason)


def judge(
    findings: Set[str], method: str, best_step: int, gains: Gains, skipped: int = 0, failure: str = ""
) -> Verdict:
    """The verdict: trouble first (`findings` are the kinds of `health`), then whether anything moved, then the figures.
    `skipped` steps moved nothing, because they were too large or had no finite loss. `failure`: why no text of the run has a
    reward of its own."""
    plain, tested = gains.plain, _describe(gains)
    better = plain is not None and plain.better
    gained = plain is not None and plain.after > plain.before
    at = f"the checkpoint of step {best_step} that was tested: {tested}"
    if failure:
        return _verdict("no rewards", f"every call of the reward failed, so that nothing could be learned: {failure}")
    if "diverging" in findings:
        remedy = "a smaller --lr is needed" if method != "solve" else "a smaller --eps may help"
        return _verdict("diverged", f"the loss grew instead of falling: {remedy}; {at}")
    if "forgetting" in findings and not (better or (gained and "no signal" not in findings)):
        return _verdict("forgets", _describe_forgetting(gains, method, best_step))
    if "no signal" in findings and not better:
        return _verdict("no signal", f"steps without any slope moved nothing: a larger --eps is needed; {tested}")
    if "overfitting" in findings and not better:
        return _verdict("overfits", f"the training loss fell and dev became worse; {at}")
    if plain is None:
        return _verdict("not tested", tested)
    figure = format_figure(plain.after, plain.metric)
    same = f"{figure} before and after training (n={gains.n:,})"
    if plain.after == plain.before == 1 and not is_reward_metric(plain.metric):
        return _verdict("nothing to gain", f"{same}. More examples to test on, or harder ones, would tell")
    if best_step == 0:
        as_it_came = f"no step was better on dev than the model as it came ({figure}, n={gains.n:,})"
        return _verdict("did not move", f"{as_it_came}. {_advise(method, skipped)}")
    if plain.after == plain.before:
        return _verdict("no gain", f"{same}, although the weights moved. {_advise(method, skipped)}")
    if plain.worse:
        return _verdict("got worse", tested)
    if not better:
        return _verdict("unclear", f"{tested}; {_say_what_would_tell(gains.n, plain)}")
    late = f"; it overfits after step {best_step}, which is what was tested" if "overfitting" in findings else ""
    return _judge_gain(gains, plain, tested + late)


def _judge_gain(gains: Gains, plain: Gain, tested: str) -> Verdict:
    """Better than the untrained model: is it more than the prompt's prior, or than a constant answer?"""
    calibrated = gains.calibrated
    if calibrated is not None and plain.after < calibrated.before:
        bias = f"without training, removing the prompt's bias alone gives {calibrated.before:.1%}"
        return _verdict("better than zero-shot, below calibrated", f"{tested}; {bias}")
    if gains.majority is not None and plain.after <= gains.majority:
        return _verdict("better than zero-shot, below the majority class", tested)
    if calibrated is not None and not calibrated.better:
        doubt = "the gain may be the prompt's bias alone"
        return _verdict("unclear", f"{tested}; {doubt}; {_say_what_would_tell(gains.n, calibrated)}")
    return _verdict("worked", tested)


def _describe_forgetting(gains: Gains, method: str, best_step: int) -> str:
    rose = gains.forgetting.at_worst if gains.forgetting else "the perplexity of the held-out text rose by half or more"
    tested = f"the checkpoint of step {best_step} that was tested: {_describe_figures(gains)}"
    return f"{rose}, and the texts became no better: a smaller {SMALLER[method]} is needed; {tested}"


def _describe(gains: Gains) -> str:
    """The figures, and whether the tested checkpoint has forgotten."""
    forgot = gains.forgetting.when_tested if gains.forgetting else ""
    return _describe_figures(gains) + (f"; it forgets: {forgot}" if forgot else "")


def _describe_figures(gains: Gains) -> str:
    if gains.plain is None:
        return "the untrained model was not tested" if gains.n else "there was nothing to test it on"
    parts = [f"{gains.plain} (n={gains.n:,})"]
    if gains.calibrated is not None:
        parts.append(f"calibrated {gains.calibrated}")
    if gains.majority is not None and gains.plain.after <= gains.majority:
        parts.append(f"always answering the most frequent label gives {gains.majority:.1%}")
    return "; ".join(parts)


def _advise(method: str, skipped: int) -> str:
    if skipped:
        return f"A smaller {SMALLER[method]} may help: {skipped:,} steps were skipped"
    if method == "es":
        return "A larger --lr or --eps, more steps, --samples or --batch-size may help"
    help = "A larger --lr, more steps" if method != "solve" else "More training examples, a larger --budget"
    return f"{help} or another --template or --words may help"


def _say_what_would_tell(n: int, gain: Gain) -> str:
    """How far apart two figures must be on so few examples."""
    if is_reward_metric(gain.metric):
        return "more test examples or other seeds would tell"
    half = 100 * Z95 * math.sqrt(gain.after * (1 - gain.after) / n) if n and 0 < gain.after < 1 else 0.0
    few = f"{n:,} examples leave about ±{half:.0f} points to chance, " if half >= 1 else ""
    return f"{few}more of them or other seeds would tell"
