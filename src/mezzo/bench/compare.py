"""`mezzo bench`: which settings are compared, with which contenders."""

from __future__ import annotations

import gc
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mezzo.bench.table import BenchResult, Timing
from mezzo.config import RunConfig, from_mapping
from mezzo.errors import ConfigError, nearest
from mezzo.method.noise import NOISES
from mezzo.method.space import Space
from mezzo.runs.setup import make_space

if TYPE_CHECKING:
    from mezzo.bench.contenders import Setting, Step

DEFAULT_SPACES = "lora,full"
BARE = "bare doubled forward"
MIN_ROUNDS = 5
MIN_LENGTH = 4
MAX_BATCH_TOKENS = 2**24


@dataclass(frozen=True, slots=True)
class Case:
    """One setting of a comparison."""

    config: RunConfig
    model: str
    batch_size: int
    length: int
    samples: int
    spread: float = 0.0


SWEEPS: dict[str, Callable[[Case], Iterator[Case]]] = {
    "batch": lambda case: (replace(case, batch_size=case.batch_size * factor) for factor in (1, 2, 4, 8)),
    "length": lambda case: (replace(case, length=case.length * factor) for factor in (1, 2, 4)),
    "population": lambda case: (replace(case, samples=case.samples * factor) for factor in (1, 2, 4)),
    "model": lambda case: (replace(case, model=name) for name in _larger_models(case.model)),
}
MODELS_BY_SIZE = (("roberta-mini", "roberta-base", "roberta-large"), ("llama-mini", "llama-1b", "llama-7b"))


def bench(
    options: Mapping[str, Any],
    length: int = 32,
    spread: float = 0.0,
    rounds: int = 7,
    sweep: str | None = None,
    log: Callable[[str], None] = lambda text: None,
    show: Callable[[BenchResult], None] = lambda result: None,
    published: bool = True,
) -> BenchResult:
    """Time the contenders of every setting, all in this process. Each setting is logged first and shown when it is done."""
    config, spaces = parse_options(options)
    if rounds < MIN_ROUNDS:
        raise ConfigError(f"bench needs at least {MIN_ROUNDS} rounds to show a spread, not {rounds}")
    if not 0 <= spread < 1:
        raise ConfigError(f"spread is a share between 0 and 1, not {spread}")
    if sweep is not None and sweep not in SWEEPS:
        raise ConfigError(f"sweep is one of {', '.join(SWEEPS)}, not {sweep!r}{nearest(sweep, SWEEPS)}")
    cases: list[Case] = []
    for model in config.model.split(","):
        name = model.strip().removeprefix("mezzo/")
        case = Case(config, name, config.batch_size or 16, length, config.samples or 1, spread)
        cases += SWEEPS[sweep](case) if sweep else (case,)
    for case in cases:  # all before the first is timed: an error in the last one must not cost the others
        check_case(case)
    timings: list[Timing] = []
    for case in cases:
        log(f"{case.model}, batch {case.batch_size}, length {case.length}, {case.samples} direction(s) …")
        case_timings = _time_case(case, spaces, rounds, published)
        if case_timings[0].conditions["device"] == "cpu" and config.dtype != "float32":
            log(
                f"on a CPU mezzo stores {config.dtype} and computes in float32; the published rows compute in {config.dtype}"
            )
        show(BenchResult(tuple(case_timings)))
        timings += case_timings
    return BenchResult(tuple(timings))


def check_case(case: Case) -> None:
    """Raise ConfigError for a case that its model cannot run."""
    # Imported here, like everything that imports torch, so that errors in options are reported without waiting for it.
    from mezzo.bench import shapes

    if case.length < MIN_LENGTH:
        raise ConfigError(f"length must be at least {MIN_LENGTH}, not {case.length}")
    limit, padded = shapes.max_tokens(shapes.find_shape(case.model)), case.config.max_length or 0
    longest = round(case.length * (1 + case.spread))
    if longest > limit:
        spreading = f" with --spread {case.spread:g}" if case.spread else ""
        raise ConfigError(
            f"{case.model} reads at most {limit} tokens: length {case.length}{spreading} makes {longest}, which do not fit"
        )
    if padded > limit:
        raise ConfigError(f"{case.model} reads at most {limit} tokens: --max-length {padded} does not fit")
    if case.batch_size * longest > MAX_BATCH_TOKENS:
        raise ConfigError(
            f"a batch of {case.batch_size} rows of {longest} tokens is too much to time; at most {MAX_BATCH_TOKENS:,} tokens"
        )


