"""Small models of the families off Transformers' attention interface, with random weights, and what they compute in a training step."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from models import VOCABULARY, Step, build, gradients_of, with_truth
from torch import Tensor, nn
from transformers.models.maskformer.modeling_maskformer_swin import MaskFormerSwinModel

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
NO_DROPOUT = dict(attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
WINDOWS = dict(image_size=16, patch_size=2, num_channels=1, embed_dim=16, depths=[2], num_heads=[2], window_size=4, drop_path_rate=0.0)


def language_model(kind: str, implementation: str = "eager", **config: Any) -> nn.Module:
    model_type = getattr(transformers, kind)
    model = build(model_type, model_type.config_class(vocab_size=VOCABULARY, **config))
    model.config._attn_implementation = implementation
    return model


bloom = functools.partial(language_model, "BloomForCausalLM", hidden_size=32, n_layer=2, n_head=4, pad_token_id=0)
mpt = functools.partial(language_model, "MptForCausalLM", d_model=32, n_layers=2, n_heads=4, max_seq_len=32)
falcon = functools.partial(language_model, "FalconForCausalLM", hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
grouped_falcon = functools.partial(falcon, new_decoder_architecture=True, num_kv_heads=2)
deberta = functools.partial(language_model, "DebertaForMaskedLM", **SIZES, **NO_DROPOUT, relative_attention=True, max_relative_positions=8)
deberta_v2 = functools.partial(
    language_model, "DebertaV2ForMaskedLM", **SIZES, **NO_DROPOUT, relative_attention=True, max_relative_positions=8, position_buckets=4
)
mpnet = functools.partial(language_model, "MPNetForMaskedLM", **SIZES, **NO_DROPOUT)


@dataclass(frozen=True)
class Family:
    """A language model and why it is here."""

    name: str
    build: Callable[[], nn.Module]
    reason: str
    biased: bool = True
    calls: int = 2
    float_mask: bool = False  # whether padding reaches the layers as one
    unused: tuple[str, ...] = ()  # parts of the names of parameters that no loss depends on


FAMILIES = (
    Family("bloom", functools.partial(bloom, hidden_size=48, n_head=6), "ALiBi by real tokens, slopes of 6 heads"),
    Family("mpt", functools.partial(mpt, attn_config=dict(clip_qkv=1.0)), "ALiBi by position, an inverted mask, clipped projections"),
    Family("falcon", falcon, "rotary, one key-value head", biased=False),
    Family(
        "falcon-heads", functools.partial(falcon, multi_query=False, parallel_attn=False), "rotary, a key for each query head", biased=False
    ),
    Family("falcon-grouped", grouped_falcon, "rotary, the new decoder: two query heads per key-value head", biased=False),
    Family("falcon-alibi", functools.partial(falcon, "sdpa", alibi=True, bias=True), "ALiBi inside the mask; eager adds it twice"),
    Family("deberta", functools.partial(deberta, pos_att_type=["c2p", "p2c"]), "content by position, both ways"),
    Family("deberta-plain", functools.partial(deberta, relative_attention=False), "no bias at all", biased=False),
    Family(
        "deberta-v2", functools.partial(deberta_v2, pos_att_type=["c2p", "p2c"], share_att_key=True, conv_kernel_size=3), "shared projections"
    ),
    Family("deberta-v2-one", functools.partial(deberta_v2, pos_att_type=["p2c"]), "one way, projections of its own"),
    Family("mpnet", mpnet, "a table that learns, padding as a float mask"),
)


def named(family: Any) -> str:
    return family.name


def pixels(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def vision(kind: str, size: tuple[int, ...] = (1, 16, 16), **config: Any) -> tuple[nn.Module, dict]:
    model_type = MaskFormerSwinModel if kind == "MaskFormerSwin" else getattr(transformers, f"{kind}Model")
    return build(model_type, getattr(transformers, f"{kind}Config")(**NO_DROPOUT, **config)), dict(pixel_values=pixels(2, *size))


def clap() -> tuple[nn.Module, dict]:
    sizes = dict(spec_size=32, num_mel_bins=8, patch_size=4, patch_stride=[4, 4], patch_embeds_hidden_size=16, hidden_size=16)
    windows = dict(depths=[2], num_attention_heads=[2], window_size=4, drop_path_rate=0.0, enable_fusion=False, fusion_num_hidden_layers=0)
    model = build(transformers.ClapAudioModel, transformers.ClapAudioConfig(**sizes, **windows, **NO_DROPOUT))
    return model, dict(input_features=pixels(2, 1, 128, 8), is_longer=None)


data2vec = functools.partial(vision, "Data2VecVision", (1, 8, 8), image_size=8, patch_size=2, num_channels=1, drop_path_rate=0.0, **SIZES)


def sdpa_data2vec() -> tuple[nn.Module, dict]:
    """A class of layers of its own."""
    eager, inputs = data2vec(use_relative_position_bias=True)
    model = type(eager)._from_config(copy.deepcopy(eager.config), attn_implementation="sdpa")
    model.load_state_dict(eager.state_dict())
    return model.train(), inputs


def wavlm(**config: Any) -> tuple[nn.Module, dict]:
    convolutions = dict(conv_dim=[16], conv_kernel=[4], conv_stride=[4], num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)
    buckets = dict(num_buckets=8, max_bucket_distance=16, apply_spec_augment=False, layerdrop=0.0)
    no_dropout = dict(hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0)
    model = build(transformers.WavLMModel, transformers.WavLMConfig(**SIZES, **convolutions, **buckets, **no_dropout, **config))
    return model, dict(input_values=pixels(2, 64), attention_mask=(torch.arange(64) < torch.tensor([[40], [64]])).long())


def layoutlmv3(**config: Any) -> tuple[nn.Module, dict]:
    sizes = SIZES | dict(hidden_size=36, coordinate_size=6, shape_size=6, input_size=8, patch_size=4, max_2d_position_embeddings=64)
    buckets = dict(rel_pos_bins=8, rel_2d_pos_bins=8, max_rel_pos=16, max_rel_2d_pos=16)
    settings = transformers.LayoutLMv3Config(vocab_size=VOCABULARY, pad_token_id=0, **sizes, **buckets, **NO_DROPOUT, **config)
    random = torch.Generator().manual_seed(2)
    tokens, boxes = torch.randint(1, VOCABULARY, (2, 9), generator=random), torch.randint(0, 30, (2, 9, 4), generator=random).sort(-1).values
    mask = (torch.arange(9) < torch.tensor([[6], [9]])).long()
    return build(transformers.LayoutLMv3Model, settings), dict(
        input_ids=tokens, bbox=boxes, attention_mask=mask, pixel_values=pixels(2, 3, 8, 8)
    )


def esmfold() -> tuple[nn.Module, dict]:
    structure = dict(sequence_dim=16, pairwise_dim=16, ipa_dim=4, resnet_dim=8, num_heads_ipa=2, num_qk_points=2, num_v_points=2, num_blocks=1)
    trunk = dict(num_blocks=1, sequence_state_dim=16, pairwise_state_dim=16, sequence_head_width=8, pairwise_head_width=8, position_bins=4)
    folding = dict(fp16_esm=False, trunk=trunk | dict(chunk_size=None, structure_module=structure | dict(dropout_rate=0.0)))
    language = dict(vocab_size=33, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, pad_token_id=1)
    model = build(
        transformers.EsmForProteinFolding,
        transformers.EsmConfig(**language, **NO_DROPOUT, mask_token_id=32, is_folding_model=True, esmfold_config=folding),
    )
    tokens = torch.randint(0, 19, (2, 7), generator=torch.Generator().manual_seed(1))
    return model, dict(input_ids=tokens, attention_mask=(torch.arange(7) < torch.tensor([[5], [7]])).long(), num_recycles=0)


@dataclass(frozen=True)
class Tower:
    """A model without a loss of its own, how many patched layers' calls a pass makes, and why it is here."""

    name: str
    build: Callable[[], tuple[nn.Module, dict]]
    calls: int
    reason: str
    biased: bool = True


