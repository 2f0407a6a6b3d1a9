"""Experiment trackers: TensorBoard, Weights & Biases, trackio. A tracker that fails is dropped; the run goes on."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from mezzo.errors import ConfigError

INSTALL = {"tensorboard": "mezzo[tensorboard]", "wandb": "wandb", "trackio": "trackio"}
# What is tracked of a step, by its key in the event. Only solve has those from `before` on.
STEP_FIGURES = {
    "loss": "loss",
    "lr": "lr",
    "spent": "example_forwards",
    "before": "judged_loss",
    "gain": "gain",
    "gain_error": "gain_error",
    "directions": "directions",
    "fitted": "examples",
    "eps": "eps",
}


class Sink(Protocol):
    """What is needed of a tracker."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def check_installed(names: Sequence[str]) -> None:
    """Refuse trackers whose package is missing, before anything is loaded."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"--track {name} needs a package that is not installed: pip install '{INSTALL[name]}'")


@dataclass
class Trackers:
    """All trackers of a run. None of their errors is raised."""

    sinks: dict[str, Sink] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def start(self, names: Sequence[str], folder: Path, config: Mapping[str, Any]) -> None:
        for name in names:
            self._guard(name, partial(self._open, name, folder, config))

    def _open(self, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        self.sinks[name] = _OPEN[name](folder, config)

    def log(self, event: str, values: Mapping[str, Any]) -> Iterator[str]:
        """Pass the event's figures on; yields a message for each tracker that failed."""
        step, figures = event_figures(event, values)
        for name, sink in list(self.sinks.items()) if figures else ():
            self._guard(name, partial(sink.log, step, figures))
        if event in ("result", "failed"):
            self.close()
        while self.failed:
            yield self.failed.pop(0)

    def close(self) -> None:
        for name, sink in list(self.sinks.items()):
            self.sinks.pop(name)
            self._guard(name, sink.close)

    def _guard(self, name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # an error of a tracker must not end the run
            self.sinks.pop(name, None)
            about = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self.failed.append(f"the tracker {name} failed and is left out from here on: {about[:200]}")


def event_figures(event: str, values: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    """The journal position of an event, and its figures by name."""
    step = int(values.get("step", 0))
    if event == "step":
        slopes = [abs(float(slope)) for slope in values["slopes"]]
        found = {
            **{f"train/{name}": values[key] for key, name in STEP_FIGURES.items() if key in values},
            **({"train/mean_abs_slope": sum(slopes) / len(slopes)} if slopes else {}),
        }
        if "directions" in values:  # solve has no learning rate
            del found["train/lr"]
        return step + 1, found
    if event == "evaluation":
        return step, {f"dev/{values['metric']}": values["value"], "dev/loss": values["loss"]}
    if event == "zero-shot":
        figures = {"test/zero_shot": values["value"], "test/zero_shot_calibrated": values["calibrated"]}
        return step, {name: figure for name, figure in figures.items() if figure is not None}
    if event == "result" and values.get("value") is not None:
        return step, {f"test/{values['metric']}": values["value"], "run/seconds": values["seconds"]}
    return step, {}


class TensorBoard:
    """Event files under RUN/tensorboard: `tensorboard --logdir RUN`."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer = writer.EventFileWriter(str(folder / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        found = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=found)))

    def close(self) -> None:
        self._writer.close()


class Service:
    """wandb, and trackio, which has the same functions. The project is `mezzo`; the run is named after its folder."""

    def __init__(self, module: str, folder: Path, config: Mapping[str, Any]) -> None:
        self._module = importlib.import_module(module)
        where = {"dir": str(folder)} if module == "wandb" else {}
        self._module.init(project="mezzo", name=folder.name, config=dict(config), **where)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._module.log(dict(values), step=step)

    def close(self) -> None:
        self._module.finish()


_OPEN: dict[str, Callable[[Path, Mapping[str, Any]], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": lambda folder, config: Service("wandb", folder, config),
    "trackio": lambda folder, config: Service("trackio", folder, config),
}
