"""From a configuration to a setup: every mistake that can be found without weights is found here."""

from __future__ import annotations

import os
from typing import Any

from mezzo.config import RunConfig
from mezzo.engines import ENGINES, refuse_space
from mezzo.engines.hf_hub import family_of, load_config, load_tokenizer, longest_input
from mezzo.errors import ConfigError
from mezzo.evaluation.rewards import check_function
from mezzo.method.space import ADAPTERS
from mezzo.runs.budget import parse_budget
from mezzo.runs.datasets import find_task, splits_beside_train, with_model_task
from mezzo.runs.defaults import apply_defaults
from mezzo.runs.objectives import find_reward, refuse_label_metric
from mezzo.runs.setup import Setup, make_space
from mezzo.tasks import Task
from mezzo.tasks.tokenizer import TokenizerWrapper

LARGEST_ADAM_RATE = 1e6
# Tokens of a prompt with its demonstrations, as published.
LONGEST_PROMPT = 2048


def resolve_setup(config: RunConfig, task: Task | None = None, function: Any = None, trained: bool = True) -> Setup:
    """Resolve a configuration.

    `task` replaces what the configuration names: that of a journal's header, or a proposed one. `function` is the user's own
    objective: what a configuration names is not imported here, since it may come with somebody else's run. A model that is
    not `trained` may have a space that its engine does not train.
    """
    if function is not None:
        check_function(function)
    config = config if task else with_model_task(config)
    config = config.replace(**splits_beside_train(config))
    config = config.replace(**_absolute_paths(config))
    model_config = load_config(config.model, config.remote_code)
    family = family_of(model_config)
    task = task or find_task(config, family)
    rewards = find_reward(config.objective, task, function) is not None
    if rewards and family != "causal":
        raise ConfigError(f"a reward reads generated text, which {config.model} does not produce: use a causal model")
    decay = config.weight_decay or 0.0
    config = apply_defaults(config, family, rewards)
    parse_budget(config.budget)
    _refuse_extreme_rate(config, decay)
    keeping = "--quantize" if config.quantize else "--offload" if config.offload else ""
    if keeping and config.space not in ADAPTERS:
        raise ConfigError(
            f"the base stays as it is with {keeping}: it goes with --space {' or '.join(ADAPTERS)}, not {config.space!r}"
        )
    space = make_space(config)
    if trained:
        refuse_space(config.engine, space)
    longest = longest_input(model_config)
    if config.space == "prefix" and longest is not None and config.prefix_tokens > longest:
        raise ConfigError(
            f"--prefix-tokens {config.prefix_tokens} is more than the {longest} tokens {config.model} can read"
        )
    if (rewards or task.kind == "generation") and not ENGINES[config.engine].generates:
        raise ConfigError(f"task {task.name!r} needs generated text, which the {config.engine} engine does not produce")
    refuse_label_metric(config.objective, task)
    tokenizer = load_tokenizer(config.model, config.remote_code)
    size = getattr(model_config, "vocab_size", None)
    vocabulary = size if isinstance(size, int) else None
    setup = Setup(config, family, task, tokenizer, _max_length(config, task, longest, tokenizer), vocabulary, function)
    if setup.readout.vocabulary and setup.readout.kind == "head":
        raise ConfigError(f"{config.objective} reads words of the vocabulary, and --readout head has none")
    setup.refuse_unknown_tokens((*setup.readout.words, setup.pad_id))
    return setup


def _max_length(config: RunConfig, task: Task, longest: int | None, tokenizer: Any) -> int | None:
    """Tokens of a prompt: as configured, else the task's, and never more than the model or its tokenizer takes, less the tokens
    that are generated. Solved examples before a causal prompt may fill all of it."""
    generated = (config.max_new_tokens or 0) if task.kind == "generation" else 0
    if longest is not None and generated >= longest:
        raise ConfigError(
            f"--max-new-tokens {generated} leaves no room for a prompt: {config.model} reads {longest} tokens in all"
        )
    if config.demonstrations and task.family == "causal" and config.max_length is None:
        limits = (longest, TokenizerWrapper(tokenizer).max_length, LONGEST_PROMPT)
        return max(1, min(limit for limit in limits if limit is not None) - generated)
    if longest is None:
        return config.max_length
    longest -= generated
    if config.max_length is not None and config.max_length > longest:
        beside = f" beside --max-new-tokens {generated}" if generated else ""
        raise ConfigError(
            f"--max-length {config.max_length} is more than the {longest} tokens {config.model} can read{beside}"
        )
    factor = 2 if config.demonstrations else 1
    limit = min(longest, TokenizerWrapper(tokenizer).max_length or longest)
    return config.max_length or (limit if task.max_length * factor > longest else None)


def _refuse_extreme_rate(config: RunConfig, decay: float) -> None:
    """A step multiplies the weights by 1 − lr·decay, where a decay was given, and AdamW's rate must leave room in float32."""
    if config.method == "adam" and isinstance(config.lr, float) and config.lr > LARGEST_ADAM_RATE:
        raise ConfigError(f"--lr {config.lr:g} is more than AdamW can compute with: {LARGEST_ADAM_RATE:g} at most")
    if isinstance(config.lr, float) and config.lr * decay >= 1:
        raise ConfigError(
            f"--lr {config.lr:g} with --weight-decay {decay:g} leaves nothing of the weights after one step: their product must "
            "be below 1"
        )


def _absolute_paths(config: RunConfig) -> dict[str, str]:
    """Local paths as they are found from any folder: a run may be resumed and verified from elsewhere."""
    paths = {name: getattr(config, name) for name in ("model", "train", "dev", "test", "held_out")}
    return {name: os.path.abspath(path) for name, path in paths.items() if path and os.path.exists(path)}
