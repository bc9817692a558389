"""Small models whose layers say by indices which keys a query attends, or give each query its own sink: random weights, float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from models import VOCABULARY, build
from torch import nn

TEXT = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, intermediate_size=48)
TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=None)
EXPERTS = dict(moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
INDEXER = dict(index_topk=5, index_head_dim=16, index_n_heads=2)
MLPS = dict(mlp_layer_types=["dense", "sparse", "sparse"])
INDEXED = TEXT | TOKENS | EXPERTS | LATENT | INDEXER | MLPS
SHARED = dict(indexer_types=["full", "full", "shared"])
BY_TURNS = dict(layer_types=["indexed_attention", "sliding_attention", "indexed_attention"], sliding_window=4)
NARROW = dict(num_attention_heads=2, num_key_value_heads=2, q_lora_rank=16, kv_lora_rank=16, head_dim=16, qk_nope_head_dim=8, v_head_dim=8)
INKLING = dict(swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8, head_dim=8, sliding_window_size=4, d_rel=4, rel_extent=6)
BLOCKS = dict(index_n_heads=2, index_head_dim=16, index_block_size=2, index_topk_blocks=3, index_local_blocks=1)


@dataclass(frozen=True)
class SparseModel:
    """A model class, its configuration, the argument of the attention interface that it tries, and what is particular in it."""

    name: str
    configuration: str
    argument: str
    reason: str
    config: dict[str, Any]
    dtype: torch.dtype = torch.float64

    def build(self) -> nn.Module:
        kind, config = getattr(transformers, self.name, None), getattr(transformers, self.configuration, None)
        if kind is None or config is None:
            pytest.skip(f"Transformers {transformers.__version__} has no {self.name}")
        model = build(kind, config(**self.config))
        if self.dtype == torch.float64:
            model.set_experts_implementation("eager")  # torch's grouped product has no float64
        return model.to(self.dtype)


MODELS = (
    SparseModel("DeepseekV32ForCausalLM", "DeepseekV32Config", "indices", "latent values, an indexer in each layer", INDEXED),
    SparseModel("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", "indices", "a layer that takes another's indices", INDEXED | SHARED),
    SparseModel("AXK2ForCausalLM", "AXK2Config", "indices", "a gate on the output", INDEXED | dict(gated_norm_rank=4)),
    SparseModel("HYV4ForCausalLM", "HYV4Config", "indices", "attention sinks besides, a layer that takes another's indices", INDEXED | SHARED),
    SparseModel(
        "Dots3NoteForCausalLM",
        "Dots3NoteTextConfig",
        "indices",
        "windows by turns, with heads of their own",
        INDEXED | BY_TURNS | dict(shared_experts_intermediate_size=16, head_dim=16) | {f"swa_{name}": value for name, value in NARROW.items()},
    ),
    SparseModel(
        "MistralLarge4ForConditionalGeneration",
        "MistralLarge4Config",
        "indices",
        "a layer that takes another's keys, one without rotation",
        dict(
            text_config={name: value for name, value in INDEXED.items() if name != "q_lora_rank"} | SHARED | dict(no_rope_layers=[1, 0, 1]),
            vision_config=dict(model_type="pixtral", hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48),
        ),
    ),
    SparseModel(
        "MiniMaxM3VLForCausalLM",
        "MiniMaxM3VLTextConfig",
        "block_indices",
        "blocks of keys for each group of heads; a layer without",
        TEXT
        | TOKENS
        | BLOCKS
        | dict(num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, rotary_dim=8)
        | dict(dense_intermediate_size=48, shared_intermediate_size=16, layer_types=["full_attention"] + ["minimax_m3_sparse"] * 2)
        | MLPS,
    ),
    SparseModel(
        "Inkling2ForCausalLM",
        "Inkling2TextConfig",
        "sinks",
        "a sink and a position bias for each query, windows by turns",
        {name: value for name, value in (TEXT | TOKENS | INKLING).items() if name != "intermediate_size"}
        | dict(num_key_value_heads=2, unpadded_vocab_size=VOCABULARY, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2)
        | dict(layer_types=["hybrid_sliding", "hybrid", "hybrid"], n_layers_per_attn_res_block=2),
        torch.float32,  # its own casts to float32 leave no other
    ),
)
