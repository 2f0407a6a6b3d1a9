"""Progress from the events of a run, and curves as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.drawing import Chart, Series
from mezzo.drawing.text import draw_curve, fit_encoding, shorten
from mezzo.runs.progress import RunProgress, format_seconds, replay_progress

START = {"method": "spsa", "steps": 1000, "budget": None, "budget_seconds": None, "step": 0, "spent": 0}


class Watch:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(watch: Watch, start: dict, steps: list[dict]) -> RunProgress:
    """Progress after steps that take `took` seconds each and spend `cost` example-forwards."""
    progress = RunProgress(watch)
    progress("start", {**START, **start})
    progress("evaluation", {"step": 0, "value": 0.5})
    spent = start.get("spent", 0)
    for number, values in enumerate(map(dict, steps)):
        watch.now += values.pop("took", 1.0)
        spent += values.pop("cost", 8)
        progress(
            "step", {"step": number + start.get("step", 0), "spent": spent, "loss": 1.0, "slopes": [1.0], **values}
        )
    return progress


def test_loss_of_spsa_is_the_mean_of_recent_steps():
    losses = [5.0] + [1.0] * 49 + [0.5] * 50
    progress = run(Watch(), {}, [{"loss": loss} for loss in losses])
    assert progress.loss == "loss 0.5000", "the first loss, which is 10 times as high, has no part in it"
    assert run(Watch(), {}, [{"loss": loss} for loss in (1.0, float("nan"), 2.0)]).loss == "loss 1.5000"


def test_loss_of_solve_is_that_of_the_last_step_before_and_after():
    start = {"method": "solve", "steps": None, "budget": 250_000.0}
    moved = {"before": 0.6, "after": 0.5, "ridge": 1.0}
    progress = run(Watch(), start, [{"loss": 9.0, "before": 0.9, "after": 0.7, "ridge": 4.0, "cost": 2000}, moved])
    assert progress.loss == "loss 0.6000 → ≈0.5000"
    progress = run(Watch(), start, [{"before": 0.6, "after": 0.7}])  # an infinite ridge is left out of the event
    assert progress.loss == "loss 0.6000, not moved"
    assert progress.zero_slope_share == ""


def test_time_left_follows_recent_steps_and_counts_down():
    watch = Watch()
    slow_then_fast = [{"took": 60.0}] + [{"took": 10.0}] * 20 + [{"took": 1.0}] * 30
    progress = run(watch, {"steps": 101}, slow_then_fast)
    assert progress.seconds_left == pytest.approx(50)
    assert progress.pace == "1 steps/s"
    watch.now += 20
    assert progress.seconds_left == pytest.approx(30), "while a step runs"
    watch.now += 100
    assert progress.time_left == "1 s left", "never below zero"


def test_time_left_is_known_after_one_step_and_then_without_it():
    watch = Watch()
    progress = run(watch, {"steps": 10}, [{"took": 30.0}])
    assert progress.seconds_left == pytest.approx(270)
    watch.now += 2
    progress("step", {"step": 1, "spent": 16, "loss": 1.0, "slopes": [1.0]})
    assert progress.seconds_left == pytest.approx(16), "the first step warms up"


@pytest.mark.parametrize(
    ("start", "share", "left", "place"),
    [
        ({"steps": 20}, 0.2, 16, "4/20"),
        ({"steps": None, "budget": 40_000.0}, 0.2, 16, "8k/40k"),
        ({"steps": None, "budget_seconds": 40.0}, 0.1, 36, "step 4"),
        ({"steps": 20, "budget_seconds": 5.0}, 0.8, 1, "4/20"),
        ({"steps": 20, "budget": 10_000.0}, 0.8, 1, "4/20"),
        ({"steps": None, "method": "solve"}, 0.0, None, "step 4"),
        ({"steps": 8, "step": 2, "spent": 4000}, 0.75, 2, "6/8"),
    ],
)
def test_share_and_time_left_follow_the_nearest_limit(start, share, left, place):
    progress = run(Watch(), start, [{"cost": 2000}] * 4)
    assert progress.share == pytest.approx(share)
    assert progress.seconds_left == (None if left is None else pytest.approx(left))
    assert progress.place == place


def test_many_steps_a_second_are_averaged_over_seconds():
    watch = Watch()
    progress = run(watch, {"steps": 10_000}, [{"took": 0.005 if number % 2 else 0.015} for number in range(4000)])
    assert progress.pace == "100 steps/s"
    assert progress.seconds_left == pytest.approx(60, rel=0.05)


def test_a_slow_step_is_said_in_seconds():
    assert run(Watch(), {}, [{"took": 4.0}] * 5).pace == "4 s/step"
    assert [format_seconds(s) for s in (0.1, 42, 300, 9000)] == ["1 s", "42 s", "5 min", "2.5 h"]


def test_recorded_events_tell_what_the_terminal_shows():
    watch, lines = Watch(), []
    live = RunProgress(watch)

    def see(event: str, **values: object) -> None:
        live(event, values)
        lines.append({"event": event, "seconds": watch.now - 100.0, **values})

    see("start", **{**START, "steps": 40})
    see("step", step=0, spent=8, loss=5.0, slopes=[1.0])
    live = RunProgress(watch)
    see("start", **{**START, "steps": 40, "step": 1, "spent": 8})  # resumed
    for number in range(1, 21):
        watch.now += 0.7 + number / 10
        see("step", step=number, spent=8 * number, loss=number and 1 / number, slopes=[0.0], memory_mib=1)
    hostile = [{"event": "step", "step": []}, {"event": ["step"]}, {"event": "evaluation"}, {"event": "start"}]
    watch.now += 2.5
    told = replay_progress(lines, since_last=2.5)
    assert (told.loss, told.pace, told.time_left, told.place) == (live.loss, live.pace, live.time_left, live.place)
    assert told.seconds_left == pytest.approx(live.seconds_left)
    assert replay_progress([*lines, *hostile[:3]]).place == live.place
    assert replay_progress([*lines, *hostile]).pace == ""


# ---- curves


def test_curve_has_its_points_and_the_ends_of_its_axes():
    series = Series("dev", [0, 50_000, 250_000], [0.5, 0.9, 0.7])
    title, *rows, axis, ends = draw_curve(
        Chart("dev", "dev accuracy", (series,), percent=True, x_label="example-forwards")
    )
    assert title == "dev accuracy"
    assert rows[0].startswith("90% │") and "•" in rows[0]
    assert rows[-1].startswith("50% │•")
    assert rows[3].endswith("•"), "0.7 is in the middle"
    assert axis.strip().startswith("└──")
    assert ends.split() == ["0", "250k", "example-forwards"]
    assert fit_encoding(rows[-1], "latin-1").startswith("50% |*")


@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.floats(-1e6, 1e6)), min_size=1, max_size=40),
    st.integers(20, 120),
)
def test_any_points_give_a_curve_of_that_width(points, width):
    lines = draw_curve(Chart("x", "x", (Series("x", *zip(*points, strict=True)),)), width)
    assert len(lines) == 10
    assert all(len(line) <= max(width, 40) for line in lines[1:-1])


def test_text_is_shortened_and_fits_its_encoding():
    assert shorten("one  two\nthree", 40) == "one two three"
    assert shorten("one two three", 8) == "one two…"
    assert fit_encoding("é → 🙂", "utf-8") == "é → 🙂"
    assert fit_encoding("é → 🙂", "latin-1") == "é -> ?"
    assert fit_encoding("±2", "ascii") == "+/-2"
    assert fit_encoding("🙂", None) == "🙂"
