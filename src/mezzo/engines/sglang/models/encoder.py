"""BERT, RoBERTa and their kin for SGLang: an encoder with its masked-LM head, read at one position per sequence.

It is built from SGLang's own linear and attention layers, under the names that its LoRA manager knows (`layers.N.qkv_proj`,
`o_proj`, `down_proj`), so that adapters, several in one batch, and tensor parallelism work as on any other model. SGLang has no
masked-LM readout: what is read leaves the model as its "embedding". In process that are label-word scores, and the engine says
where to read before a forward. On a server it is the vector at the mask that the decoder multiplies with its words: no request
says what to read there, and its numbers are few.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.pooler import EmbeddingPoolerOutput
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import Tensor, nn

from mezzo.engines.architectures import positions_follow_padding
from mezzo.engines.lora_factors import projection_of
from mezzo.engines.sglang.module_names import ENCODER_LAYER, FUSED, sglang_path


@dataclass(frozen=True)
class MaskReadout:
    """The position to read in each sequence, and the label words; with `vocabulary`, their log-probabilities."""

    positions: tuple[int, ...]
    words: tuple[int, ...]
    vocabulary: bool


class EncoderLayer(nn.Module):
    """One post-norm transformer layer."""

    def __init__(self, config: Any, index: int, quant: Any = None) -> None:
        super().__init__()
        size, heads, name = config.hidden_size, config.num_attention_heads, f"layers.{index}"
        head_size = size // heads
        self.qkv_proj = QKVParallelLinear(
            size, head_size, heads, bias=True, quant_config=quant, prefix=f"{name}.qkv_proj"
        )
        self.width = self.qkv_proj.q_proj_shard_size
        local_heads, encoder = self.width // head_size, AttentionType.ENCODER_ONLY
        self.attn = RadixAttention(
            local_heads, head_size, head_size**-0.5, local_heads, index, prefix=f"{name}.attn", attn_type=encoder
        )
        self.o_proj = RowParallelLinear(size, size, bias=True, quant_config=quant, prefix=f"{name}.o_proj")
        self.attention_norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        inner = config.intermediate_size
        self.mid_proj = ColumnParallelLinear(size, inner, bias=True, quant_config=quant, prefix=f"{name}.mid_proj")
        self.down_proj = RowParallelLinear(inner, size, bias=True, quant_config=quant, prefix=f"{name}.down_proj")
        self.output_norm = nn.LayerNorm(size, eps=config.layer_norm_eps)

    def forward(self, hidden: Tensor, forward_batch: Any) -> Tensor:
        q, k, v = self.qkv_proj(hidden)[0].split([self.width] * 3, dim=-1)
        hidden = self.attention_norm(self.o_proj(self.attn(q, k, v, forward_batch))[0] + hidden)
        return self.output_norm(self.down_proj(F.gelu(self.mid_proj(hidden)[0]))[0] + hidden)


class EncoderForMaskedLM(nn.Module):
    """The model. Embeddings and head are small and replicated on every rank."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        if config.hidden_act != "gelu":
            raise ValueError(f"this encoder computes gelu, not {config.hidden_act!r}")
        self.config = config
        # Sequences here are complete and unpadded.
        self.first_position = config.pad_token_id + 1 if positions_follow_padding(config) else 0
        size = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, size)
        self.embedding_norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.layers = nn.ModuleList(EncoderLayer(config, i, quant_config) for i in range(config.num_hidden_layers))
        self.head_dense = nn.Linear(size, size)
        self.head_norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.head_bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.decoder = None if config.tie_word_embeddings else nn.Embedding(config.vocab_size, size)
        self.mask_readout: MaskReadout | None = None
        self.mask_token = int(getattr(config, "mask_token_id", -1))

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Any = None,
        get_embedding: bool = False,
    ) -> EmbeddingPoolerOutput:
        hidden = self.word_embeddings(input_ids) + self.token_type_embeddings.weight[0]
        hidden = hidden + self.position_embeddings(positions + self.first_position)
        hidden = self.embedding_norm(hidden)
        for layer in self.layers:
            hidden = layer(hidden, forward_batch)
        lengths = forward_batch.extend_seq_lens
        starts = torch.cumsum(lengths, 0) - lengths
        if self.mask_readout is None:
            sequences = torch.split(input_ids, lengths.tolist())  # type: ignore[no-untyped-call, unused-ignore]
            masks = [int(torch.eq(ids, self.mask_token).int().argmax()) for ids in sequences]
            return EmbeddingPoolerOutput(embeddings=self._read(hidden, starts, masks).float())
        read = self._read(hidden, starts, self.mask_readout.positions)
        return EmbeddingPoolerOutput(embeddings=self._scores(read, self.mask_readout))

    def _read(self, hidden: Tensor, starts: Tensor, positions: Sequence[int]) -> Tensor:
        """The decoder's input at one position of each sequence."""
        hidden = hidden[starts + torch.tensor(positions, device=hidden.device)]
        return self.head_norm(F.gelu(self.head_dense(hidden)))

    def _scores(self, hidden: Tensor, readout: MaskReadout) -> Tensor:
        weight = (self.decoder or self.word_embeddings).weight
        words = torch.tensor(readout.words, device=hidden.device)
        if not readout.vocabulary:
            return F.linear(hidden, weight[words], self.head_bias[words]).float()
        return F.linear(hidden, weight, self.head_bias).float().log_softmax(-1)[:, words]

    # ---- what SGLang expects of a model

    def get_hidden_dim(self, module_name: str, layer_idx: int) -> tuple[int, int]:
        """(in, out) of the modules that adapters reach."""
        size, inner = self.config.hidden_size, self.config.intermediate_size
        shapes = {"qkv_proj": (size, 3 * size), "o_proj": (size, size)}
        shapes |= {"mid_proj": (size, inner), "down_proj": (inner, size)}
        return shapes[module_name]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        missing = set(parameters)
        for checkpoint_name, weight in weights:
            name, shard = _parameter_of(checkpoint_name)
            if name not in parameters:
                continue  # a pooler that the readout ignores, or the tied decoder
            loader = getattr(parameters[name], "weight_loader", default_weight_loader)
            loader(parameters[name], weight, *((shard,) if shard else ()))
            missing.discard(name)
        if missing:
            raise ValueError(f"the checkpoint lacks {', '.join(sorted(missing)[:3])}")


