"""A configuration resolved against its model and task: everything about a run that is known before weights are loaded."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from mezzo.config import RunConfig
from mezzo.engines import open_engine
from mezzo.engines.base import Engine, EngineSpec
from mezzo.errors import ConfigError, LabelError, ModelError
from mezzo.evaluation.evaluate import (
    DetailedEvaluation,
    Evaluation,
    evaluate,
    evaluate_linear_probe,
    evaluate_rewards,
    evaluate_texts,
)
from mezzo.evaluation.figures import REWARD
from mezzo.evaluation.held_out import held_out_batch
from mezzo.evaluation.reward_workers import RewardWorkers
from mezzo.evaluation.rewards import (
    LINE_END,
    REWARDS,
    RewardObjective,
    explain_no_reward,
)
from mezzo.method import noise
from mezzo.method.objectives import OBJECTIVES, Objective, get_objective
from mezzo.method.space import ADAPTERS, Space
from mezzo.runs.datasets import Splits, load_splits
from mezzo.runs.objectives import find_reward
from mezzo.tasks import Encoder, Task
from mezzo.types import Batch, Example, Family, Generation, Prompt, Readout

# Examples in one forward where no batch size says it.
ROWS = 128
# From how many training examples on those that judge a step are taken from them: so many are not seen again soon.
MANY_EXAMPLES = 2000


@dataclass(frozen=True)
class Setup:
    """What `resolve_setup` returns. Data is loaded, prompts are encoded and the engine's spec is made when first used, once."""

    config: RunConfig
    family: Family
    task: Task
    tokenizer: Any
    max_length: int | None = None
    """Tokens of a prompt at most; None: the task's own limit."""
    vocabulary: int | None = None
    """Rows of the model's embedding."""
    function: Any = None
    """The user's own objective; only what the user has named is imported."""

    # ---- data

    @cached_property
    def splits(self) -> Splits:
        try:
            return load_splits(self.config, self.task, unlabelled=not self.needs_labels)
        except LabelError as error:
            raise explain_no_reward(self.function, error) from None

    @property
    def needs_labels(self) -> bool:
        """Whether examples must have a label or a right answer; most rewards need none."""
        return self.reward is None or self.reward.needs_answers

    @cached_property
    def encoder(self) -> Encoder:
        return Encoder(
            self.task,
            self.tokenizer,
            max_length=self.max_length,
            demonstrations=self.splits.train if self.config.demonstrations else (),
            readout=cast(Any, self.config.readout),
            vocabulary=self._needs_vocabulary,
            seed=self.config.seed,
            chat=bool(self.config.chat),
            in_context=self.config.demonstrations,
        )

    @property
    def _needs_vocabulary(self) -> bool:
        objective = OBJECTIVES.get(self.config.objective)
        return objective is not None and objective.vocabulary

    @cached_property
    def train_prompts(self) -> tuple[Prompt, ...]:
        return self._keep_trained(self.encode(self.splits.train))

    def _keep_trained(self, prompts: tuple[Prompt, ...]) -> tuple[Prompt, ...]:
        """Of candidates whose LM loss is trained, the right one alone: the others do not enter it."""
        if self.readout.kind != "candidates" or not self._needs_vocabulary:
            return prompts
        return tuple(replace(p, candidates=p.candidates[p.label :][:1], label=0, right=()) for p in prompts)

    @cached_property
    def judging_prompts(self) -> tuple[Prompt, ...]:
        """Held-out examples that accept or refuse a move, where training examples are too few to be fresh: those of dev."""
        few = len(self.train_prompts) < MANY_EXAMPLES
        return self._keep_trained(self.encode(self.splits.dev)) if few and self.config.method == "solve" else ()

    @cached_property
    def data_digest(self) -> str:
        """SHA-256 of the encoded examples that decide about the weights."""
        total = hashlib.sha256()
        for prompt in (*self.train_prompts, *self.judging_prompts):
            total.update(repr((prompt.ids, prompt.label, prompt.position, prompt.candidates)).encode())
            if self.reward:  # it may read every field
                total.update(repr(sorted(prompt.row.items())).encode())
        return total.hexdigest()

    @property
    def readout(self) -> Readout:
        return self.encoder.readout

    def encode(self, examples: Sequence[Example], draw: int = 0) -> tuple[Prompt, ...]:
        """Prompts of examples; `draw` numbers the sampling of demonstrations."""
        prompts = self.encoder.batch(examples, draw).prompts if examples else ()
        self.refuse_unknown_tokens(token for p in prompts for ids in (p.ids, *p.candidates) for token in ids)
        return prompts

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def refuse_unknown_tokens(self, tokens: Iterable[int]) -> None:
        """Refuse tokens that the model has no embedding for."""
        largest = max(tokens, default=0)
        if self.vocabulary is not None and largest >= self.vocabulary:
            raise ModelError(
                f"the tokenizer of {self.config.model} makes token {largest}, and the model knows {self.vocabulary}: "
                "they do not belong together"
            )

    def with_found(self, **values: float) -> Setup:
        """The same with options that were found later. What was made of the data is kept."""
        other = replace(self, config=self.config.replace(**values))
        vars(other).update({name: value for name, value in vars(self).items() if name not in vars(other)})
        return other

    # ---- engine and objective

    @property
    def pad_id(self) -> int:
        """The padding token; where the tokenizer has none, its end of text, which nothing follows."""
        candidates = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((int(token) for token in candidates if token is not None), 0)

    @cached_property
    def engine_spec(self) -> EngineSpec:
        config = self.config
        return EngineSpec(
            model=config.model,
            family=self.family,
            space=make_space(config, fresh_head=self.readout.classes > 0),
            rows=config.micro_batch or config.batch_size or ROWS,
            fewer_rows=config.micro_batch is None,
            many_probes=config.method in ("solve", "es"),
            population=2 * (config.samples or 1) if self.reward else 0,
            draws_texts=config.temperature > 0,
            classes=self.readout.classes,
            noise_kind=noise.get_noise(config.noise).kind,
            seed=config.seed,
            pad_id=self.pad_id,
            cache_mb=config.cache_mb,
            prefix_ids=self._prefix_ids() if config.space == "prefix" else (),
            device=config.device,
            dtype=config.dtype,
            threads=config.threads,
            remote_code=config.remote_code,
            quantize=config.quantize,
            offload=config.offload,
            gradients=config.method == "adam",
            tp=config.tp,
            urls=config.url,
            exclusive_server=config.exclusive_server,
            server_timeout=config.server_timeout,
        )

    def open_engine(self) -> Engine:
        """The run's engine in this process, its trained tensors at the base."""
        return open_engine(self.config.engine, self.engine_spec)

    @property
    def objective(self) -> Objective:
        """The configured objective, or the user's own function."""
        return self.reward or get_objective(self.function or self.config.objective)

    @cached_property
    def reward(self) -> RewardObjective | None:
        """The objective where it rewards generated text: dev and test are then judged by it."""
        function, config = find_reward(self.config.objective, self.task, self.function), self.config
        if function is None:
            return None
        own = function is self.function
        count = config.reward_workers or min(8, os.cpu_count() or 1)
        return RewardObjective(
            function,
            self.decode,
            self.generation,
            self.stop,
            workers=RewardWorkers(function, count, config.reward_seconds, config.reward_mb) if own else None,
            failed=config.failed_reward,
            name=REWARD if own else f"{next(name for name, each in REWARDS.items() if each is function)} {REWARD}",
        )

    @cached_property
    def held_out(self) -> Batch:
        """A text that is not trained on, whose perplexity shows what a model forgets."""
        return held_out_batch(self.tokenizer, self.config.held_out, self.max_length or self.task.max_length)

    @property
    def check_batch(self) -> Batch:
        """What an engine checks itself with: prompts may have no answers to score."""
        return self.held_out if self.reward else Batch(self.train_prompts, self.readout)

    @cached_property
    def generation(self) -> Generation:
        config = self.config
        assert config.max_new_tokens is not None
        how = (config.max_new_tokens, config.temperature, config.top_p, config.draws, config.seed)
        return Generation(*how, stop_ids=self._stop_ids())

    def _stop_ids(self) -> tuple[int, ...]:
        """Tokens that hold a stop text, so that generation ends where the answer does; texts of several tokens are cut later."""
        if not self.stop:
            return ()
        texts = self.tokenizer.batch_decode([[token] for token in range(len(self.tokenizer))], skip_special_tokens=True)
        return tuple(token for token, text in enumerate(texts) if any(stop in text for stop in self.stop))

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end a generated answer; on a command line \\n stands for the end of a line."""
        stop = LINE_END if self.config.stop is None else self.config.stop
        return tuple(text.replace("\\n", "\n") for text in stop if text)

    def _prefix_ids(self) -> tuple[int, ...]:
        """As many tokens of PREFIX_TEXT as the prefix is long; the seed decides where they start."""
        ids = self.tokenizer(PREFIX_TEXT, add_special_tokens=False)["input_ids"]
        if not ids:
            return ()
        length = self.config.prefix_tokens
        ids = ids * -(-2 * length // len(ids))
        start = int(noise.order(self.config.seed, "prefix", len(ids) - length + 1)[0])
        return tuple(ids[start : start + length])

    # ---- evaluation

    def evaluate(self, engine: Engine, examples: Sequence[Example]) -> Evaluation:
        return self.evaluate_in_detail(engine, examples).evaluation

    def evaluate_in_detail(self, engine: Engine, examples: Sequence[Example]) -> DetailedEvaluation:
        """The reward, or the task's own metric, of predictions or of generated answers, with the answers."""
        prompts = self.encode(examples)
        if self.reward:
            return evaluate_rewards(engine, Batch(prompts, self.readout), self.reward, self.held_out)
        if self.task.kind == "generation":
            return evaluate_texts(engine, prompts, self.readout, self.decode, self.generation, self.stop)
        # Of a masked model's demonstrations; those of a causal one are the same for all prompts.
        count = self.config.demonstrations if self.family == "masked" else 0
        draws = [self.encode(examples, draw) for draw in range(1, count)]
        # The candidates of a choice have no prior in common: their first and second place mean nothing.
        calibrate = self.task.kind == "classification"
        return evaluate(engine, prompts, self.readout, self.task.metric, draws, calibrate)

    def evaluate_linear_probe(self, engine: Engine, examples: Sequence[Example]) -> DetailedEvaluation:
        """A linear head on frozen features, fitted to the training examples."""
        if self.task.kind != "classification":
            raise ConfigError(f"a linear probe predicts labels, and {self.task.name!r} is a {self.task.kind} task")
        train, prompts = self.encode(self.splits.train), self.encode(examples)
        return evaluate_linear_probe(engine, train, prompts, self.readout, len(self.task.labels), self.task.metric)


def make_space(config: RunConfig, fresh_head: bool = False) -> Space:
    """What is trained: with an adapter, also a head that is random until it is."""
    assert config.space is not None
    return Space(
        kind=config.space,
        rank=config.rank,
        alpha=config.alpha,
        targets=config.targets,
        factors=config.factors or "both",
        tokens=config.prefix_tokens,
        head=config.train_head or (fresh_head and config.space in ADAPTERS),
        only=config.only,
        layers=config.layers,
        noise_rank=config.noise_rank if noise.get_noise(config.noise).low_rank else 0,
        decay=config.decay or "all",
    )


# An ordinary text, whose keys and values a prefix starts from.
PREFIX_TEXT = (
    "It was late when the train came in. A few people stood on the platform with their bags, looking for a face they knew, "
    "and an old man with a dog walked slowly up and down. The rain had stopped, the lamps were lit, and from the small "
    "station house came the sound of a radio on which somebody was telling a story about the sea. Nobody listened to it. "
    "When the doors opened, everyone began to talk at once: about the journey, the weather, the price of a cup of tea."
)