def _time_case(case: Case, spaces: list[tuple[str, str]], rounds: int, published: bool) -> list[Timing]:
    import torch

    from mezzo.bench import timing

    if case.config.threads:
        torch.set_num_threads(case.config.threads)
    setting = build_setting(case)
    with ExitStack() as stack:
        factories = contender_factories(case.config, setting, spaces, published, stack)
        contenders = timing.time_in_turns(factories, setting.device, rounds)
    bare, conditions = contenders[BARE], {**_conditions(case, setting), "rounds": rounds}
    timings = [
        Timing(
            what=name,
            ms=contender.median,
            iqr=contender.iqr,
            ratio=contender.median / bare.median,
            peak_mib=contender.peak_mib,
            memory_ratio=contender.peak_mib / bare.peak_mib,
            all_ms=tuple(contender.ms),
            conditions=conditions,
        )
        for name, contender in contenders.items()
    ]
    del contenders, bare, factories  # free the models before the next case
    gc.collect()
    return timings


def _conditions(case: Case, setting: Setting) -> dict[str, Any]:
    import torch

    from mezzo import __version__

    device = setting.device
    return {
        **{name: getattr(case, name) for name in ("model", "batch_size", "length", "spread", "samples")},
        **{name: getattr(case.config, name) for name in ("micro_batch", "rank", "noise_rank", "dtype")},
        "max_length": setting.max_length,
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "mezzo": __version__,
    }


def build_setting(case: Case) -> Setting:
    """The model shape, batch and device of a case."""
    import torch

    from mezzo.bench import contenders, shapes
    from mezzo.engines.torch.loading import device_of

    config, shape = case.config, shapes.find_shape(case.model)
    batch = shapes.random_batch(shape, case.batch_size, case.length, case.spread)
    longest = max(len(prompt.ids) for prompt in batch.prompts)
    return contenders.Setting(
        shape,
        batch,
        config.micro_batch,
        case.samples,
        max(longest, config.max_length or 128),
        getattr(torch, config.dtype),
        device_of(config.device),
    )


def contender_factories(
    config: RunConfig, setting: Setting, spaces: list[tuple[str, str]], published: bool, stack: ExitStack
) -> dict[str, Callable[[], Step]]:
    """By name, functions that build the contenders; journals are written to folders that `stack` removes."""
    from mezzo.bench import contenders

    factories: dict[str, Callable[[], Step]] = {
        f"published, padded {how}": partial(contenders.make_published_step, setting, dynamic=dynamic)
        for how, dynamic in (("as released", False), ("dynamically", True))
        if published
    }
    factories[BARE] = partial(contenders.make_bare_forward, setting)
    for kind, noise in spaces:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mezzo-bench-")))
        space = make_space(config.replace(space=kind, noise=noise))
        factories[f"mezzo {kind}, {noise}"] = partial(
            contenders.make_mezzo_step, setting, space, NOISES[noise].kind, folder
        )
    return factories


def parse_options(options: Mapping[str, Any]) -> tuple[RunConfig, list[tuple[str, str]]]:
    """The configuration, and the spaces with their noise."""
    stated = {name: value for name, value in options.items() if value is not None}
    spaces = [parse_space(text) for text in str(stated.pop("space", DEFAULT_SPACES)).split(",")]
    return from_mapping(stated), spaces


def parse_space(text: str) -> tuple[str, str]:
    """Space and noise of `lora`, `full:gaussian` or `matrices:lowrank`."""
    kind, _, noise = text.strip().partition(":")
    noise = noise or "rademacher"
    from_mapping({"noise": noise})  # checks the noise as for training
    if Space(kind).adapter and NOISES[noise].low_rank:
        dense = " or ".join(name for name, choice in NOISES.items() if not choice.low_rank)
        raise ConfigError(f"space {kind} trains no matrices of the model: its noise is {dense}, not {noise}")
    return kind, noise


def _larger_models(name: str) -> tuple[str, ...]:
    """This model and the larger ones of its family."""
    return next((names[names.index(name) :] for names in MODELS_BY_SIZE if name in names), (name,))