# Modules of a checkpoint, without the name of the encoder, and their names here.
EMBEDDINGS_AND_HEAD = {
    "embeddings.word_embeddings": "word_embeddings",
    "embeddings.position_embeddings": "position_embeddings",
    "embeddings.token_type_embeddings": "token_type_embeddings",
    "embeddings.LayerNorm": "embedding_norm",
    "lm_head.dense": "head_dense",
    "lm_head.layer_norm": "head_norm",
    "lm_head.decoder": "decoder",
    "cls.predictions.transform.dense": "head_dense",
    "cls.predictions.transform.LayerNorm": "head_norm",
    "cls.predictions.decoder": "decoder",
}
NORMS = {"attention.output.LayerNorm": "attention_norm", "output.LayerNorm": "output_norm"}
# Norms of early checkpoints of BERT.
EARLY_NAMES = {"gamma": "weight", "beta": "bias"}


def _parameter_of(name: str) -> tuple[str, str]:
    """The parameter that a tensor of a checkpoint belongs to and, for a fused one, which part of it."""
    if name in ("lm_head.bias", "cls.predictions.bias"):
        return "head_bias", ""
    module, _, kind = name.rpartition(".")
    kind = EARLY_NAMES.get(kind, kind)
    if (known := module.removeprefix("roberta.").removeprefix("bert.")) in EMBEDDINGS_AND_HEAD:
        return f"{EMBEDDINGS_AND_HEAD[known]}.{kind}", ""
    if (layer := ENCODER_LAYER.fullmatch(module)) and layer[2] in NORMS:
        return f"layers.{layer[1]}.{NORMS[layer[2]]}.{kind}", ""
    path = sglang_path(module)
    projection = projection_of(path)
    if projection in FUSED["qkv_proj"]:
        return f"{path.removesuffix(projection)}qkv_proj.{kind}", projection[0]
    return f"{path}.{kind}", ""


EntryClass = EncoderForMaskedLM
