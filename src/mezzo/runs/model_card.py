"""The README.md of an exported adapter or model: what it is, how good it is, how it was made, how to load it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mezzo import __version__
from mezzo.config import OPTIONS
from mezzo.engines.hf_hub import BUNDLED
from mezzo.evaluation.figures import format_figure, format_perplexity, is_reward_metric, perplexity
from mezzo.evaluation.rewards import LINE_END
from mezzo.journal.header import Header
from mezzo.untrusted import printable

LIBRARY = {"adapter": "peft", "model": "transformers"}
PEFT = ("from peft import PeftModel", "PeftModel.from_pretrained")
# What is said of a method, and what it needs; of all others, MeZO and forward passes.
METHODS = {"es": ("evolution strategies", "forward passes only"), "adam": ("AdamW", "gradients")}
# For what the journal's header, which may be a stranger's, does not say.
UNKNOWN = "unknown"
AUTO = {"masked": "AutoModelForMaskedLM", "causal": "AutoModelForCausalLM"}


def model_card(kind: str, header: Header, events: Sequence[Mapping[str, Any]], step: int, steps: int) -> str:
    """The card's text. `events` are the run's metrics, where there are any: a compact journal has none."""
    config, task, model = header.config, header.task, _model(header.config)
    space, name = str(config.get("space", UNKNOWN)), str(header.task.get("name", UNKNOWN))
    how, passes = METHODS.get(str(config.get("method")), ("MeZO", "forward passes only"))
    lines = [
        *_front("mezzo" if space == "prefix" else LIBRARY[kind], model, _index(task, events, step)),
        f"# {_quote(name)}: {_quote(_short(model))} after {step} steps of {how}",
        "",
        f"Fine-tuned with {passes} by mezzo {__version__}: {_quote(space)} trained on the task "
        f"{_quote(name)}, journal position {step} of {steps}.",
        "",
        "## Results",
        *_results(events, step),
        "",
        "## How it was trained",
        *_method(config, header),
        "",
        "## Load it",
        _loading(kind, config, header.family, header.classes),
        "",
        f"The prompt is part of the model: it was trained with the template{_framing(config)}",
        *(f"    {printable(line)}" for line in ("", *str(task.get("template", UNKNOWN)).splitlines(), "")),
        "and the words " + ", ".join(f"{_quote(a)} → {_quote(b)}" for a, b in _words(task)) + "."
        if _words(task)
        else "",
        "",
    ]
    return "\n".join(lines)


def _model(config: Mapping[str, Any]) -> str:
    return str(config.get("model", UNKNOWN))


def _front(library: str, model: str, index: list[str]) -> list[str]:
    """What a model hub reads; a folder of this machine is not named there."""
    ours = os.path.isabs(model) or model.startswith((".", BUNDLED))
    known = [] if ours or model == UNKNOWN else [f"base_model: {json.dumps(_short(model))}"]
    return ["---", f"library_name: {library}", *known, "tags: [mezo, zeroth-order, mezzo]", *index, "---", ""]


def _index(task: Mapping[str, Any], events: Sequence[Mapping[str, Any]], step: int) -> list[str]:
    """The figures of this checkpoint as a hub reads them; what the journal says is quoted as JSON, which YAML reads."""
    found = [e for e in _tested(events, step) if e is not None]
    metrics = [
        {"type": str(e.get("metric")), "value": e["value"], "name": f"{e.get('metric')} on {e.get('tested_on', 'dev')}"}
        for e in found
    ]
    if not metrics:
        return []
    kind = "text-generation" if task.get("kind") == "generation" else "text-classification"
    name = str(task.get("name", UNKNOWN))
    data = {"name": name, "type": name}
    result = {"task": {"type": kind}, "dataset": data, "metrics": metrics}
    return [f"model-index: {printable(json.dumps([{'name': name, 'results': [result]}]))}"]


def _tested(
    events: Sequence[Mapping[str, Any]], step: int
) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """The run's test of this checkpoint, and its evaluation on dev."""
    figures = [e for e in events if _sound(e)]
    dev = next((e for e in figures if e["event"] == "evaluation" and e.get("step") == step), None)
    result = next((e for e in reversed(figures) if e["event"] == "result" and e.get("best_step") == step), None)
    return result, dev if result is None or result.get("tested_on") != "dev" else None


def _results(events: Sequence[Mapping[str, Any]], step: int) -> list[str]:
    zero = next((e for e in events if _sound(e) and e["event"] == "zero-shot"), None)
    result, dev = _tested(events, step)
    rows = []
    if zero:
        rows.append(f"| zero-shot, before training | {_figure(zero)} | {_quote(zero.get('n'))} |")
        if isinstance(calibrated := zero.get("calibrated"), (int, float)):
            rows.append(f"| the same, calibrated | {calibrated:.1%} | {_quote(zero.get('n'))} |")
    if dev:
        rows.append(f"| dev, this checkpoint | {_figure(dev)} | {_quote(dev.get('n'))} |")
    if result:
        rows.append(
            f"| **{_quote(result.get('tested_on'))}, this checkpoint** | **{_figure(result)}** | {_quote(result.get('n_test'))} |"
        )
    if rows:
        rows += _perplexity_row(events, step)
    if not rows:
        return ["The journal this was made from holds no evaluations."]
    metric = _quote((result or dev or zero or {}).get("metric"))
    return [f"| examples | {metric}, 95% interval | n |", "|---|---|---|", *rows]


