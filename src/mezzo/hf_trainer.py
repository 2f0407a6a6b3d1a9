"""A trainer with the signature of transformers': a model in memory, arguments, data sets and callbacks."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mezzo import api
from mezzo.config import OPTIONS, convert
from mezzo.engines.torch.model_in_memory import read_lora, save_base, write_back
from mezzo.errors import ConfigError, StopTraining
from mezzo.evaluation.evaluate import Evaluation
from mezzo.runs.result import Run

# Arguments of transformers that are options under another name; those with the same name are taken as they are.
RENAMED = {alias: name for name, option in OPTIONS.items() for alias in option.aliases}
SAME = ("seed", "data_seed", "weight_decay")
# Arguments that cannot be met, and what to give instead.
REFUSED = {"num_train_epochs": "max_steps, or budget= in example-forwards"}


class MezzoTrainer:
    """Fine-tunes the model that it is given, in place, with forward passes only.

    `args` are transformers' TrainingArguments, of which those that were changed count, or a mapping of mezzo's options, or a
    folder for the run. Other options are keywords. A PEFT model's LoRA adapters are what is trained. The run is a run as any
    other, in `trainer.run`: it can be reported, verified and shared.
    """

    def __init__(
        self,
        model: Any,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        processing_class: Any = None,
        callbacks: Sequence[Any] = (),
        **options: Any,
    ) -> None:
        if processing_class is None:
            raise ConfigError("MezzoTrainer needs the model's tokenizer: pass processing_class=tokenizer")
        if train_dataset is None:
            raise ConfigError("MezzoTrainer needs train_dataset: a dataset, a list of dicts, or a file")
        self.model, self.args, self.processing_class = model, args, processing_class
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.callbacks = [callback() if isinstance(callback, type) else callback for callback in callbacks]
        self.options = {**read_lora(model), **read_arguments(args), **options}
        self.state = SimpleNamespace(
            global_step=0, max_steps=0, epoch=0.0, log_history=[], best_metric=None, best_model_checkpoint=None,
            is_local_process_zero=True, is_world_process_zero=True,
        )  # fmt: skip
        self.control = SimpleNamespace(
            should_training_stop=False,
            should_epoch_stop=False,
            should_save=False,
            should_evaluate=False,
            should_log=False,
        )
        self.run: Run | None = None

    def train(self) -> SimpleNamespace:
        """Train, put the weights of the best checkpoint into the model, and return steps, loss and metrics."""
        with tempfile.TemporaryDirectory() as folder:
            options = {"out": "trainer_output", **self.options}  # as transformers names it
            out = Path(options.pop("out"))
            base = save_base(self.model, self.processing_class, out / "base")
            data = {"train": self.train_dataset, "dev": self.eval_dataset}
            given = {name: rows for name, rows in data.items() if rows is not None}
            self.run = api.finetune(str(base), **given, **options, out=out / "run", observe=self._observe)
            kind = "adapter" if hasattr(self.model, "peft_config") else "model"
            write_back(self.model, api.export(self.run.out, kind, Path(folder) / kind))
        metrics = {key: value for key, value in self.run.to_dict().items() if isinstance(value, (int, float))}
        losses = [log["loss"] for log in self.state.log_history if "loss" in log]
        loss = sum(losses) / len(losses) if losses else float("nan")
        return SimpleNamespace(global_step=self.run.steps, training_loss=loss, metrics=metrics)

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """The figures of the best checkpoint on a data set, by default on `eval_dataset`."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        found: Evaluation = api.evaluate(self._trained().out, data=data)
        return _log(found.to_dict(), metric_key_prefix)

    def predict(self, test_dataset: str | Path | Iterable[Any]) -> list[dict[str, Any]]:
        """Every row with its prediction and probabilities."""
        return list(api.predict(test_dataset, self._trained().out))

    def save_model(self, output_dir: str | Path) -> None:
        """Write the model, or a PEFT model's adapter, with its card and its tokenizer."""
        api.export(self._trained().out, "adapter" if hasattr(self.model, "peft_config") else "model", output_dir)

    def push_to_hub(self, name: str, *, private: bool = False) -> str:
        kind = "adapter" if hasattr(self.model, "peft_config") else "model"
        return api.push_to_hub(self._trained().out, name, kind, private=private)

    def _trained(self) -> Run:
        if self.run is None:
            raise ConfigError("call train() first")
        return self.run

    # ---- callbacks

    def _observe(self, event: str, values: dict[str, Any]) -> None:
        """A run's event as the callbacks of transformers know it. They may stop the run."""
        state = self.state
        if event == "start":
            state.max_steps = values["steps"] or 0
            self._call("on_train_begin")
        elif event == "step":
            state.global_step = values["step"] + 1
            self._call("on_step_begin")
            logs = {"loss": values["loss"], "learning_rate": values["lr"], "step": state.global_step}
            state.log_history.append(logs)
            self._call("on_step_end")
            self._call("on_log", logs=logs)
        elif event == "evaluation":
            metrics = _log(values, "eval")
            state.log_history.append({**metrics, "step": values["step"]})
            state.best_metric = max(values["value"], state.best_metric or 0.0)
            self._call("on_evaluate", metrics=metrics)
        elif event == "stopped":
            self._call("on_train_end")
        if self.control.should_training_stop and event != "stopped":
            raise StopTraining("stopped by a callback")

    def _call(self, name: str, **more: Any) -> None:
        for callback in self.callbacks:
            if function := getattr(callback, name, None):
                tools = {"model": self.model, "processing_class": self.processing_class}
                self.control = function(self.args, self.state, self.control, **tools, **more) or self.control


def read_arguments(args: Any) -> dict[str, Any]:
    """Options of a run from TrainingArguments (those that differ from their defaults), a mapping or a folder."""
    if args is None:
        return {}
    if isinstance(args, (str, Path)):
        return {"out": str(args)}
    if isinstance(args, Mapping):
        return dict(args)
    if not dataclasses.is_dataclass(args):
        raise ConfigError(f"args are TrainingArguments, a mapping of options or a folder, not {type(args).__name__}")
    usual = {f.name: f.default for f in dataclasses.fields(args)}
    changed = {name: getattr(args, name) for name, default in usual.items() if getattr(args, name) != default}
    if refused := sorted(set(changed) & set(REFUSED)):
        raise ConfigError(f"a run without gradients does not count {refused[0]}: set {REFUSED[refused[0]]}")
    named = {RENAMED.get(name, name): getattr(value, "value", value) for name, value in changed.items()}
    wanted = {name: value for name, value in named.items() if name in (*RENAMED.values(), *SAME)}
    wanted.pop("track", None)  # transformers fills it in by itself
    return {name: convert(name, value) for name, value in wanted.items() if value is not None}


def _log(figures: Mapping[str, Any], prefix: str) -> dict[str, float]:
    found = {"loss": figures["loss"], str(figures["metric"]): figures["value"], "accuracy": figures["accuracy"]}
    return {f"{prefix}_{name}": float(value) for name, value in found.items()}
