"""The method that a setup asks for."""

from __future__ import annotations

from collections.abc import Callable

from mezzo.config import RunConfig
from mezzo.errors import ConfigError
from mezzo.evaluation.rewards import NO_REWARD
from mezzo.method.batches import Batches, ExampleStream, make_batches
from mezzo.method.es import EvolutionStrategies
from mezzo.method.estimators import Spsa
from mezzo.method.gradient import GradientMethod
from mezzo.method.method import EstimatorMethod, Method
from mezzo.method.objectives import Objective
from mezzo.method.optimizers import LARGEST, Sgd, schedule
from mezzo.method.solve import Solve
from mezzo.runs.setup import Setup


def make_method(setup: Setup, objective: Objective) -> Method:
    config = setup.config
    return METHODS[str(config.method)](setup, objective)


def _make_solve(setup: Setup, objective: Objective) -> Method:
    config = setup.config
    assert config.eps is not None
    judges = setup.judging_prompts
    return Solve(
        config.seed,
        config.eps,
        ExampleStream(setup.train_prompts, setup.readout, config.seed),
        ExampleStream(judges, setup.readout, config.seed) if judges else None,
        directions=config.samples or 0,
        examples=config.batch_size or 0,
        dtype=config.dtype,
    )


def _make_spsa(setup: Setup, objective: Objective) -> Method:
    return EstimatorMethod(objective, *_make_parts(setup))


def _make_es(setup: Setup, objective: Objective) -> Method:
    if setup.reward is None:
        raise ConfigError(NO_REWARD)
    return EvolutionStrategies(setup.reward, *_make_parts(setup), setup.config.shaping)


def _make_parts(setup: Setup) -> tuple[Spsa, Sgd, Batches]:
    """What asks for probes, what makes updates of slopes, and the examples."""
    config = setup.config
    assert config.eps is not None and config.steps is not None
    assert config.schedule is not None and config.batch_size is not None and config.samples is not None
    rate = schedule(config.schedule, _rate(config), config.steps, config.warmup)
    return (
        Spsa(config.seed, config.eps, config.samples),
        Sgd(rate, config.weight_decay or 0.0, config.clip, LARGEST[_stored_type(setup)]),
        make_batches(setup.train_prompts, setup.readout, config.seed, config.batch_size),
    )


def _stored_type(setup: Setup) -> str:
    """How the trained weights are stored: as the model's, unless they are LoRA factors or a prefix alone."""
    config = setup.config
    with_head = config.train_head or setup.readout.kind == "head"
    return "float32" if config.space in ("lora", "prefix") and not with_head else config.dtype


def _make_adam(setup: Setup, objective: Objective) -> Method:
    config = setup.config
    assert config.steps is not None
    assert config.schedule is not None and config.batch_size is not None
    return GradientMethod(
        schedule(config.schedule, _rate(config), config.steps, config.warmup),
        make_batches(setup.train_prompts, setup.readout, config.seed, config.batch_size),
        config.weight_decay or 0.0,
    )


def _rate(config: RunConfig) -> float:
    """The learning rate; none before it is found."""
    assert config.lr is not None
    return 0.0 if isinstance(config.lr, str) else config.lr


METHODS: dict[str, Callable[[Setup, Objective], Method]] = {
    "solve": _make_solve,
    "spsa": _make_spsa,
    "es": _make_es,
    "adam": _make_adam,
}
