"""From options to figures: which settings are compared, with which contenders."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mezzo import assembly
from mezzo.bench.report import Report, Row
from mezzo.config import RunConfig, from_mapping
from mezzo.errors import ConfigError, nearest
from mezzo.space import Space

if TYPE_CHECKING:
    from mezzo.bench.contenders import Setting, Step

SPACES = "lora,full"
BARE = "bare doubled forward"
FEWEST_ROUNDS = 5
NOISES = ("rademacher", "gaussian", "lowrank")


@dataclass(frozen=True, slots=True)
class Case:
    """One setting of a comparison."""

    config: RunConfig
    model: str
    batch_size: int
    length: int
    samples: int


GROWTH: dict[str, Callable[[Case], Iterator[Case]]] = {
    "batch": lambda case: (replace(case, batch_size=case.batch_size * factor) for factor in (1, 2, 4, 8)),
    "length": lambda case: (replace(case, length=case.length * factor) for factor in (1, 2, 4)),
    "population": lambda case: (replace(case, samples=case.samples * factor) for factor in (1, 2, 4)),
    "model": lambda case: (replace(case, model=name) for name in _larger(case.model)),
}
SIZES = (("roberta-mini", "roberta-base", "roberta-large"), ("llama-mini", "llama-1b", "llama-7b"))


def bench(
    options: Mapping[str, Any],
    length: int = 32,
    spread: float = 0.0,
    rounds: int = 7,
    sweep: str = "",
    show: Callable[[str], None] = lambda text: None,
    published: bool = True,
) -> Report:
    """Time the contenders of every setting, all in this process; `show` gets a line as each setting begins."""
    given = {name: value for name, value in options.items() if value is not None}
    spaces = [space_and_noise(text.strip()) for text in str(given.pop("space", SPACES)).split(",")]
    config = from_mapping(given)
    if rounds < FEWEST_ROUNDS:
        raise ConfigError(f"bench needs at least {FEWEST_ROUNDS} rounds to show a spread, not {rounds}")
    if length < 4:
        raise ConfigError(f"length must be at least 4, not {length}")
    if not 0 <= spread < 1:
        raise ConfigError(f"spread is a share between 0 and 1, not {spread}")
    if sweep and sweep not in GROWTH:
        raise ConfigError(f"sweep is one of {', '.join(GROWTH)}, not {sweep!r}{nearest(sweep, GROWTH)}")
    rows: list[Row] = []
    for model in config.model.split(","):
        case = Case(config, model.strip().removeprefix("mezzo/"), config.batch_size or 16, length, config.samples)
        for one in GROWTH[sweep](case) if sweep else (case,):
            show(f"{one.model}, batch {one.batch_size}, length {one.length}, {one.samples} direction(s) …")
            rows += _compared(one, spaces, spread, rounds, published)
    return Report(tuple(rows))


def _compared(case: Case, spaces: list[tuple[str, str]], spread: float, rounds: int, published: bool) -> list[Row]:
    # Imported late: a mistake in the options is told before torch has loaded.
    from mezzo.bench import timing

    threads, setting = _threads(case.config.threads), setting_of(case, spread)
    with ExitStack() as stack:
        makers = contenders_of(case.config, setting, spaces, published, stack)
        timed = timing.interleaved(makers, setting.device, rounds)
    floor = timed[BARE]
    rows = [
        Row(
            what=name,
            ms=one.median,
            iqr=one.iqr,
            ratio=one.median / floor.median,
            peak_mib=one.peak_mib,
            memory_ratio=one.peak_mib / floor.peak_mib,
            model=case.model,
            batch_size=case.batch_size,
            length=case.length,
            samples=case.samples,
            dtype=case.config.dtype,
            device=setting.device.type,
            threads=threads,
            rounds=rounds,
        )
        for name, one in timed.items()
    ]
    del timed, floor, makers
    gc.collect()
    return rows


def setting_of(case: Case, spread: float) -> Setting:
    """The model, batch and device of a case; refused where a row does not fit the model."""
    import torch

    from mezzo.bench import contenders, shapes
    from mezzo.engines.torch.load import device_of

    config, shape = case.config, shapes.shape_of(case.model)
    room = shape.config["max_position_embeddings"] - 2
    if max(round(case.length * (1 + spread)), config.max_length or 0) > room:
        raise ConfigError(f"{case.model} reads at most {room} tokens; {case.length} tokens do not fit")
    batch = shapes.random_batch(shape, case.batch_size, case.length, spread)
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


def contenders_of(
    config: RunConfig, setting: Setting, spaces: list[tuple[str, str]], published: bool, stack: ExitStack
) -> dict[str, Callable[[], Step]]:
    """What is timed, by name, each made when its turn comes; journals lie in folders that `stack` removes."""
    from mezzo.bench import contenders

    makers: dict[str, Callable[[], Step]] = {
        f"published, padded {how}": partial(contenders.published, setting, dynamic=dynamic)
        for how, dynamic in (("as released", False), ("dynamically", True))
        if published
    }
    makers[BARE] = partial(contenders.bare, setting)
    for kind, noise in spaces:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        space = assembly.space_of(config.replace(space=kind, noise=noise))
        makers[f"mezzo {kind}, {noise}"] = partial(
            contenders.ours, setting, space, "gaussian" if noise == "gaussian" else "rademacher", folder
        )
    return makers


def _threads(wanted: int | None) -> int:
    import torch

    if wanted:
        torch.set_num_threads(wanted)
    return torch.get_num_threads()


def space_and_noise(text: str) -> tuple[str, str]:
    """`lora`, `full:gaussian`, `matrices:lowrank`: what is trained, and how its noise looks."""
    kind, _, noise = text.partition(":")
    noise = noise or "rademacher"
    if noise not in NOISES:
        raise ConfigError(f"noise is one of {', '.join(NOISES)}, not {noise!r}{nearest(noise, NOISES)}")
    Space(kind)
    return kind, noise


def _larger(name: str) -> tuple[str, ...]:
    """The shapes of a family from this one on."""
    for names in SIZES:
        if name in names:
            return names[names.index(name) :]
    return (name,)
