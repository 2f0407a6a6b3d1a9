"""Settings that depend on the model and the space: the published grids, and the settings file of a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from mezzo.config import OPTIONS, RunConfig, from_mapping, option_names
from mezzo.engines import ENGINES
from mezzo.engines.hf_hub import BUNDLED, stated_family
from mezzo.errors import ConfigError, ModelError, TaskError
from mezzo.method.objectives import OBJECTIVES
from mezzo.tasks import get_task
from mezzo.untrusted import read_settings

STEPS = 1000
BUDGET = "250k"
MAX_NEW_TOKENS = 16
BATCH = {"masked": 64, "causal": 16}
# Evolution strategies. A text changes only where a token does, which takes a larger eps than a loss does; the rate follows it,
# since the weights of directions have no scale of their own. B factors alone bear a larger one than a product of two does.
ES = {"steps": 100, "schedule": "constant", "batch_size": 16, "samples": 16, "weight_decay": 0.0}
ES_EPS = {"both": 5, "b": 20}
# What is found before the first step of es, which begins with the above.
FOUND_BEFORE_ES = ("eps", "lr")

# Of the published grids for RoBERTa-large (masked) and OPT (causal). Their learning rates fit no other model.
PUBLISHED: dict[tuple[str, str], dict[str, float]] = {
    ("masked", "full"): {"eps": 1e-3, "weight_decay": 0.0},
    ("masked", "matrices"): {"eps": 1e-3, "weight_decay": 0.0},
    ("masked", "lora"): {"eps": 1e-3, "weight_decay": 0.1},
    ("masked", "prefix"): {"eps": 1e-1, "weight_decay": 0.0},
    ("masked", "head"): {"eps": 1e-3, "weight_decay": 0.0},
    ("causal", "full"): {"eps": 1e-3, "weight_decay": 0.0},
    ("causal", "matrices"): {"eps": 1e-3, "weight_decay": 0.0},
    ("causal", "lora"): {"eps": 1e-2, "weight_decay": 0.0},
    ("causal", "prefix"): {"eps": 1e-1, "weight_decay": 0.0},
    ("causal", "head"): {"eps": 1e-3, "weight_decay": 0.0},
}

# The gradient baseline: middle of the published grids for Adam (any other space: as `full`), without weight decay.
ADAM_RATES = {"full": 3e-5, "lora": 3e-4, "prefix": 3e-2, "head": 1e-3}
ADAM = {"steps": STEPS, "schedule": "linear", "batch_size": 8, "weight_decay": 0.0}

# In bfloat16 a matrix W ± εz made in scratch realises z with an error of an eighth at ε = 1e-3 (weights about 0.02); the
# low-rank term is added to activations instead. LoRA factors are float32, and their noise is dense.
NOISE = {"float32": "rademacher", "float16": "rademacher", "bfloat16": "lowrank"}


# The settings file beside a model's weights, and the options in it that say how the model is prompted and its texts end.
SETTINGS = "mezzo.json"
TEXT_OPTIONS = ("chat", "max_new_tokens", "stop")
# Other names there are spaces.
OF_MODEL = ("space", "task", "readout", *TEXT_OPTIONS)


def model_settings(model: str) -> dict[str, Any]:
    """The settings by space, the task and how it is asked, in the `mezzo.json` of a bundled model or a model folder; empty
    without one."""
    bundled = model.startswith(BUNDLED)
    folder = resources.files("mezzo") / "bundled" / "models" / model.removeprefix(BUNDLED) if bundled else Path(model)
    file = folder / SETTINGS
    if not file.is_file():
        return {}
    try:
        found = read_settings(Path(str(file)))
        if not isinstance(found, dict):
            raise ConfigError("it must hold an object of settings by space")
        return {name: _check_settings(name, value) for name, value in found.items()}
    except (OSError, ValueError, RecursionError, ConfigError, TaskError) as error:
        raise ModelError(f"{file} cannot be used: {error}; fix or delete it") from None


def _check_settings(name: str, values: Any) -> Any:
    """The default space, the task, how it is asked and read out, or the settings of a space, checked as options of a run: the
    folder may come from anybody."""
    named = ("space", "readout")
    if name in named and not isinstance(values, str):
        raise ConfigError(f"{name!r} must be the name of one, not {json.dumps(values)}")
    if name in (*named, *TEXT_OPTIONS):
        return getattr(from_mapping({name: values}), name)
    if not isinstance(values, dict):
        raise ConfigError(f"{name!r} must be an object of settings, not {json.dumps(values)}")
    if name == "task":
        return get_task(values).as_dict()
    if strange := sorted(set(values) - set(allowed := option_names(per_model=True))):
        raise ConfigError(f"{', '.join(strange)} cannot be set there, only {', '.join(allowed)}")
    given = {name: value for name, value in values.items() if value is not None}
    return {name: getattr(from_mapping(given), name) for name in given}


def apply_defaults(config: RunConfig, family: str, rewards: bool = False) -> RunConfig:
    """Every `None` among the method's options replaced: the bundled model's choice, else the published one. `rewards`: the
    objective rewards generated text."""
    ours = model_settings(config.model)
    engine = ENGINES[config.engine]
    usual = ours.get("space", "lora")
    asked: str = config.space or (usual if engine.trains(usual) else engine.spaces[0])
    config = config.replace(space=asked, method=choose_method(config, asked in engine.low_rank_spaces, rewards))
    space = asked if (family, asked) in PUBLISHED else "full"
    of_space = {} if asked in OF_MODEL else ours.get(asked, {})
    published = {**PUBLISHED[family, space], **of_space}
    towards_base = config.method == "es" and asked == "lora"
    chosen: dict[str, Any] = {"decay": "base" if towards_base else "all"}
    if asked == "lora":
        chosen["factors"] = "both" if config.method in ("spsa", "adam") else "b"
    chosen |= {"noise": "lowrank" if asked in engine.low_rank_spaces else NOISE[config.dtype]}
    if config.method == "adam":
        chosen |= {**ADAM, "lr": ADAM_RATES.get(asked, ADAM_RATES["full"])}
    elif config.method == "solve":
        chosen |= {"eps": published["eps"], "budget": published.get("budget", BUDGET)}
    elif config.method == "es":
        factors = config.factors or chosen["factors"] if asked == "lora" else "both"
        eps = config.eps or ES_EPS[factors] * published["eps"]
        chosen |= {**ES, "eps": eps, "lr": eps}
    else:
        chosen |= {"steps": STEPS, "schedule": "constant", "batch_size": BATCH[family], "samples": 1, **published}
        if "lr" not in of_space:
            chosen["lr"] = "auto"
        chosen.pop("budget", None)
    chosen |= {"chat": False, "max_new_tokens": MAX_NEW_TOKENS}
    chosen |= {name: ours[name] for name in TEXT_OPTIONS if ours.get(name) is not None}
    missing = {name: value for name, value in chosen.items() if getattr(config, name) is None}
    config = config.replace(**missing)
    if config.eval_every is None and config.method != "solve":
        assert config.steps is not None
        config = config.replace(eval_every=max(1, config.steps // 10))
    return config


def without_found(config: RunConfig, given: RunConfig) -> RunConfig:
    """The configuration without what a run finds before its first step, unless it was given."""
    if config.method != "es" or given.eps is not None:
        return config
    return config.replace(**{name: None for name in FOUND_BEFORE_ES if getattr(given, name) is None})


def untrained_space(config: RunConfig) -> str:
    """The space of a model that is not trained: an adapter, which changes nothing, where the base must stay as it is."""
    adapter = config.quantize or config.offload or ENGINES[config.engine].adapters_only
    return "lora" if adapter else "full"


def describe_defaults(values: Mapping[str, Any]) -> dict[str, str]:
    """The defaults of the options that depend on model, space and method, as help shows them; empty where they are not known
    because the model is not on this machine."""
    config = from_mapping(values)
    family = stated_family(config.model)
    if family is None:
        return {}
    chosen = apply_defaults(config, family)
    other = apply_defaults(config.replace(method="spsa"), family) if chosen.method == "solve" else chosen
    shown: dict[str, str] = {}
    for name in ("method", "space", "noise", *option_names(per_model=True), "samples"):
        value, otherwise = getattr(chosen, name), getattr(other, name)
        if chosen.method == "es" and name in FOUND_BEFORE_ES:
            continue
        texts = [f"{value}"] * (value is not None)
        texts += [f"{otherwise} with --method spsa"] * (otherwise not in (None, value) and name != "method")
        shown |= {name: "; ".join(texts)} if texts else {}
    return shown


def choose_method(config: RunConfig, one_direction: bool = False, rewards: bool = False) -> str:
    """The method that was asked for; else `solve` where the loss is a cross-entropy and no option of the other is given.

    `one_direction`: a probe is an adapter of the noise's rank, and cannot be the sum of many directions that a move is.
    """
    objective = OBJECTIVES.get(config.objective)
    smooth = objective is not None and objective.smooth
    given = [o for o in OPTIONS.values() if o.of_method and getattr(config, o.name) != o.default]
    if config.method in ("solve", "adam"):
        if rewards:
            raise ConfigError(
                f"--method {config.method} needs a loss with slopes, and a reward of generated text has none: use --method es"
            )
        if not smooth:
            names = " or ".join(name for name, each in OBJECTIVES.items() if each.smooth)
            raise ConfigError(
                f"--method {config.method} needs a loss with slopes ({names}); {config.objective!r} is trained with --method spsa"
            )
        if others := [o for o in given if config.method not in o.of_method]:
            why = "it decides how far to move by itself" if config.method == "solve" else "it follows the gradient"
            raise ConfigError(
                f"--method {config.method} has no {others[0].flag}: {why}. Leave it out, or add --method spsa"
            )
    if config.method == "solve" and one_direction:
        raise ConfigError(
            f"--method solve does not train {config.space!r} on {config.engine}, where a probe is an adapter of one "
            "direction: use --space lora, or --method spsa"
        )
    if config.lr == "auto" and (config.method in ("es", "adam") or rewards):
        least = "follows the slopes of a loss, and a reward has none" if rewards else "is for --method spsa"
        raise ConfigError(f"--lr auto {least}: give a number, or leave it out")
    if config.method == "adam" and (not ENGINES[config.engine].gradients or config.workers):
        raise ConfigError("--method adam needs gradients: it runs in one process of the torch engine, without workers")
    by_slopes = not smooth or one_direction or any("solve" not in o.of_method for o in given)
    chosen = config.method or ("es" if rewards else "spsa" if by_slopes else "solve")
    if others := [o for o in given if chosen not in o.of_method]:
        raise ConfigError(f"--method {chosen} has no {others[0].flag}, which is for --method {others[0].of_method[0]}")
    return chosen