TOWERS = (
    Tower("swinv2", functools.partial(vision, "Swinv2", **WINDOWS), 2, "cosines; a bias by a small network; a shifted window"),
    Tower("swin2sr", functools.partial(vision, "Swin2SR", **WINDOWS | dict(patch_size=1)), 2, "a clone of Swinv2"),
    Tower("donut", functools.partial(vision, "DonutSwin", **WINDOWS), 2, "a table of its own in each layer; a shifted window"),
    Tower("maskformer", functools.partial(vision, "MaskFormerSwin", **WINDOWS), 2, "a clone of Donut's"),
    Tower("clap", clap, 2, "a clone of Donut's, in a file that uses the interface elsewhere"),
    Tower("data2vec", functools.partial(data2vec, use_relative_position_bias=True), 2, "a table in each layer"),
    Tower("data2vec-shared", functools.partial(data2vec, use_shared_relative_position_bias=True), 2, "a table for all layers"),
    Tower(
        "data2vec-both",
        functools.partial(data2vec, use_relative_position_bias=True, use_shared_relative_position_bias=True),
        2,
        "both, which add up",
    ),
    Tower("data2vec-sdpa", sdpa_data2vec, 2, "the class of layers that calls SDPA"),
    Tower("wavlm", wavlm, 2, "a gate by content on a shared table; padding"),
    Tower("wavlm-stable", functools.partial(wavlm, do_stable_layer_norm=True), 2, "the other encoder layer"),
    Tower("layoutlmv3", layoutlmv3, 2, "biases in one and two dimensions; padding in the middle"),
    Tower("layoutlmv3-text", functools.partial(layoutlmv3, has_spatial_attention_bias=False), 2, "one dimension only"),
    Tower("esmfold", esmfold, 5, "pair biases shared by rows and by columns; padding"),
)


