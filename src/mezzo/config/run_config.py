"""Every option of a run, once, with all that is known of it. The command line, files and keyword arguments read this table.

A `RunConfig` is resolved and then frozen. `None` means "decide for me": the model, space and data decide, and the resolved
value is what the run folder keeps.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from mezzo.config.option import Option, option
from mezzo.engines.hf_hub import needs_hub

# The commands that use a model without training it.
USE = ("eval", "predict", "signal")
LARGEST_SEED = 2**63 - 1
# Processes that any machine can run.
FEW_WORKERS = 8
# Data of the hub, which must be asked for it.
HUB_DATA: dict[str, Any] = {
    "contacts": lambda source: str(source).startswith("hub:"),
    "placeholder": "DATA",
    "resumable": True,  # from another place; the journal has the digest
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What a run does. Fields are grouped as `mezzo train --help` and the tables of a TOML file group them."""

    # fmt: off
    model: str = option("model", "mezzo/roberta-mini", "bundled name, local folder or hub name",
        contacts=needs_hub, placeholder="NAME", commands=(*USE, "tasks"), reopen="machine",
        aliases=("model_path", "model_name_or_path"))
    engine: str = option("model", "torch", "what runs the model: torch, sglang, vllm",
        choices="mezzo.engines.registry:ENGINES", commands=USE, reopen="machine")
    device: str = option("model", "auto",
        "cpu, cuda, or auto: a GPU if there is one; cuda:0,cuda:1 or all (GPUs) split the layers of a model",
        commands=(*USE, "bench", "tasks"), resumable=True, reopen="machine", aliases=("devices", "device_map"))
    dtype: str = option("model", "float32", "type of the weights: float32, bfloat16, float16; a CPU computes in float32",
        choices=("float32", "bfloat16", "float16"), commands=(*USE, "bench"))
    quantize: str | None = option("model", None,
        "keep the frozen base in 8bit or 4bit, by bitsandbytes; with --space lora or prefix",
        choices=("8bit", "4bit"), commands=USE)
    offload: bool = option("model", False,
        "keep the layers in host memory and copy each to the GPU when it runs; with --space lora or prefix",
        commands=USE, resumable=True, reopen="machine")
    micro_batch: int | None = option("model", None,
        "examples in one forward; less needs less memory [16 on a CPU, else the whole batch]",
        at_least=1, commands=(*USE, "bench"), reopen="machine")
    cache_mb: float = option("model", 256.0,
        "memory to keep what frozen lower layers make of each example, with --layers or a head; 0 keeps nothing",
        at_least=0, commands=USE, reopen="machine")
    threads: int | None = option("model", None, "CPU threads [all cores, or OMP_NUM_THREADS]",
        at_least=1, at_most=1024, commands=(*USE, "bench", "tasks"), resumable=True, reopen="machine")
    tp: int = option("model", 1, "ranks that SGLang splits the model over (tensor parallelism)",
        at_least=1, at_most=1024, commands=USE, resumable=True, reopen="machine")
    url: tuple[str, ...] = option("model", (), "SGLang servers to use instead of starting one; several share each batch",
        contacts=bool, address=True, placeholder="ADDRESS", commands=USE, resumable=True, reopen="machine")
    exclusive_server: bool = option("model", False,
        "the servers have no other clients: --space matrices may change their weights until the run ends",
        commands=USE, resumable=True, reopen="machine")
    server_timeout: float = option("model", 600.0, "seconds to wait for a server when none answers any more",
        positive=True, commands=USE, resumable=True, reopen="machine")
    remote_code: bool = option("model", False, "allow code that comes with a hub model to run",
        runs_code=bool, commands=(*USE, "tasks"), resumable=True, reopen="machine")

    workers: int | None = option("workers", None, "processes that share each step's forward passes [none: this process]",
        at_least=1, at_most=1024, exhausts=lambda count: count is not None and count > max(FEW_WORKERS, os.cpu_count() or 1),
        placeholder="N", resumable=True)
    ray_address: str | None = option("workers", None,
        "let Ray run the workers: an address, auto, or local for a Ray of its own",
        contacts=lambda address: bool(address) and address not in ("local", "auto"),
        address=True, placeholder="ADDRESS", resumable=True)
    worker_timeout: float | None = option("workers", None,
        "seconds after which a silent worker is replaced [by measured times]", positive=True, resumable=True)
    check_workers: int = option("workers", 100, "steps between comparisons of the workers' weights and scores; 0 never",
        at_least=0, resumable=True)
    backend: str = option("workers", "gloo", "how the ranks of torchrun talk: gloo, nccl",
        choices=("gloo", "nccl"), resumable=True)

    task: str | None = option("task", None,
        "task name or TOML file; see 'mezzo tasks' [proposed for --train; questions for the bundled data]",
        commands=USE, reopen="question", aliases=("task_name",))
    train: str | None = option("task", None, "training data: jsonl, json, csv, tsv, txt, parquet, or a k-shot folder",
        **HUB_DATA, commands=("eval", "signal"), reopen="question", aliases=("train_file", "train_dataset"))
    dev: str | None = option("task", None,
        "data that chooses the best checkpoint [that of the train folder, or a part of train is held out]",
        **HUB_DATA, aliases=("dev_file", "validation_file"))
    test: str | None = option("task", None, "data for the reported accuracy [that of a k-shot folder, or dev]",
        **HUB_DATA, aliases=("test_file", "eval_dataset"))
    k: int | None = option("task", None, "train on k examples per label, and hold out k more per label as dev",
        at_least=1, commands=("eval", "signal"), reopen="question", aliases=("num_k",))
    data_seed: int | None = option("task", None, "seed of the k-shot sample [the run's seed] and of what is held out [0]",
        at_least=0, at_most=LARGEST_SEED, commands=("eval", "signal"), reopen="question", aliases=("train_set_seed",))
    id_order: str | None = option("task", None, "whose numbering integer labels follow, where sources differ: hub, lm-bff, csv",
        choices=("hub", "lm-bff", "csv"), commands=USE, reopen="question")
    columns: tuple[str, ...] = option("task", (),
        "which column of the data is which of the task's, e.g. text=body,label=stars [found by name]",
        pairs="text=body,label=stars", commands=(*USE, "tasks"), reopen="question")
    encoding: str | None = option("task", None,
        "how the data files encode text [utf-8; where that fails, as the task's files are published, or latin-1]",
        commands=(*USE, "tasks"), reopen="question")
    skip_unlabelled: bool = option("task", False, "leave out rows without a label, and say how many",
        commands=("eval", "signal"), reopen="question")
    template: str | None = option("task", None, "prompt, e.g. '{text} It was [MASK].' [the task's]",
        commands=(*USE, "tasks"), reopen="question")
    words: tuple[str, ...] | None = option("task", None, "label words, e.g. negative=bad,positive=good [the task's]",
        pairs="negative=bad,positive=good", commands=(*USE, "tasks"), reopen="question")
    max_length: int | None = option("task", None,
        "tokens of a prompt at most; sentences are cut, the template never [the task's]",
        at_least=1, commands=(*USE, "bench"), reopen="question", aliases=("max_seq_length",))
    chat: bool | None = option("task", None,
        "give the prompt as a user's message in the chat template of the model's tokenizer [as an exported model was trained]",
        commands=USE, reopen="question")
    demonstrations: int = option("task", 0,
        "causal model: put this many solved training examples before each prompt (32 as published); masked model: solve one"
        " example per label beside it, evaluation averages this many draws",
        at_least=0, at_most=1024, commands=("eval",), reopen="question")
    readout: str = option("task", "auto", "auto, words (label words), head (fresh classification head) or candidates",
        choices="mezzo.tasks.encoder:READOUTS", commands=USE)
    train_limit: int | None = option("task", None, "use at most this many training examples",
        at_least=1, aliases=("num_train", "max_train_samples"))
    eval_limit: int | None = option("task", None, "use at most this many dev and test examples",
        at_least=1, commands=("eval",), resumable=True, reopen="question", aliases=("num_dev", "num_eval", "max_eval_samples"))

    space: str | None = option("space", None,
        "what is trained: full, matrices, lora, prefix, head, a pattern [lora, or the bundled model's]",
        choices="mezzo.method.space:SPACES", open_choices=True, commands=("signal",))
    rank: int = option("space", 8, "rank of LoRA", at_least=1, commands=("signal", "bench"), aliases=("lora_r",))
    alpha: float = option("space", 16.0, "LoRA's scale; its product is multiplied by alpha/rank",
        positive=True, commands=("signal",), aliases=("lora_alpha",))
    targets: tuple[str, ...] = option("space", (), "linear layers LoRA attaches to, or all-linear [query and value]",
        commands=("signal",), aliases=("target_modules",))
    factors: str | None = option("space", None,
        "LoRA factors that are trained: b, beside a fixed A, or both [b; both with --method spsa or adam, as published]",
        choices="mezzo.method.space:FACTORS", commands=("signal",))
    prefix_tokens: int = option("space", 5, "length of a prefix: trained keys and values per layer",
        at_least=1, commands=("signal",), aliases=("num_prefix", "num_virtual_tokens"))
    train_head: bool = option("space", False,
        "beside lora or prefix, also train the LM head; a fresh classification head always is", commands=("signal",))
    only: tuple[str, ...] = option("space", (), "of the space, train only tensors that match these patterns",
        commands=("signal",))
    layers: str = option("space", "", "of the space, train only these layers, e.g. 4: for the upper ones",
        commands=("signal",))
    noise: str | None = option("space", None,
        "direction: rademacher (±1), gaussian or lowrank (±1 factors on matrices) [rademacher; lowrank in bfloat16 or on sglang]",
        choices="mezzo.method.noise:NOISES", commands=("signal",))
    noise_rank: int = option("space", 8, "rank of lowrank noise", at_least=1, commands=("signal", "bench"))

    method: str | None = option("method", None,
        "solve: each move follows from all scores, without a learning rate; spsa: as published; es: evolution strategies, for "
        "rewards of generated text; adam: AdamW with gradients, the baseline, which needs their memory [solve for "
        "cross-entropy, es for rewards]",
        choices=("solve", "spsa", "es", "adam"))
    budget: str | None = option("method", None,
        "example-forwards to train for, such as 100k, or time, such as 10min [250k with --method solve]",
        resumable=True, per_model=True)
    objective: str = option("method", "cross_entropy",
        "cross_entropy, vocabulary_cross_entropy, accuracy, f1, matthews, or module:function; a function with a parameter "
        "'completion' rewards generated text, as do f1 (there of words), exact_match and countdown",
        choices="mezzo.method.objectives:OBJECTIVES", open_choices=True,
        runs_code=lambda name: ":" in name, placeholder="MODULE:FUNCTION", commands=("eval",), reopen="question")
    max_new_tokens: int | None = option("method", None,
        "tokens to generate where the objective or the metric reads text [16, or as an exported model was trained]",
        at_least=1, at_most=65536, commands=("eval", "predict"), reopen="question")
    stop: tuple[str, ...] | None = option("method", None,
        "texts that end a generated answer, e.g. '###'; \\n is the end of a line; '' for the model's own end alone [\\n, or as "
        "an exported model was trained]",
        commands=("eval", "predict"), reopen="question")
    temperature: float = option("method", 0.0, "draw generated text at this temperature; 0 takes the likeliest tokens",
        at_least=0, commands=("eval", "predict"), reopen="question")
    top_p: float = option("method", 1.0, "draw from the likeliest tokens that have this probability together",
        positive=True, at_most=1, commands=("eval", "predict"), reopen="question")
    draws: int = option("method", 1, "texts to draw for each prompt; metrics and rewards are averaged over them",
        at_least=1, at_most=4096, commands=("eval", "predict"), reopen="question")
    shaping: str = option("method", "zscore",
        "how es weighs rewards: zscore (by the spread of the population), rank (over it, per prompt), or none (plain slopes)",
        choices="mezzo.method.es:SHAPINGS", of_method=("es",))
    reward_seconds: float = option("method", 10.0, "time that a call of your own reward function may take",
        positive=True, commands=("eval",), resumable=True, reopen="question")
    reward_mb: float = option("method", 1024.0, "memory that a process of your own reward function may take",
        positive=True, commands=("eval",), resumable=True, reopen="question")
    reward_workers: int | None = option("method", None, "processes that run your own reward function [cores, at most 8]",
        at_least=1, at_most=1024, commands=("eval",), resumable=True, reopen="question")
    failed_reward: float = option("method", 0.0, "reward of a text whose call raises, takes too long or too much memory",
        at_least=-1_000_000, at_most=1_000_000, commands=("eval",), reopen="question")
    held_out: str | None = option("method", None,
        "text file whose perplexity is measured along a run on rewards [an ordinary English text]",
        commands=("eval",), resumable=True, reopen="question", placeholder="FILE")
    steps: int | None = option("method", None, "training steps at most [1000 with --method spsa or adam, 100 with es]",
        at_least=1, resumable=True, per_model=True,
        aliases=("max_steps", "num_steps", "epochs", "num_train_epochs"))
    batch_size: int | None = option("method", None,
        "examples a step [solve decides; spsa 64 for masked, 16 for causal models; es 16; adam 8]",
        at_least=1, at_most=2**20, commands=("signal", "bench"), per_model=True, aliases=("per_device_train_batch_size",))
    lr: float | str | None = option("method", None,
        "learning rate; auto tries several before the first step of spsa [spsa: the bundled model's, or auto; es: eps]",
        words=("auto",), at_least=0, per_model=True, of_method=("spsa", "es", "adam"), aliases=("learning_rate",))
    schedule: str | None = option("method", None, "learning rate over time: constant, linear, cosine [constant]",
        choices="mezzo.method.optimizers:SHAPES", per_model=True, of_method=("spsa", "es", "adam"),
        aliases=("lr_scheduler_type",))
    warmup: int = option("method", 0, "steps of linear warm-up",
        at_least=0, of_method=("spsa", "es", "adam"), aliases=("warmup_steps",))
    eps: float | None = option("method", None, "size of the perturbation [by model and space; es finds it before the first step]",
        positive=True, commands=("signal",), per_model=True, of_method=("solve", "spsa", "es"), aliases=("epsilon", "zo_eps"))
    samples: int | None = option("method", None,
        "directions a step; each costs one forward pass with solve, two with spsa or es [solve decides; spsa 1; es 16]",
        at_least=1, at_most=4096, commands=("bench",), of_method=("solve", "spsa", "es"))
    weight_decay: float | None = option("method", None, "decay of the trained tensors [by model and space]",
        at_least=0, per_model=True, of_method=("spsa", "es", "adam"))
    decay: str | None = option("method", None,
        "what decays: all, matrices (biases and norms do not), or base (towards the base model, with lora) [all; es: base]",
        choices="mezzo.method.space:DECAYS")
    clip: float = option("method", 0.0,
        "largest slope, in absolute value (of es with a shaping: largest weight of a direction); 0 does not clip",
        at_least=0, of_method=("spsa", "es"))
    seed: int = option("method", 0, "seed of the directions, the batches and fresh weights",
        at_least=0, at_most=LARGEST_SEED, commands=("eval", "signal"))

    out: str | None = option("run", None, "run folder [runs/TASK-SPACE-N]", aliases=("output_dir",))
    eval_every: int | None = option("run", None,
        "steps between evaluations on dev [a tenth of the run; with solve, as often as they cost little]",
        at_least=1, resumable=True, aliases=("eval_steps",))
    patience: int = option("run", 0, "stop after this many evaluations without improvement; 0 never",
        at_least=0, resumable=True)
    time_limit: float | None = option("run", None, "stop after this many minutes; the run can be resumed",
        positive=True, resumable=True)
    snapshot_minutes: float = option("run", 5.0, "minutes between snapshots, which make resuming faster",
        at_least=0, resumable=True)
    track: tuple[str, ...] = option("run", (), "also log to tensorboard, wandb or trackio, where installed",
        contacts=lambda names: any(name != "tensorboard" for name in names), placeholder="NAMES",
        choices=("tensorboard", "wandb", "trackio"), resumable=True, aliases=("report_to",))
    # fmt: on

    @property
    def splits_layers(self) -> bool:
        """Several devices share the model's layers."""
        return self.device == "all" or "," in self.device

    def replace(self, **changes: Any) -> RunConfig:
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


OPTIONS: dict[str, Option] = {
    field.name: dataclasses.replace(field.metadata["option"], name=field.name)
    for field in dataclasses.fields(RunConfig)
}


def option_names(**facts: Any) -> tuple[str, ...]:
    """The options with these facts, such as `option_names(resumable=True)`; of several values, it has the one given."""
    return tuple(name for name, option in OPTIONS.items() if all(_has(option, *fact) for fact in facts.items()))


def _has(option: Option, fact: str, wanted: Any) -> bool:
    value = getattr(option, fact)
    return wanted in value if isinstance(value, tuple) else bool(value == wanted)
