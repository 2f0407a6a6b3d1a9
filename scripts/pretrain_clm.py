"""Pre-train a small Llama on a text file, with its tokenizer: `python scripts/pretrain_clm.py TEXT --out DIR`.

Documents are separated by `</s>` and `<s>`; a row starts with `<s>` and a sentence and continues across document ends.
Opinion words have a larger weight in the loss. The defaults made the bundled `llama-mini` on one H200.
"""

import torch
from pretrain_common import Setup, parse_options, prepare, sentiment, train
from pretrain_data import Mix, sample_rows
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

FOCUS_WEIGHT = 3.0
PROMPT = " It was"


def build(setup: Setup) -> LlamaForCausalLM:
    args, (bos, pad, eos) = setup.args, setup.specials
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=setup.tokenizer.get_vocab_size(),
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        intermediate_size=args.ffn,
        max_position_embeddings=max(args.lengths),
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=bos,
        pad_token_id=pad,
        eos_token_id=eos,
    )
    cls = LlamaForCausalLM
    model = cls.from_pretrained(args.start, dtype=torch.float32) if args.start else cls(config)
    model = model.to(setup.device)
    if args.compile:
        # Compile modules, not the model: the layers share one compiled graph, which takes seconds and not minutes.
        for module in (model.model.norm, *model.model.layers):
            module.compile(dynamic=False)
    return model


class NextTokenLoss:
    """The loss of a random batch of the corpus."""

    def __init__(self, setup: Setup):
        self.setup, self.generator = setup, setup.generator(setup.args.seed)
        self.weights = torch.where(setup.train.focus, FOCUS_WEIGHT, 1.0)
        self.head = torch.compile(head_loss, dynamic=False) if setup.args.compile else head_loss

    def __call__(self, model: PreTrainedModel, rows: int, length: int) -> Tensor:
        setup = self.setup
        ids = sample_rows(setup.train, rows, length + 1, setup.mix, setup.specials, self.generator, fill=True)
        return self.head(model.lm_head, hidden_states(model, ids[:, :-1]), ids[:, 1:], self.weights)


def head_loss(head: torch.nn.Module, hidden: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    return cross_entropy(head(hidden).float().flatten(0, 1), targets.flatten(), weight=weights)


def hidden_states(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model.model(ids, use_cache=False).last_hidden_state


def evaluate(model: PreTrainedModel, setup: Setup) -> dict[str, float]:
    """Held-out loss per token (plain text, longest rows, unweighted), and zero-shot sentiment accuracy."""
    rows, length = 256 if setup.device.type == "cuda" else 8, max(setup.args.lengths)
    ids = sample_rows(setup.heldout, rows, length + 1, Mix(0, 0), setup.specials, setup.generator(1), fill=True)
    results = {"heldout_loss": head_loss(model.lm_head, hidden_states(model, ids[:, :-1]), ids[:, 1:]).item()}
    if setup.sentiment:
        prompt = setup.tokenizer.encode(PROMPT, add_special_tokens=False).ids
        results |= sentiment(model, setup, prompt, lambda ids: last_hidden(model, ids, setup.specials[1]))
    return results


def last_hidden(model: PreTrainedModel, ids: Tensor, pad: int) -> Tensor:
    """The hidden state at the last token before padding. Padding is on the right: no earlier position attends to it."""
    last = (ids != pad).sum(1) - 1
    return hidden_states(model, ids)[torch.arange(len(ids), device=ids.device), last]


def main() -> None:
    args = parse_options(__doc__.splitlines()[0], lengths="128:0.5,512:0.5", minutes=4.75, ffn=704)
    setup = prepare(args, end=True)
    train(build(setup), setup, NextTokenLoss(setup), lambda model: evaluate(model, setup), eos=False)


if __name__ == "__main__":
    main()
