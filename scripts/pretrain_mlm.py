"""Pre-train a small RoBERTa on a text file, with its tokenizer: `python scripts/pretrain_mlm.py TEXT --out DIR`.

Rows are spans of one document that end with a sentence. 17% of the tokens and 35% of the opinion words are predicted;
80% of these are masked, 10% replaced, 10% kept, as in BERT. The defaults made the first stage of the bundled
`roberta-mini` on one H200; its model card has the options of the second.
"""

import torch
from pretrain_common import Setup, parse_options, prepare, sentiment, train
from pretrain_data import Mix, sample_rows
from pretrain_tokenizer import SPECIALS
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, RobertaConfig, RobertaForMaskedLM

HELDOUT_RATE = 0.2
PROMPT = " It was<mask>."


def build(setup: Setup) -> RobertaForMaskedLM:
    args, (bos, pad, eos) = setup.args, setup.specials
    torch.manual_seed(args.seed)
    config = RobertaConfig(
        vocab_size=setup.tokenizer.get_vocab_size(),
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        intermediate_size=args.ffn,
        max_position_embeddings=max(args.lengths) + 2,  # RoBERTa's positions start at 2
        type_vocab_size=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        layer_norm_eps=1e-5,
        bos_token_id=bos,
        pad_token_id=pad,
        eos_token_id=eos,
    )
    cls = RobertaForMaskedLM
    model = cls.from_pretrained(args.start, dtype=torch.float32) if args.start else cls(config)
    model = model.to(setup.device)
    if args.compile:
        # Compile modules, not the model: the layers share one compiled graph, which takes seconds and not minutes.
        for module in (model.roberta.embeddings, *model.roberta.encoder.layer):
            module.compile(dynamic=False)
    return model


def corrupt(ids: Tensor, rates: Tensor, mask: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Mask or replace some tokens; return the ids and which were chosen. `rates`: the probability of each token id."""
    draw, action = torch.rand(2, *ids.shape, device=ids.device, generator=generator)
    chosen = draw < rates[ids]
    random_ids = torch.randint(len(rates), ids.shape, device=ids.device, generator=generator)
    return torch.where(chosen & (action < 0.8), mask, torch.where(chosen & (action > 0.9), random_ids, ids)), chosen


class MaskedLoss:
    """The loss of a random batch of the corpus."""

    def __init__(self, setup: Setup):
        self.setup, self.generator = setup, setup.generator(setup.args.seed)
        self.mask = setup.id("mask")
        focus = setup.train.focus
        self.rates = torch.where(focus, setup.args.focus_rate, setup.args.mask_rate).index_fill(
            0, special_ids(setup), 0.0
        )
        self.head = torch.compile(head_loss, dynamic=False) if setup.args.compile else head_loss

    def __call__(self, model: PreTrainedModel, rows: int, length: int) -> Tensor:
        setup = self.setup
        ids = sample_rows(setup.train, rows, length, setup.mix, setup.specials, self.generator, fill=False)
        inputs, chosen = corrupt(ids, self.rates, self.mask, self.generator)
        # A fixed number of slots for the chosen positions keeps shapes fixed and gives the wide output layer few rows.
        slots = chosen.flatten().half().topk(int((setup.args.mask_rate + 0.03) * ids.numel())).indices
        labels = torch.where(chosen, ids, -100).flatten()[slots]
        return self.head(model.lm_head, encode(model, inputs, setup.specials[1]).flatten(0, 1)[slots], labels)


def head_loss(head: torch.nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(head(hidden).float(), labels)


def encode(model: PreTrainedModel, ids: Tensor, pad: int) -> Tensor:
    # A 4-D mask is used as is; transformers would inspect the values of a 2-D mask, which synchronises the device.
    mask = (ids != pad)[:, None, None, :].expand(-1, 1, ids.shape[1], -1)
    return model.roberta(ids, attention_mask=mask).last_hidden_state


def special_ids(setup: Setup) -> Tensor:
    return torch.tensor([setup.id(name) for name in SPECIALS], device=setup.device)


def evaluate(model: PreTrainedModel, setup: Setup) -> dict[str, float]:
    """Held-out loss (plain text, rows of up to 128 tokens, 20% of them predicted), and zero-shot sentiment accuracy."""
    generator, mask = setup.generator(1), setup.id("mask")
    rates = torch.full_like(setup.train.bare, HELDOUT_RATE, dtype=torch.float).index_fill(0, special_ids(setup), 0.0)
    rows, length = 2048 if setup.device.type == "cuda" else 64, min(128, max(setup.args.lengths))
    ids = sample_rows(setup.heldout, rows, length, Mix(0, 0), setup.specials, generator, fill=False)
    inputs, chosen = corrupt(ids, rates, mask, generator)
    hidden = encode(model, inputs, setup.specials[1])
    results = {"heldout_loss": cross_entropy(model.lm_head(hidden[chosen]).float(), ids[chosen]).item()}
    if setup.sentiment:
        _, pad, eos = setup.specials
        prompt = [*setup.tokenizer.encode(PROMPT, add_special_tokens=False).ids, eos]
        results |= sentiment(model, setup, prompt, lambda ids: encode(model, ids, pad)[ids == mask])
    return results


def main() -> None:
    args = parse_options(__doc__.splitlines()[0], lengths="64:0.5,128:0.4,256:0.1", minutes=8.0, ffn=1024)
    setup = prepare(args, end=False)
    train(build(setup), setup, MaskedLoss(setup), lambda model: evaluate(model, setup), eos=True)


if __name__ == "__main__":
    main()