def _perplexity_row(events: Sequence[Mapping[str, Any]], step: int) -> list[str]:
    """The perplexity of the held-out text, of the untrained model and of this checkpoint of a run on rewards."""
    rewarded = [
        e for e in events if _sound(e) and e["event"] == "evaluation" and is_reward_metric(str(e.get("metric")))
    ]
    losses = [next((e.get("loss") for e in rewarded if e.get("step") == at), None) for at in (0, step)]
    if not all(isinstance(loss, (int, float)) for loss in losses):
        return []
    before, now = (format_perplexity(perplexity(float(loss))) for loss in losses if loss is not None)
    return [f"| held-out perplexity, before training → this checkpoint | {before} → {now} | |"]


def _sound(entry: Mapping[str, Any]) -> bool:
    """Whether a line of metrics holds a figure; the folder may be a stranger's."""
    interval = entry.get("interval")
    values = [entry.get("value"), *(interval if isinstance(interval, list) else ())]
    return len(values) == 3 and all(isinstance(value, (int, float)) for value in values)


# The options of a method that tell runs apart, and those of the texts that it generates.
METHOD_OPTIONS = (
    *("method", "budget", "objective", "lr", "schedule", "eps", "batch_size", "samples", "shaping", "factors", "noise"),
    *("weight_decay", "decay", "seed"),
)
GENERATION_OPTIONS, DRAWING_OPTIONS = ("chat", "max_new_tokens", "stop", "temperature"), ("top_p", "draws")


def telling_options(config: Mapping[str, Any], task: Mapping[str, Any]) -> dict[str, Any]:
    """The options that tell runs apart with their values: those that the method reads, and how texts are generated."""
    method = str(config.get("method") or "spsa")
    generates = method == "es" or task.get("kind") == "generation"
    names = [name for name in METHOD_OPTIONS if method in (OPTIONS[name].of_method or (method,))]
    names += GENERATION_OPTIONS if generates else ["chat"] if config.get("chat") else []
    names += DRAWING_OPTIONS if generates and config.get("temperature") else ()
    shown = {name: config[name] for name in names if config.get(name) is not None}
    if shown.get("weight_decay") is None:
        shown.pop("decay", None)
    return shown | ({"stop": list(LINE_END)} if generates and config.get("stop") is None else {})


def _figure(entry: Mapping[str, Any]) -> str:
    low, high = entry["interval"]
    value, low, high = (format_figure(figure, str(entry.get("metric"))) for figure in (entry["value"], low, high))
    return f"{value} ({low} to {high})"


def _method(config: Mapping[str, Any], header: Header) -> list[str]:
    names = ("space", "rank", "alpha") if config.get("space") == "lora" else ("space",)
    options = {name: config[name] for name in names if config.get(name) is not None}
    options |= telling_options(config, header.task)
    return [
        *("| option | |", "|---|---|", f"| base model | {_quote(_short(_model(config)))} |"),
        *(f"| {name.replace('_', ' ')} | {_quote(option_text(value))} |" for name, value in options.items()),
        f"| base digest | `{header.base[:16]}` |",
    ]


def option_text(value: Any) -> str:
    """The value of an option; that of a list as in mezzo.json, where the end of a line is seen."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, bool)) else str(value)


def _framing(config: Mapping[str, Any]) -> str:
    """What the prompt stands in."""
    return " below, given as a user's message in the chat template of the tokenizer:" if config.get("chat") else ""


def _loading(kind: str, config: Mapping[str, Any], family: str, classes: int) -> str:
    """Code that loads it. What it takes from the journal, which may be a stranger's, is quoted, never code."""
    model = _model(config)
    auto = "AutoModelForSequenceClassification" if classes else AUTO[family]
    if kind == "model":
        return f"""```python
from transformers import AutoTokenizer, {auto}

model = {auto}.from_pretrained("THIS FOLDER")
tokenizer = AutoTokenizer.from_pretrained("THIS FOLDER")
```"""
    name = json.dumps(_short(model))
    base = f"locate({name})" if model.startswith(BUNDLED) else name
    labels = f", num_labels={classes}" if classes else ""
    found = "from mezzo.engines.hf_hub import locate\n" if model.startswith(BUNDLED) else ""
    imported, put = ("from mezzo import load_prefix", "load_prefix") if config.get("space") == "prefix" else PEFT
    return f"""```python
{found}{imported}
from transformers import {auto}

base = {auto}.from_pretrained({base}, dtype={json.dumps(str(config.get("dtype", "float32")))}{labels})
model = {put}(base, "THIS FOLDER")
```"""


def _words(task: Mapping[str, Any]) -> list[tuple[str, str]]:
    words, labels = task.get("words") or (), task.get("labels") or ()
    return list(words.items()) if isinstance(words, Mapping) else list(zip(labels, words, strict=False))


def _quote(value: Any) -> str:
    """Text of the journal on one line, as code unless it is plain: it must not format the page, nor load a picture there."""
    text = printable(" ".join(str(value).split()))
    return text if re.fullmatch(r"[\w ./,:-]*", text) else "`" + text.replace("`", "'") + "`"


def _short(model: str) -> str:
    """A local folder by its name only: the rest is nobody's business."""
    return " ".join((os.path.basename(model.rstrip("/")) if os.path.isabs(model) else model).split())
