"""From options to figures: which settings are compared, with which contenders."""

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

from mezzo.bench.table import Conditions, Report, Row
from mezzo.config import RunConfig, from_mapping
from mezzo.errors import ConfigError, nearest
from mezzo.method.space import Space
from mezzo.runs.setup import make_space

if TYPE_CHECKING:
    from mezzo.bench.contenders import Setting, Step

SPACES = "lora,full"
BARE = "bare doubled forward"
FEWEST_ROUNDS = 5
NOISES = ("rademacher", "gaussian", "lowrank")
THIN = ("lora", "prefix")
FEWEST_TOKENS = 4
MOST_TOKENS = 2**24


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
    sweep: str | None = None,
    say: Callable[[str], None] = lambda text: None,
    show: Callable[[Report], None] = lambda report: None,
    published: bool = True,
) -> Report:
    """Time the contenders of every setting, all in this process. `say` gets a line as a setting begins, `show` its figures."""
    given = {name: value for name, value in options.items() if value is not None}
    spaces = [space_and_noise(text) for text in str(given.pop("space", SPACES)).split(",")]
    config = from_mapping(given)
    if rounds < FEWEST_ROUNDS:
        raise ConfigError(f"bench needs at least {FEWEST_ROUNDS} rounds to show a spread, not {rounds}")
    if not 0 <= spread < 1:
        raise ConfigError(f"spread is a share between 0 and 1, not {spread}")
    if sweep is not None and sweep not in GROWTH:
        raise ConfigError(f"sweep is one of {', '.join(GROWTH)}, not {sweep!r}{nearest(sweep, GROWTH)}")
    cases: list[Case] = []
    for model in config.model.split(","):
        case = Case(config, model.strip().removeprefix("mezzo/"), config.batch_size or 16, length, config.samples)
        cases += GROWTH[sweep](case) if sweep else (case,)
    for case in cases:  # before the first is timed: a mistake in the last one should not cost the others
        refuse_what_does_not_fit(case, spread)
    rows: list[Row] = []
    for case in cases:
        say(f"{case.model}, batch {case.batch_size}, length {case.length}, {case.samples} direction(s) …")
        found = _compared(case, spaces, spread, rounds, published)
        if found[0].conditions.device == "cpu" and config.dtype != "float32":
            say(
                f"on a CPU mezzo stores {config.dtype} and computes in float32; the published rows compute in {config.dtype}"
            )
        show(Report(tuple(found)))
        rows += found
    return Report(tuple(rows))


def refuse_what_does_not_fit(case: Case, spread: float) -> None:
    # Imported late, as everything here that imports torch: other mistakes are told before that has loaded.
    from mezzo.bench import shapes

    if case.length < FEWEST_TOKENS:
        raise ConfigError(f"length must be at least {FEWEST_TOKENS}, not {case.length}")
    room, padded = shapes.room(shapes.shape_of(case.model)), case.config.max_length or 0
    longest = round(case.length * (1 + spread))
    if longest > room:
        spreading = f" with --spread {spread:g}" if spread else ""
        raise ConfigError(
            f"{case.model} reads at most {room} tokens: length {case.length}{spreading} makes {longest}, which do not fit"
        )
    if padded > room:
        raise ConfigError(f"{case.model} reads at most {room} tokens: --max-length {padded} does not fit")
    if case.batch_size * longest > MOST_TOKENS:
        raise ConfigError(
            f"a batch of {case.batch_size} rows of {longest} tokens is too much to time; at most {MOST_TOKENS:,} tokens"
        )


def _compared(case: Case, spaces: list[tuple[str, str]], spread: float, rounds: int, published: bool) -> list[Row]:
    from mezzo.bench import timing

    threads, setting = _threads(case.config.threads), setting_of(case, spread)
    with ExitStack() as stack:
        makers = contenders_of(case.config, setting, spaces, published, stack)
        timed = timing.interleaved(makers, setting.device, rounds)
    floor, conditions = timed[BARE], _conditions(case, setting, spread, threads, rounds)
    rows = [
        Row(
            what=name,
            ms=one.median,
            iqr=one.iqr,
            ratio=one.median / floor.median,
            peak_mib=one.peak_mib,
            memory_ratio=one.peak_mib / floor.peak_mib,
            all_ms=tuple(one.ms),
            conditions=conditions,
        )
        for name, one in timed.items()
    ]
    del timed, floor, makers
    gc.collect()
    return rows


def _conditions(case: Case, setting: Setting, spread: float, threads: int, rounds: int) -> Conditions:
    import torch

    from mezzo import __version__

    config, device = case.config, setting.device
    return Conditions(
        model=case.model,
        batch_size=case.batch_size,
        length=case.length,
        spread=spread,
        samples=case.samples,
        micro_batch=config.micro_batch,
        max_length=setting.max_length,
        rank=config.rank,
        noise_rank=config.noise_rank,
        dtype=config.dtype,
        device=device.type,
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        threads=threads,
        rounds=rounds,
        torch=torch.__version__,
        mezzo=__version__,
    )


def setting_of(case: Case, spread: float) -> Setting:
    """The model, batch and device of a case."""
    import torch

    from mezzo.bench import contenders, shapes
    from mezzo.engines.torch.loading import device_of

    config, shape = case.config, shapes.shape_of(case.model)
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
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mezzo-bench-")))
        space = make_space(config.replace(space=kind, noise=noise))
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
    kind, _, noise = text.strip().partition(":")
    noise = noise or "rademacher"
    if noise not in NOISES:
        raise ConfigError(f"noise is one of {', '.join(NOISES)}, not {noise!r}{nearest(noise, NOISES)}")
    Space(kind)
    if kind in THIN and noise == "lowrank":
        raise ConfigError(f"what {kind} trains is thin already: its noise is rademacher or gaussian, not lowrank")
    return kind, noise


def _larger(name: str) -> tuple[str, ...]:
    """The shapes of a family from this one on."""
    for names in SIZES:
        if name in names:
            return names[names.index(name) :]
    return (name,)