def read(result: Any, inputs: dict) -> Tensor:
    """What a pass gives at real positions."""
    if "s_z" in result:  # ESMFold
        real = inputs["attention_mask"].bool()
        pairs = real[:, :, None] & real[:, None]
        return torch.cat([result.s_s[real].flatten(), result.s_z[pairs].flatten(), result.positions[-1][real].flatten()])
    for name in ("logits", "pred_masks"):
        if name in result:
            return result[name]
    out = result.last_hidden_state
    mask = inputs.get("attention_mask")
    if mask is None or mask.ndim > 2:
        return out
    keep = torch.ones(out.shape[:2], dtype=torch.bool)  # LayoutLMv3's image comes after its text; WavLM has a position for 4 samples
    mask = mask[:, ::4] if "input_values" in inputs else mask
    keep[:, : mask.shape[1]] = mask.bool()
    return out[keep]


def tower_step(model: nn.Module, inputs: dict) -> Step:
    """As train_step, with a loss of random weights."""

    def step(model: nn.Module, inputs: dict) -> Step:
        out = read(model(**inputs), inputs)
        loss = (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(3))).mean()
        loss.backward()
        return Step(out.detach(), loss.detach(), gradients_of(model))

    torch.manual_seed(0)  # ESMFold masks tokens at random
    return with_truth(step, model, inputs)


def with_strong_tables(model: nn.Module) -> dict[str, Tensor]:
    """The tables and gates of a model's biases, drawn so that they matter."""
    marks = ("relative_position_bias_table", "rel_attn_embed", "gru_rel_pos", "logit_scale", "continuous_position", "pair_to_sequence.linear")
    found = {name: parameter for name, parameter in model.named_parameters() if any(mark in name for mark in marks)}
    with torch.no_grad():
        for parameter in found.values():
            parameter.normal_(std=0.7)
    return found
