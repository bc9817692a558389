"""Small models of many architectures of Transformers, with random weights, for the test that each equals its own eager attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from models import LENGTH, PADDED, VOCABULARY, build
from torch import Tensor, nn

TEXT = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
GROUPED = dict(num_key_value_heads=2)
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
T5 = dict(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0)
BUCKETS = dict(relative_attention_num_buckets=8, relative_attention_max_distance=16)
IMAGE = dict(image_size=16, patch_size=4, num_channels=3, num_labels=5)
EXPERTS = dict(num_local_experts=2, num_experts_per_tok=2)
WINDOW = dict(sliding_window=5)


@dataclass(frozen=True)
class Architecture:
    """A model class and its configuration.

    `inputs` is "decoder" (causal text), "encoder" (text both ways), "pair" (encoder and decoder), "image" or "audio". `layers` is how many
    attentions a forward pass computes, and `reason` what is particular in them.
    """

    model: str
    inputs: str
    layers: int
    reason: str
    config: dict[str, Any]

    @property
    def name(self) -> str:
        return self.model

    def build(self) -> nn.Module:
        kind = getattr(transformers, self.model)
        given = dict(pad_token_id=0, bos_token_id=1, eos_token_id=None) if self.inputs in ("decoder", "encoder", "pair") else {}
        return build(kind, kind.config_class(**(given | self.config)))


ARCHITECTURES = (
    Architecture("LlamaForCausalLM", "decoder", 2, "two query heads per key-value head", TEXT | GROUPED),
    Architecture("MistralForCausalLM", "decoder", 2, "sliding window", TEXT | GROUPED | WINDOW),
    Architecture("MixtralForCausalLM", "decoder", 2, "experts", TEXT | GROUPED | EXPERTS | WINDOW),
    Architecture("Qwen2ForCausalLM", "decoder", 2, "biased projections", TEXT | GROUPED),
    Architecture("Qwen3ForCausalLM", "decoder", 2, "normed queries and keys", TEXT | GROUPED | dict(head_dim=8)),
    Architecture(
        "GemmaForCausalLM", "decoder", 2, "heads wider than hidden / heads, one key-value head", TEXT | dict(head_dim=16, num_key_value_heads=1)
    ),
    Architecture(
        "Gemma2ForCausalLM",
        "decoder",
        2,
        "softcap, windows by turns",
        TEXT | GROUPED | WINDOW | dict(head_dim=8, query_pre_attn_scalar=8, attn_logit_softcapping=0.5),
    ),
    Architecture(
        "Gemma3ForCausalLM",
        "decoder",
        2,
        "its own scale",
        TEXT | GROUPED | WINDOW | dict(head_dim=8, layer_types=["sliding_attention", "full_attention"]),
    ),
    Architecture(
        "RecurrentGemmaForCausalLM",
        "decoder",
        1,
        "one layer in three attends, in a window",
        TEXT | dict(num_hidden_layers=3, num_key_value_heads=1, head_dim=8, lru_width=32, attention_window_size=5),
    ),
    Architecture("GptOssForCausalLM", "decoder", 2, "sinks", TEXT | GROUPED | EXPERTS | WINDOW | dict(head_dim=8)),
    Architecture(
        "Phi3ForCausalLM", "decoder", 2, "queries, keys and values in one product", TEXT | GROUPED | dict(resid_pdrop=0.0, embd_pdrop=0.0)
    ),
    Architecture("Olmo2ForCausalLM", "decoder", 2, "norms after the attention", TEXT | GROUPED),
    Architecture("GraniteForCausalLM", "decoder", 2, "a scale of its own", TEXT | GROUPED | dict(attention_multiplier=0.3)),
    Architecture("Cohere2ForCausalLM", "decoder", 2, "windows by turns", TEXT | GROUPED | WINDOW),
    Architecture("SmolLM3ForCausalLM", "decoder", 2, "layers without rotary embedding", TEXT | GROUPED | dict(no_rope_layers=[1, 0])),
    Architecture(
        "DeepseekV3ForCausalLM",
        "decoder",
        2,
        "latent attention: values of another head dim than keys",
        TEXT
        | dict(
            num_key_value_heads=4,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            n_shared_experts=1,
            first_k_dense_replace=1,
        )
        | dict(moe_intermediate_size=16, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6),
    ),
    Architecture(
        "Llama4ForCausalLM",
        "decoder",
        2,
        "chunks",
        TEXT
        | GROUPED
        | dict(head_dim=8, attention_chunk_size=5, intermediate_size_mlp=48, num_local_experts=2, num_experts_per_tok=1, no_rope_layers=[1, 0])
        | dict(layer_types=["chunked_attention", "full_attention"]),
    ),
    Architecture(
        "GPT2LMHeadModel",
        "decoder",
        2,
        "one product for queries, keys and values",
        dict(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0),
    ),
    Architecture("GPTNeoXForCausalLM", "decoder", 2, "rotary embedding of a part of the head", TEXT),
    Architecture(
        "OPTForCausalLM",
        "decoder",
        2,
        "queries scaled before",
        dict(
            vocab_size=VOCABULARY, hidden_size=32, word_embed_proj_dim=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, dropout=0.0
        ),
    ),
    Architecture(
        "DogeForCausalLM", "decoder", 2, "a mask that is a bias with a gradient for each query head", TEXT | GROUPED | dict(keep_window_size=64)
    ),
    Architecture("BertForMaskedLM", "encoder", 2, "both ways", TEXT | NO_DROPOUT),
    Architecture("RobertaForMaskedLM", "encoder", 2, "positions that skip padding", TEXT | NO_DROPOUT),
    Architecture("ElectraForMaskedLM", "encoder", 2, "narrower embeddings", TEXT | NO_DROPOUT | dict(embedding_size=16)),
    Architecture(
        "DistilBertForMaskedLM",
        "encoder",
        2,
        "half a BERT",
        dict(vocab_size=VOCABULARY, dim=32, hidden_dim=48, n_layers=2, n_heads=4, dropout=0.0, attention_dropout=0.0),
    ),
    Architecture(
        "ModernBertForMaskedLM",
        "encoder",
        2,
        "windows to both sides",
        TEXT | dict(local_attention=6, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2),
    ),
    Architecture(
        "EsmForMaskedLM", "encoder", 2, "proteins, scale 1", TEXT | NO_DROPOUT | dict(mask_token_id=3, position_embedding_type="rotary")
    ),
    Architecture("T5ForConditionalGeneration", "pair", 6, "relative bias with a gradient, scale 1", T5 | BUCKETS),
    Architecture("MT5ForConditionalGeneration", "pair", 6, "gated products", T5 | BUCKETS),
    Architecture("UMT5ForConditionalGeneration", "pair", 6, "a relative bias of its own in each layer", T5 | BUCKETS),
    Architecture(
        "SwitchTransformersForConditionalGeneration",
        "pair",
        6,
        "experts and relative bias",
        T5
        | BUCKETS
        | dict(num_experts=2, num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1)
        | dict(router_jitter_noise=0.0),
    ),
    Architecture("LongT5ForConditionalGeneration", "pair", 4, "its encoder is its own, its decoder a T5", T5 | BUCKETS | dict(local_radius=3)),
    Architecture(
        "BartForConditionalGeneration",
        "pair",
        6,
        "cross attention",
        dict(vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4)
        | dict(encoder_ffn_dim=48, decoder_ffn_dim=48, dropout=0.0, decoder_start_token_id=1, forced_eos_token_id=None),
    ),
    Architecture("ViTForImageClassification", "image", 2, "no mask", TEXT | IMAGE | NO_DROPOUT),
    Architecture(
        "BeitForImageClassification",
        "image",
        2,
        "relative bias of a table",
        TEXT | IMAGE | NO_DROPOUT | dict(use_relative_position_bias=True, drop_path_rate=0.0),
    ),
    Architecture(
        "SwinForImageClassification",
        "image",
        2,
        "relative bias of windows, shifted ones with a mask",
        IMAGE | dict(patch_size=2, embed_dim=16, depths=[2], num_heads=[4], window_size=4, drop_path_rate=0.0, **NO_DROPOUT),
    ),
    Architecture(
        "SiglipForImageClassification",
        "image",
        2,
        "a pooling head of torch's own",
        dict(num_labels=5, vision_config=TEXT | dict(image_size=16, patch_size=4, num_channels=3)),
    ),
    Architecture(
        "Wav2Vec2BertForCTC",
        "audio",
        2,
        "a bias that depends on the query",
        TEXT
        | dict(
            position_embeddings_type="relative_key",
            feature_projection_input_dim=16,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            conformer_conv_dropout=0.0,
        )
        | dict(activation_dropout=0.0, feat_proj_dropout=0.0, layerdrop=0.0, final_dropout=0.0, apply_spec_augment=False, add_adapter=False),
    ),
    Architecture(
        "WhisperForConditionalGeneration",
        "speech",
        6,
        "cross attention to audio",
        dict(vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4)
        | dict(encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=16, dropout=0.0, pad_token_id=0, bos_token_id=1)
        | dict(eos_token_id=None, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None),
    ),
)


def batch_of(architecture: Architecture, padding: str, device: str = "cpu") -> dict[str, Tensor]:
    """Inputs and labels, the same at every call; `padding` is "none", "left" or "right". Padded positions carry the label that losses ignore."""
    seed = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, VOCABULARY, (2, LENGTH), generator=seed)
    attends = torch.ones_like(tokens)
    if padding != "none":
        attends[0, slice(0, PADDED) if padding == "left" else slice(-PADDED, None)] = 0
    if architecture.inputs == "image":
        batch = dict(pixel_values=torch.randn(2, 3, 16, 16, generator=seed), labels=torch.tensor([1, 4]))
    elif architecture.inputs == "audio":
        batch = dict(input_features=torch.randn(2, LENGTH, 16, generator=seed), attention_mask=attends, labels=tokens[:, :3])
    elif architecture.inputs == "speech":
        batch = dict(input_features=torch.randn(2, 8, 32, generator=seed), labels=tokens[:, :5])
    else:
        batch = dict(input_ids=tokens * attends, attention_mask=attends, labels=torch.where(attends == 1, tokens, -100))
        if architecture.inputs == "pair":
            batch["labels"] = torch.randint(4, VOCABULARY, (2, LENGTH - 2), generator=seed)
        elif padding == "left":
            batch["labels"][0, PADDED] = -100  # a causal model predicts it from the last padded position
    if padding == "none":
        batch.pop("attention_mask", None)
    return {name: tensor.to(device) for name, tensor in batch.items()}
