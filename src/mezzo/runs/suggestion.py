"""A task for data that comes without one, its template chosen by the untrained model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mezzo.config import OPTIONS, RunConfig
from mezzo.engines.hf_hub import family_of, load_config, load_tokenizer
from mezzo.evaluation.evaluate import probabilities, refuse_nan, score_prompts
from mezzo.runs.datasets import column_names, take_some, write_task
from mezzo.runs.defaults import untrained_space
from mezzo.runs.resolve import resolve_setup
from mezzo.tasks.loading import read_table
from mezzo.tasks.proposal import Proposal, propose, sample_texts
from mezzo.tasks.tokenizer import TokenizerWrapper
from mezzo.types import Example

# Texts that templates are compared on.
COMPARED_TEXTS = 64


def propose_task(config: RunConfig, source: Any) -> Proposal:
    """A task for the training data `source`, with what the configuration states: columns, template, words, readout."""
    table = read_table(source, "train", config.encoding)
    family = family_of(load_config(config.model, config.remote_code))
    proposal = propose(
        table,
        TokenizerWrapper(load_tokenizer(config.model, config.remote_code)),
        family,
        columns=column_names(config),
        template=config.template,
        words=OPTIONS["words"].split_pairs(config.words),
        head=config.readout == "head" if config.readout != "auto" or config.engine != "torch" else None,
    )
    # Another engine takes minutes to start, and a head reads nothing from an untrained model.
    if len(proposal.templates) == 1 or proposal.head or config.engine != "torch":
        return proposal
    return proposal.rank(_compare_templates(config, proposal, take_some(sample_texts(table, proposal), COMPARED_TEXTS)))


def task_options(proposal: Proposal) -> dict[str, str]:
    """The options that make a run use a proposal."""
    return {"task": write_task(proposal.task), **({"readout": "head"} if proposal.head else {})}


def mutual_information(scores: npt.NDArray[np.float64]) -> float:
    """Bits that a text tells about the answer: high where answers are confident and, over all texts, balanced.

    The criterion of Sorensen et al. (2022) for choosing a template without labels.
    """
    answers = probabilities(scores)
    return _entropy(answers.mean(axis=0)) - float(np.mean([_entropy(each) for each in answers]))


def _entropy(shares: npt.NDArray[np.float64]) -> float:
    present = shares[shares > 0]
    return float(-(present * np.log2(present)).sum())


def _compare_templates(config: RunConfig, proposal: Proposal, examples: list[Example]) -> Mapping[str, float]:
    """Template → mutual information on `examples`."""
    plain = {"demonstrations": 0, "objective": "cross_entropy", "workers": None, "ray_address": None, "readout": "auto"}
    config = config.replace(**plain, space=untrained_space(config))
    setup = resolve_setup(config, proposal.task)
    engine = setup.open_engine()
    try:
        bits = {}
        for template in proposal.templates:
            tried = dataclasses.replace(setup, task=proposal.task.replace(template=template))
            scores = score_prompts(engine, tried.encode(examples), tried.readout)
            refuse_nan(scores)
            bits[template] = mutual_information(scores)
        return bits
    finally:
        engine.close()
