"""Tiny random models, batches, a tokenizer and data for all tests. The models are real transformers models, not mocks."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

from mezzo.types import Batch, Prompt, Readout

torch.set_num_threads(1)
# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile(
    "mezzo",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("mezzo")
VOCAB = 120


def make_roberta(seed: int = 0, **extra: Any) -> torch.nn.Module:
    return make_encoder("Roberta", seed, **extra)


def make_encoder(family: str, seed: int = 0, **extra: Any) -> torch.nn.Module:
    import transformers

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB, max_position_embeddings=66, type_vocab_size=1, **{**sizes, **extra}
    )
    return scale_up_weights(getattr(transformers, f"{family}ForMaskedLM")(config))


def make_llama(seed: int = 0, tie: bool = True) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=128,
        tie_word_embeddings=tie,
        pad_token_id=1,
    )
    return scale_up_weights(LlamaForCausalLM(config))


def scale_up_weights(model: torch.nn.Module) -> torch.nn.Module:
    """Make every tensor affect the output: freshly initialised biases are 0 and norms are 1, which hides bugs."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(4)
    return model.eval()


MODELS: dict[str, Callable[[], torch.nn.Module]] = {"roberta": make_roberta, "llama": make_llama}


@pytest.fixture(params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return MODELS[request.param]()


@pytest.fixture
def pristine(model: torch.nn.Module) -> torch.nn.Module:
    """An unmodified copy of `model`, for plain Hugging Face forwards."""
    return copy.deepcopy(model)


def make_batch(
    count: int = 6, seed: int = 0, words: tuple[int, ...] = (11, 47), lengths: tuple[int, int] = (4, 20)
) -> Batch:
    """Prompts of mixed lengths, each with a random readout position."""
    rng = np.random.default_rng(seed)
    prompts = []
    for _ in range(count):
        length = int(rng.integers(*lengths))
        ids = tuple(int(token) for token in rng.integers(5, VOCAB, size=length))
        prompts.append(Prompt(ids, label=int(rng.integers(len(words))), position=int(rng.integers(1, length))))
    return Batch(tuple(prompts), Readout("words", words=words))


SENTENCES = {
    "negative": (
        "a dull and lifeless film",
        "the jokes fall flat",
        "I wanted my money back",
        "boring from start to end",
        "a mess of a script",
        "badly acted and badly lit",
        "nobody laughed once",
        "an awful waste of time",
    ),
    "positive": (
        "a warm and lively film",
        "the jokes land every time",
        "I would see it twice",
        "gripping from start to end",
        "a gem of a script",
        "well acted and well lit",
        "everybody laughed aloud",
        "a lovely use of time",
    ),
}
"""Enough text to train a tokenizer, and a small data set."""


def train_tokenizer(size: int = 400) -> Any:
    """Train a byte-level BPE tokenizer like RoBERTa's in which the sentiment label words are single tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = [line for lines in SENTENCES.values() for line in lines] + [" It was great.", " It was terrible."] * 20
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    names = {"bos": "<s>", "cls": "<s>", "pad": "<pad>", "eos": "</s>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{f"{name}_token": token for name, token in names.items()}
    )


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_model(tmp_path_factory.mktemp("tiny-roberta"))


def write_tiny_model(folder: Path) -> str:
    """A model folder as users have it: a RoBERTa of a few tens of thousands of parameters, with its tokenizer."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    tokenizer = train_tokenizer()
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=66,
        type_vocab_size=1,
        pad_token_id=1,
    )
    scale_up_weights(RobertaForMaskedLM(config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_data(tmp_path_factory.mktemp("tiny-data") / "train.jsonl")


def write_tiny_data(path: Path) -> str:
    """SENTENCES as a jsonl file."""
    rows = [{"text": text, "label": label} for label, texts in SENTENCES.items() for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="session")
def tiny_run(tiny_folder: str, tiny_data: str) -> dict[str, Any]:
    """Options of a small LoRA run of the tiny model, on one thread of a CPU."""
    data = {"model": tiny_folder, "task": "sst-2", "train": tiny_data, "dev": tiny_data}
    return {**data, "space": "lora", "batch_size": 4, "lr": 1e-3, "threads": 1, "device": "cpu"}
