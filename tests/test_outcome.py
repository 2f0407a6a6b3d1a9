"""What training changed, and the verdict on it."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import mezzo
from mezzo.evaluation.evaluate import DetailedEvaluation, Evaluation, evaluate_scores, wilson_interval
from mezzo.runs.outcome import (
    Assessment,
    Forgetting,
    Gain,
    Gains,
    collect_answers,
    describe_changes,
    is_certain,
    measure_gains,
    read_answers,
)
from mezzo.runs.verdict import TONES, judge, parse_verdict
from mezzo.tasks import Task, get_task
from mezzo.types import Batch, Example, Prompt, Readout

SENTIMENT = get_task("sst-2", "masked")
CHOICE = get_task("copa", "causal")


def examples(labels: list[int]) -> list[Example]:
    return [Example({"text": f"sentence {number}"}, label) for number, label in enumerate(labels)]


def assess(margins: list[float], labels: list[int], task: Task = SENTIMENT) -> Assessment:
    """An evaluation in which the second label is better by these margins."""
    scores = np.array([[0.0, margin] for margin in margins])
    batch = Batch(tuple(Prompt((1,), label) for label in labels), Readout("words", words=(1, 2)))
    found = evaluate_scores(scores, batch, "accuracy", task.kind == "classification")
    right = scores.argmax(axis=1) == np.array(labels)
    detail = DetailedEvaluation(found, tuple(right.tolist()), scores)
    return Assessment(found, collect_answers(detail, examples(labels), task))


def test_answer_without_a_score_is_wrong():
    """NaN must not pass for the first label."""
    answers = assess([np.nan, np.nan, -1.0, 1.0], [0, 1, 0, 1]).answers
    assert answers.right == answers.calibrated_right == (False, False, True, True)


# ---- chance


def test_certainty_is_the_exact_sign_test():
    """Against all outcomes of so many fair coins."""
    for count in range(1, 13):
        heads = [sum(coins) for coins in itertools.product((0, 1), repeat=count)]
        for corrected in range(count + 1):
            distance = abs(corrected - count / 2)
            rarer = sum(abs(number - count / 2) >= distance for number in heads) / len(heads)
            assert is_certain(corrected, count - corrected) == (rarer < 0.05), (corrected, count)


def test_certainty_of_many_changes_and_of_none():
    assert not is_certain(0, 0)
    assert is_certain(540, 460) and not is_certain(515, 485)
    assert is_certain(5200, 4800) and not is_certain(5050, 4950), "by the normal approximation"


def test_the_same_gain_is_chance_on_20_examples_and_certain_on_2000():
    for n, certain in ((20, False), (2000, True)):
        labels = [0, 1] * (n // 2)
        before = [1.0] * n  # always the second label: 50%
        after = [(-1.0 if label == 0 and number % 10 < 2 else 1.0) for number, label in enumerate(labels)]
        gains = measure_gains(assess(before, labels), assess(after, labels), examples(labels), SENTIMENT)
        assert gains.plain is not None
        assert (gains.plain.before, gains.plain.after) == (0.5, 0.6)
        assert gains.plain.certain == certain


def test_calibrated_is_compared_with_calibrated():
    """Training that only moves the threshold gains nothing once both are calibrated."""
    labels = [0] * 50 + [1] * 50
    quality = [-1.0] * 40 + [1.0] * 10 + [-1.0] * 10 + [1.0] * 40
    biased = assess([3 + 0.1 * q for q in quality], labels)
    shifted = assess(quality, labels)
    gains = measure_gains(biased, shifted, examples(labels), SENTIMENT)
    assert gains.plain == Gain(0.5, 0.8, True)
    assert gains.calibrated == Gain(0.8, 0.8, False)
    assert gains.majority == 0.5
    verdict = judge(set(), "solve", 3, gains)
    assert verdict.word == "unclear"
    assert "the gain may be the prompt's bias alone" in verdict.reason


def test_candidates_have_neither_prior_nor_majority():
    labels = [0, 1, 1]
    first, second = assess([1.0] * 3, labels, CHOICE), assess([-1.0, 1.0, 1.0], labels, CHOICE)
    gains = measure_gains(first, second, examples(labels), CHOICE)
    assert first.evaluation.calibrated is None
    assert "calibrated" not in repr(first.evaluation)
    assert (gains.calibrated, gains.majority) == (None, None)
    assert gains.plain is not None and gains.plain.after == 1.0
    assert "calibrated" not in judge(set(), "solve", 1, gains).reason
    assert describe_changes(first, second, examples(labels), CHOICE)["classes"] is None


def test_without_answers_the_interval_decides():
    for before, certain in ((0.70, True), (0.78, False)):
        evaluations = [
            Assessment(Evaluation("f1", value, wilson_interval(value, 200), value, 0.5, 200, None))
            for value in (before, 0.8)
        ]
        gains = measure_gains(*evaluations, examples([0, 1] * 100), SENTIMENT)
        assert gains.plain == Gain(before, 0.8, certain, "f1")


# ---- the verdict


def gains(before, after, certain=True, calibrated=None, majority=0.5, n=615) -> Gains:
    return Gains(n, Gain(before, after, certain), calibrated, majority)


BIAS = Gain(0.728, 0.75, False)
VERDICTS = [
    ("worked", gains(0.6, 0.85, calibrated=Gain(0.728, 0.86, True)), {}),
    ("worked", gains(0.6, 0.85), {"findings": {"overfitting"}}),
    ("worked", gains(0.6, 0.85), {"findings": {"no signal"}}),
    ("better than zero-shot, below calibrated", gains(0.6, 0.7, calibrated=BIAS), {}),
    ("better than zero-shot, below the majority class", gains(0.3, 0.6, majority=0.7), {}),
    ("unclear", gains(0.6, 0.62, certain=False, n=20), {}),
    ("unclear", gains(0.6, 0.59, certain=False), {}),
    ("unclear", gains(0.6, 0.75, calibrated=BIAS), {}),
    ("no gain", gains(0.6, 0.6, certain=False, calibrated=Gain(0.8, 0.8, False)), {}),
    ("nothing to gain", gains(1.0, 1.0, certain=False), {}),
    ("nothing to gain", gains(1.0, 1.0, certain=False), {"best_step": 0}),
    ("did not move", gains(0.6, 0.6, certain=False), {"best_step": 0}),
    ("got worse", gains(0.7, 0.5), {}),
    ("overfits", gains(0.6, 0.62, certain=False), {"findings": {"overfitting"}}),
    ("diverged", gains(0.6, 0.6, certain=False), {"findings": {"diverging"}, "best_step": 0}),
    ("no signal", gains(0.6, 0.6, certain=False), {"findings": {"no signal"}, "best_step": 0}),
    ("not tested", Gains(), {}),
]


@pytest.mark.parametrize(("word", "found", "changes"), VERDICTS)
@pytest.mark.parametrize("method", ["solve", "spsa"])
def test_verdict(word, found, changes, method):
    verdict = judge(**{"findings": set(), "best_step": 9, **changes}, method=method, gains=found)
    assert verdict.word == word
    assert ("--lr" in verdict.reason) == (method == "spsa" and word in ("did not move", "no gain", "diverged"))
    after_skips = judge(**{"findings": set(), "best_step": 9, **changes}, method=method, gains=found, skipped=3)
    assert after_skips.word == verdict.word
    assert "A larger" not in after_skips.reason and "arger --lr" not in after_skips.reason
    assert parse_verdict(str(verdict)) == verdict


def rewards(before, after, certain=True, perplexities=(212.4, 212.4, 32271.0)) -> Gains:
    return Gains(18, Gain(before, after, certain, "reward"), forgetting=Forgetting(*perplexities))


SAME, ROSE = rewards(0.08, 0.08, certain=False), (212.4, 13800.0, 13800.0)
ES_VERDICTS = [
    ("forgets", SAME, {"findings": {"forgetting", "no signal"}, "best_step": 0}),
    ("forgets", SAME, {"findings": {"forgetting"}, "best_step": 0}),
    ("forgets", SAME, {"findings": {"forgetting"}}),
    ("forgets", rewards(0.08, 0.1, certain=False), {"findings": {"forgetting", "no signal"}}),
    ("forgets", rewards(0.3, 0.1, perplexities=ROSE), {"findings": {"forgetting"}}),
    ("unclear", rewards(0.08, 0.1, certain=False), {"findings": {"forgetting"}}),
    ("worked", rewards(0.08, 0.3), {"findings": {"forgetting", "no signal"}}),
    ("worked", rewards(0.08, 0.3, perplexities=ROSE), {"findings": {"forgetting"}}),
    ("worked", rewards(0.08, 0.3, perplexities=(212.4, 255.0, 255.5)), {}),
    ("no signal", SAME, {"findings": {"no signal"}, "best_step": 0}),
    ("did not move", SAME, {"best_step": 0}),
    ("no gain", SAME, {}),
]


@pytest.mark.parametrize(("word", "found", "changes"), ES_VERDICTS)
def test_verdict_on_rewards_names_forgetting_and_never_advises_more_of_it(word, found, changes):
    verdict = judge(**{"findings": set(), "best_step": 9, **changes}, method="es", gains=found)
    assert (verdict.word, verdict.tone) == (word, TONES.get(word, "bad"))
    forgets, tested_forgets = word == "forgets", found.forgetting is not None and found.forgetting.tested > 300
    assert ("a smaller --lr or --eps is needed" in verdict.reason) == forgets
    assert ("arger --eps" in verdict.reason or "or --eps, more steps" in verdict.reason) == (
        word in ("no signal", "did not move", "no gain")
    )
    assert ("rose from 212.4 to 32,271" in verdict.reason) == (forgets and not tested_forgets)
    assert ("rose from 212.4 to 13,800" in verdict.reason) == tested_forgets, "also where the run worked"
    assert parse_verdict(str(verdict)) == verdict


def test_perplexity_that_is_no_number_is_the_highest():
    found = measure_gains(*(Assessment(reward_evaluation(loss)) for loss in (5.0, 5.1)), [], SENTIMENT, [5.2, np.nan])
    assert found.forgetting is not None and found.forgetting.when_tested == ""
    assert found.forgetting.at_worst == "the perplexity of the held-out text rose from 148.4 to nan"
    assert measure_gains(*[assess([1.0], [0])] * 2, examples([0]), SENTIMENT).forgetting is None, (
        "no reward is trained on"
    )


def reward_evaluation(loss: float) -> Evaluation:
    return Evaluation("reward", 0.5, (0.4, 0.6), 0.0, loss, 18, None)


def test_unchanged_figures_are_not_called_worse():
    verdict = judge(set(), "solve", 4, gains(0.6, 0.6, certain=False, calibrated=Gain(0.8, 0.8, False)))
    assert str(verdict).startswith("no gain: 60.0% before and after training (n=615), although the weights moved")


def test_few_examples_are_said():
    reason = judge(set(), "solve", 4, gains(0.6, 0.7, certain=False, n=20)).reason
    assert "; 20 examples leave about ±20 points to chance" in reason, "they may be those of dev"
    assert "leave about" not in judge(set(), "solve", 4, gains(0.6, 0.85)).reason


# ---- examples and labels


def test_examples_are_corrected_ones_and_at_most_one_that_broke():
    labels = [0] * 10 + [1] * 10
    before = assess([1.0] * 20, labels)
    after = assess([-1.0] * 6 + [1.0] * 4 + [-1.0] * 3 + [1.0] * 7, labels)
    found = describe_changes(before, after, examples(labels), SENTIMENT)
    assert (found["corrected"], found["broken"]) == (6, 3)
    changes = [(row["right_before"], row["right_after"]) for row in found["examples"]]
    assert changes == [(False, True)] * 4 + [(True, False)]
    assert found["examples"][0] == {
        "fields": {"text": "sentence 0"},
        "right": "negative",
        "before": "positive",
        "after": "negative",
        "right_before": False,
        "right_after": True,
    }
    classes = found["classes"]
    assert classes["confusion"] == [[6, 4], [3, 7]]
    assert classes["recall"] == [0.6, 0.7]
    assert classes["labels"] == ["negative", "positive"] and classes["n"] == [10, 10]


def test_many_labels_have_recalls_and_no_matrix():
    labels = [f"label {number}" for number in range(20)]
    task = get_task(
        {"name": "many", "template": "{text} [MASK]", "columns": ["text"], "labels": labels, "words": labels}
    )
    given = list(range(20))
    answers = collect_answers(
        DetailedEvaluation(assess([1.0], [0]).evaluation, (True,) * 20, np.eye(20)), examples(given), task
    )
    found = describe_changes(None, Assessment(assess([1.0], [0]).evaluation, answers), examples(given), task)
    assert found["classes"]["confusion"] is None
    assert found["classes"]["recall"] == [1.0] * 20
    assert "examples" not in found


def test_answers_of_an_event_are_read_back_and_strange_ones_are_not():
    labels = [0, 1, 1, 0]
    answers = assess([1.0, 2.0, -1.0, 0.5], labels).answers
    assert answers is not None
    event = json.loads(json.dumps(answers.to_event()))
    assert read_answers(event, examples(labels), SENTIMENT) == answers
    assert read_answers({}, examples(labels), SENTIMENT) is None
    for strange in ([0, 1], [0, 1, 1, 2], [0, 1, 1, -1], [0, 1, 1, "1"], [0, 1, 1, True], "0110", {"0": 1}):
        assert read_answers({**event, "predicted": strange}, examples(labels), SENTIMENT) is None
        assert read_answers({**event, "predicted_calibrated": strange}, examples(labels), SENTIMENT) is None


# ---- real runs


@pytest.fixture
def options(tiny_folder, tiny_data, tmp_path):
    data = {"model": tiny_folder, "task": "sst-2", "train": tiny_data, "dev": tiny_data, "space": "head"}
    return {**data, "budget": "6k", "threads": 1, "device": "cpu", "out": str(tmp_path / "run")}


def test_a_resumed_run_still_knows_the_answers_before(options):
    whole = mezzo.finetune(**{**options, "out": options["out"] + "-whole", "budget": "9k"})
    first = mezzo.finetune(**options)
    assert len(first.examples) == 5
    resumed = mezzo.finetune(resume=first.out, budget="9k")
    assert resumed.digest == whole.digest
    for name in ("examples", "corrected", "broken", "classes", "verdict", "curve", "majority", "calibrated"):
        assert getattr(resumed, name) == getattr(whole, name), name
    assert sum(map(sum, whole.classes["confusion"])) == whole.n_test


def test_no_forward_is_made_for_examples_and_labels(options):
    """The zero-shot and the final evaluation are the only ones on the test examples."""
    session = mezzo.open_session(**options)
    calls = []
    evaluate = type(session.setup).evaluate_in_detail
    object.__setattr__(
        session.setup, "evaluate_in_detail", lambda *given: calls.append(1) or evaluate(session.setup, *given)
    )
    for _ in session.records():
        pass
    before = len(calls)
    assert len(session.result().examples) == 5
    assert len(calls) == before + 1


def test_an_observer_ends_a_run_which_is_tested_and_can_be_resumed(options):
    def stop(event, values):
        if event == "step" and values["step"] == 1:
            raise mezzo.StopTraining("enough for today")

    run = mezzo.finetune(**options, observe=stop)
    assert (run.steps, run.stopped) == (2, "enough for today")
    assert run.value is not None
    assert mezzo.verify(run.out).ok
    assert mezzo.finetune(resume=run.out).steps > 2


def test_an_observer_may_end_a_run_before_its_first_step(options):
    def stop(event, values):
        if event == "start":
            raise mezzo.StopTraining

    run = mezzo.finetune(**options, observe=stop)
    assert (run.steps, run.stopped) == (0, "stopped by its observer")


def test_frame_has_a_row_per_step(options):
    pandas = pytest.importorskip("pandas")
    run = mezzo.finetune(**options)
    frame = run.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.index) == list(range(run.steps + 1)), "the row of a step has the position after it"
    assert frame["example_forwards"].iloc[-1] == run.example_forwards
    assert frame["dev_accuracy"].dropna().tolist() == [point["value"] for point in run.curve]
    metrics = [json.loads(line) for line in Path(run.out, "metrics.jsonl").read_text().splitlines()]
    assert frame["gain"].dropna().tolist() == [entry["gain"] for entry in metrics if entry["event"] == "step"]
    assert frame["loss"].dtype == float
    assert "lr" not in frame, "solve has none"


def test_a_missing_package_is_one_line(options, monkeypatch):
    run = mezzo.Run("nowhere", 3, curve=({"step": 0, "example_forwards": 0, "value": 0.5, "loss": 1.0},) * 2)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(
        mezzo.MezzoError, match=r"to_frame\(\) needs pandas, which is not installed: pip install pandas"
    ):
        run.to_frame()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(mezzo.MezzoError, match=r"plots need matplotlib: pip install 'mezzo\[plots\]'"):
        run.plot()
    with pytest.raises(mezzo.MezzoError, match="fewer than two evaluations on dev"):
        mezzo.Run("nowhere", 3).plot()


def test_plot_and_html_show_the_curve():
    curve = tuple({"step": n, "example_forwards": 1000 * n, "value": 0.5 + n / 10, "loss": 0.5} for n in range(4))
    run = mezzo.Run("my <run>", 3, value=0.8, curve=curve)
    figure = run.plot()
    assert figure._repr_png_()[:8] == b"\x89PNG\r\n\x1a\n", "a notebook shows it"
    (line,) = figure.axes[0].lines
    assert line.get_xdata().tolist() == [0, 1000, 2000, 3000]
    page = run._repr_html_()
    assert page.startswith("<table>") and "my &lt;run&gt;" in page
    assert page.count("<circle") == 4
    assert "<svg" not in mezzo.Run("x", 1)._repr_html_()
