"""Small models of the families off Transformers' attention interface, most of them without a bias, beside those of off_interface.py."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import transformers
from models import VOCABULARY, build
from off_interface import FAMILIES as BIASED
from off_interface import NO_DROPOUT, SIZES, Family, Tower, language_model, pixels
from off_interface import TOWERS as BIASED_TOWERS
from torch import nn

NO_GPT_DROPOUT = dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
NO_BART_DROPOUT = dict(dropout=0.0, attention_dropout=0.0, activation_dropout=0.0)
GPT = dict(n_embd=32, n_layer=2, n_head=4, n_positions=32) | NO_GPT_DROPOUT
BART = dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, pad_token_id=0)
BART |= dict(encoder_ffn_dim=48, decoder_ffn_dim=48, decoder_start_token_id=2, eos_token_id=None, forced_eos_token_id=None) | NO_BART_DROPOUT

gptj = functools.partial(language_model, "GPTJForCausalLM", **GPT, rotary_dim=4)
codegen = functools.partial(language_model, "CodeGenForCausalLM", **GPT, rotary_dim=4)
gpt_neo = functools.partial(
    language_model, "GPTNeoForCausalLM", hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=32, window_size=5
)
gpt_neo = functools.partial(gpt_neo, attention_types=[[["global", "local"], 1]], embed_dropout=0.0, attention_dropout=0.0, resid_dropout=0.0)
gpt_neox_japanese = functools.partial(
    language_model, "GPTNeoXJapaneseForCausalLM", **SIZES | dict(hidden_size=32), attention_dropout=0.0, hidden_dropout=0.0
)
xglm = functools.partial(language_model, "XGLMForCausalLM", d_model=32, num_layers=2, attention_heads=4, ffn_dim=48, pad_token_id=0)
xglm = functools.partial(xglm, max_position_embeddings=64, layerdrop=0.0, **NO_BART_DROPOUT)
imagegpt = functools.partial(language_model, "ImageGPTForCausalImageModeling", **GPT)
openai_gpt = functools.partial(language_model, "OpenAIGPTLMHeadModel", **GPT)
megatron_bert = functools.partial(language_model, "MegatronBertForMaskedLM", **SIZES, **NO_DROPOUT)
rembert = functools.partial(language_model, "RemBertForMaskedLM", **SIZES, **NO_DROPOUT, input_embedding_size=16, output_embedding_size=16)
roformer = functools.partial(language_model, "RoFormerForMaskedLM", **SIZES, **NO_DROPOUT)
tapas = functools.partial(language_model, "TapasForMaskedLM", **SIZES, **NO_DROPOUT, type_vocab_sizes=[3] * 7)
squeezebert = functools.partial(language_model, "SqueezeBertForMaskedLM", **SIZES, **NO_DROPOUT, embedding_size=32)
xlm = functools.partial(
    language_model, "XLMWithLMHeadModel", emb_dim=32, n_layers=2, n_heads=4, dropout=0.0, attention_dropout=0.0, pad_index=0
)
flaubert = functools.partial(
    language_model, "FlaubertWithLMHeadModel", emb_dim=32, n_layers=2, n_heads=4, dropout=0.0, attention_dropout=0.0, pad_index=0
)
trocr = functools.partial(language_model, "TrOCRForCausalLM", d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48)
trocr = functools.partial(trocr, pad_token_id=0, decoder_layerdrop=0.0, **NO_BART_DROPOUT)
prophetnet = functools.partial(
    language_model, "ProphetNetForConditionalGeneration", hidden_size=32, num_encoder_layers=2, num_decoder_layers=2, ngram=2
)
prophetnet = functools.partial(
    prophetnet,
    num_encoder_attention_heads=4,
    num_decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    pad_token_id=0,
    decoder_start_token_id=2,
    eps=0.0,
    disable_ngram_loss=False,
    **NO_BART_DROPOUT,
)
led = functools.partial(language_model, "LEDForConditionalGeneration", **BART, attention_window=4, max_encoder_position_embeddings=32)
bigbird_pegasus = functools.partial(language_model, "BigBirdPegasusForConditionalGeneration", **BART, attention_type="original_full")

FAMILIES = (
    *BIASED,
    Family("gptj", gptj, "a part of q and k rotated", biased=False),
    Family("codegen", codegen, "projections in four parts", biased=False),
    Family("gpt-neo", gpt_neo, "no scale, and a window in one of two layers", biased=False),
    Family("gpt-neox-japanese", gpt_neox_japanese, "a bias beside the output", biased=False),
    Family("xglm", xglm, "BART's layers in a decoder", biased=False),
    Family("imagegpt", imagegpt, "causal by a buffer of the layer", biased=False),
    Family(
        "imagegpt-by-layer",
        functools.partial(imagegpt, scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True),
        "a scale by the number of the layer, in the other method",
        biased=False,
    ),
    Family("openai-gpt", openai_gpt, "transposed keys", biased=False, float_mask=True),
    Family("megatron-bert", megatron_bert, "BERT's layers", biased=False),
    Family("rembert", rembert, "BERT's layers", biased=False),
    Family("roformer", roformer, "q and k rotated", biased=False, unused=("embed_positions",)),
    Family("roformer-value", functools.partial(roformer, rotary_value=True), "v rotated as well", biased=False, unused=("embed_positions",)),
    Family("tapas", tapas, "another result", biased=False),
    Family("squeezebert", squeezebert, "channels first, projections in groups", biased=False, unused=("pooler",)),
    Family("xlm", xlm, "a mask of its own", biased=False),
    Family("xlm-causal", functools.partial(xlm, causal=True), "a causal mask of its own", biased=False),
    Family("flaubert", flaubert, "a clone of XLM", biased=False),
    Family("trocr", trocr, "BART's layers in a decoder", biased=False, unused=("encoder_attn",)),
    Family("prophetnet", prophetnet, "cross attention beside predicted n-grams", biased=False, calls=4, float_mask=True),
    Family("led", led, "the decoder; its encoder's windows are not covered", biased=False, calls=4, unused=("_global.",)),
    Family("bigbird-pegasus", bigbird_pegasus, "the encoder; its decoder uses the interface", biased=False, float_mask=True),
)
DECODERS = [family for family in FAMILIES if family.name.startswith(("bloom", "mpt", "falcon", "gpt", "codegen", "xglm", "imagegpt", "trocr"))]


def padded(rows: int = 2, length: int = 9, real: int = 6) -> torch.Tensor:
    """A mask whose first row ends early."""
    return (torch.arange(length) < torch.tensor([[real]] + [[length]] * (rows - 1))).long()


def tokens(length: int = 9) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(2))


def text(kind: str, **config: Any) -> tuple[nn.Module, dict]:
    model_type = getattr(transformers, kind)
    model = build(model_type, model_type.config_class(vocab_size=VOCABULARY, **config))
    return model, dict(input_ids=tokens(), attention_mask=padded())


def crossing(kind: str, width: int = 32, length: int = 7, **config: Any) -> tuple[nn.Module, dict]:
    """A decoder that attends to an encoder's states as well, of another length and width."""
    model, inputs = text(kind, is_decoder=True, add_cross_attention=True, **config)
    return model, inputs | dict(encoder_hidden_states=pixels(2, length, width), encoder_attention_mask=padded(length=length, real=5))


def visual_bert() -> tuple[nn.Module, dict]:
    model, inputs = text("VisualBertModel", **SIZES, **NO_DROPOUT, visual_embedding_dim=16)
    return model, inputs | dict(visual_embeds=pixels(2, 4, 16), visual_attention_mask=padded(length=4, real=3))


def vilt() -> tuple[nn.Module, dict]:
    model, inputs = text("ViltModel", **SIZES, **NO_DROPOUT, image_size=8, patch_size=4, max_position_embeddings=16)
    return model, inputs | dict(pixel_values=pixels(2, 3, 8, 8))


def flava(part: str) -> tuple[nn.Module, dict]:
    kind = getattr(transformers, f"Flava{part}Model")
    model = build(kind, kind.config_class(**SIZES, **NO_DROPOUT, vocab_size=VOCABULARY))
    return model, dict(input_ids=tokens(), attention_mask=padded()) if part == "Text" else dict(hidden_states=pixels(2, 9, 32))


def blip() -> tuple[nn.Module, dict]:
    image = dict(image_size=8, patch_size=4, attention_dropout=0.0, projection_dim=16)
    language = dict(vocab_size=VOCABULARY, encoder_hidden_size=32, bos_token_id=1, sep_token_id=2, pad_token_id=0, projection_dim=16)
    config = transformers.BlipConfig(vision_config=SIZES | image, text_config=SIZES | NO_DROPOUT | language)
    model = build(transformers.BlipForConditionalGeneration, config)
    return model, dict(pixel_values=pixels(2, 3, 8, 8), input_ids=tokens(), attention_mask=padded())


def image(kind: str, implementation: str = "eager", size: tuple[int, ...] = (3, 16, 16), **config: Any) -> tuple[nn.Module, dict]:
    model_type = getattr(transformers, f"{kind}Model")
    model = build(model_type, model_type.config_class(**config))
    if implementation != "eager":
        other = model_type._from_config(model.config, attn_implementation=implementation)
        other.load_state_dict(model.state_dict())
        model = other.train()
    return model, dict(pixel_values=pixels(2, *size))


SAM = dict(image_size=16, patch_size=2, output_channels=8, window_size=3, global_attn_indexes=[1], mlp_dim=48, attention_dropout=0.0)
SAM |= dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)


def sam() -> tuple[nn.Module, dict]:
    """The whole model, whose mask decoder uses the interface."""
    sizes = dict(hidden_size=32, image_embedding_size=8, image_size=16, patch_size=2, mask_input_channels=4)
    decoder = dict(hidden_size=32, mlp_dim=16, num_hidden_layers=2, num_attention_heads=2, iou_head_hidden_dim=16)
    config = transformers.SamConfig(
        vision_config=SAM | dict(num_pos_feats=16, output_channels=32), prompt_encoder_config=sizes, mask_decoder_config=decoder
    )
    return build(transformers.SamModel, config), dict(pixel_values=pixels(2, 3, 16, 16), input_points=8 * pixels(2, 1, 1, 2).abs())


def sam_clone(name: str, kind: str, part: str = "VisionEncoder", **config: Any) -> tuple[nn.Module, dict]:
    """The vision tower alone."""
    modelling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    settings = getattr(importlib.import_module(f"transformers.models.{name}.configuration_{name}"), f"{kind}VisionConfig")
    return build(getattr(modelling, f"{kind}{part}"), settings(**SAM, **config)), dict(pixel_values=pixels(2, 3, 16, 16))


PP_FORMULANET = dict(post_conv_in_channels=8, post_conv_mid_channels=8, post_conv_out_channels=8, decoder_hidden_size=8)
VITDET = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=2, window_size=3, window_block_indices=[0])
VITDET |= dict(use_relative_position_embeddings=True, drop_path_rate=0.0, dropout_prob=0.0)


def layoutlmv2(**config: Any) -> tuple[nn.Module, dict]:
    """The encoder, as the whole model needs detectron2."""
    from transformers.models.layoutlmv2.modeling_layoutlmv2 import LayoutLMv2Encoder

    buckets = dict(rel_pos_bins=8, rel_2d_pos_bins=8, max_rel_pos=16, max_rel_2d_pos=16)
    settings = transformers.LayoutLMv2Config(**SIZES, **NO_DROPOUT, **buckets, **config)
    torch.manual_seed(0)
    encoder = LayoutLMv2Encoder(settings)
    for parameter in encoder.parameters():
        nn.init.normal_(parameter, std=0.3)
    hidden = (1.0 - padded()[:, None, None].float()) * torch.finfo(torch.float32).min
    boxes = torch.randint(0, 30, (2, 9, 4), generator=torch.Generator().manual_seed(2)).sort(-1).values
    places = torch.arange(9).expand(2, 9)
    return encoder.train(), dict(hidden_states=pixels(2, 9, 32), attention_mask=hidden, bbox=boxes, position_ids=places)


def speecht5() -> tuple[nn.Module, dict]:
    sizes = dict(hidden_size=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4)
    sizes |= dict(encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=VOCABULARY, encoder_max_relative_position=4, pad_token_id=0)
    convolutions = dict(conv_dim=[16], conv_kernel=[4], conv_stride=[4], num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)
    quiet = dict(positional_dropout=0.0, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0)
    quiet |= dict(encoder_layerdrop=0.0, decoder_layerdrop=0.0, apply_spec_augment=False)
    model = build(transformers.SpeechT5ForSpeechToText, transformers.SpeechT5Config(**sizes, **convolutions, **quiet))
    return model, dict(input_values=pixels(2, 64), attention_mask=padded(length=64, real=40), decoder_input_ids=tokens(5))


def table_transformer() -> tuple[nn.Module, dict]:
    backbone = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"])
    sizes = dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, num_queries=5)
    sizes |= dict(encoder_ffn_dim=48, decoder_ffn_dim=48, encoder_layerdrop=0.0, decoder_layerdrop=0.0)
    config = transformers.TableTransformerConfig(backbone_config=backbone, use_timm_backbone=False, backbone=None, **sizes, **NO_BART_DROPOUT)
    mask = torch.ones(2, 32, 32, dtype=torch.long)
    mask[0, 20:] = 0
    return build(transformers.TableTransformerModel, config), dict(pixel_values=pixels(2, 3, 32, 32), pixel_mask=mask)


def git() -> tuple[nn.Module, dict]:
    vision = SIZES | dict(image_size=8, patch_size=4, attention_dropout=0.0)
    config = transformers.GitConfig(vision_config=vision, vocab_size=VOCABULARY, pad_token_id=0, **SIZES, **NO_DROPOUT)
    model = build(transformers.GitForCausalLM, config)
    return model, dict(input_ids=tokens(), attention_mask=padded(), pixel_values=pixels(2, 3, 8, 8))


def timesformer(kind: str) -> tuple[nn.Module, dict]:
    sizes = dict(image_size=8, patch_size=4, num_frames=3, drop_path_rate=0, attention_type=kind)
    return build(transformers.TimesformerModel, transformers.TimesformerConfig(**SIZES, **NO_DROPOUT, **sizes)), dict(
        pixel_values=pixels(2, 3, 3, 8, 8)
    )


def groupvit(part: str) -> tuple[nn.Module, dict]:
    if part == "Text":
        sizes = SIZES | dict(vocab_size=VOCABULARY, max_position_embeddings=16, dropout=0.0, attention_dropout=0.0, eos_token_id=63)
        return text("GroupViTTextModel", **{name: value for name, value in sizes.items() if name != "vocab_size"})
    sizes = dict(depths=[1, 1], num_group_tokens=[4, 0], num_output_groups=[4, 4], image_size=8, patch_size=2, drop_path_rate=0.0)
    return image("GroupViTVision", size=(3, 8, 8), **SIZES | sizes, dropout=0.0, attention_dropout=0.0)


UNLIMITED_OCR = (  # since 5.23
    [Tower("unlimited-ocr", functools.partial(sam_clone, "unlimited_ocr", "UnlimitedOcrSam"), 2, "a clone of SAM's")]
    if hasattr(transformers, "UnlimitedOcrConfig")
    else []
)
TOWERS = (
    *BIASED_TOWERS,
    Tower(
        "megatron-bert-crossing",
        functools.partial(crossing, "MegatronBertModel", length=9, **SIZES, **NO_DROPOUT),
        4,
        "cross attention to as many states, or its own code fails",
        False,
    ),
    Tower("rembert-crossing", functools.partial(crossing, "RemBertModel", **SIZES, **NO_DROPOUT), 4, "causal; cross attention", False),
    Tower("roformer-crossing", functools.partial(crossing, "RoFormerModel", **SIZES, **NO_DROPOUT), 4, "causal; cross attention", False),
    Tower(
        "trocr-crossing",
        functools.partial(
            crossing,
            "TrOCRForCausalLM",
            24,
            d_model=32,
            cross_attention_hidden_size=24,
            decoder_layers=2,
            decoder_attention_heads=4,
            decoder_ffn_dim=48,
            decoder_layerdrop=0.0,
            **NO_BART_DROPOUT,
        ),
        4,
        "cross attention to other widths",
        False,
    ),
    Tower(
        "xglm-crossing",
        functools.partial(
            crossing, "XGLMModel", d_model=32, num_layers=2, attention_heads=4, ffn_dim=48, pad_token_id=0, layerdrop=0.0, **NO_BART_DROPOUT
        ),
        4,
        "cross attention",
        False,
    ),
    Tower(
        "tapas-crossing",
        functools.partial(crossing, "TapasModel", length=9, **SIZES, **NO_DROPOUT, type_vocab_sizes=[3] * 7),
        4,
        "cross attention to as many states, or its own code fails",
        False,
    ),
    Tower("visual-bert", visual_bert, 2, "text, then an image", False),
    Tower("vilt", vilt, 2, "text, then an image", False),
    Tower("flava-text", functools.partial(flava, "Text"), 2, "BERT's layers", False),
    Tower("flava-multimodal", functools.partial(flava, "Multimodal"), 2, "no mask", False),
    Tower("blip", blip, 6, "an image; text, causal, with cross attention", False),
    Tower("git", git, 2, "an image before the text; its vision uses the interface"),
    Tower("vitdet", functools.partial(image, "VitDet", num_channels=3, **VITDET), 2, "tables by row and column; a window, and none"),
    Tower("sam", functools.partial(image, "SamVision", **SAM), 2, "tables by row and column; windows, and none"),
    Tower("sam-sdpa", functools.partial(image, "SamVision", "sdpa", **SAM), 2, "the class of layers that calls SDPA"),
    Tower("sam-plain", functools.partial(image, "SamVision", **SAM, use_rel_pos=False), 2, "no tables", False),
    Tower("sam-hq", functools.partial(image, "SamHQVision", **SAM), 2, "a clone of SAM's"),
    Tower("sam-hq-sdpa", functools.partial(image, "SamHQVision", "sdpa", **SAM), 2, "a clone of SAM's"),
    Tower("got-ocr2", functools.partial(sam_clone, "got_ocr2", "GotOcr2"), 2, "a clone of SAM's"),
    Tower("deepseek-ocr2", functools.partial(sam_clone, "deepseek_ocr2", "DeepseekOcr2Sam"), 2, "a clone of SAM's"),
    Tower(
        "pp-formulanet", functools.partial(sam_clone, "pp_formulanet", "PPFormulaNet", "VisionModel", **PP_FORMULANET), 2, "a clone of SAM's"
    ),
    Tower("slanext", functools.partial(sam_clone, "slanext", "SLANeXt"), 2, "a clone of SAM's"),
    *UNLIMITED_OCR,
    Tower("timesformer", functools.partial(timesformer, "divided_space_time"), 4, "time and space in turn", False),
    Tower("timesformer-joint", functools.partial(timesformer, "joint_space_time"), 2, "both at once", False),
    Tower("groupvit-text", functools.partial(groupvit, "Text"), 2, "causal", False),
    Tower("groupvit-vision", functools.partial(groupvit, "Vision"), 3, "images, and groups that attend across to them", False),
    Tower("layoutlmv2", layoutlmv2, 2, "biases in one and two dimensions; padding"),
    Tower("layoutlmv2-slow", functools.partial(layoutlmv2, fast_qkv=False, has_relative_attention_bias=False), 2, "two dimensions only"),
    Tower("speecht5", speecht5, 6, "q times a table by distance; padding; cross attention"),
    Tower("table-transformer", table_transformer, 6, "places added before q and k; padding; cross attention", False),
)


def source(build: Callable[..., nn.Module], **config: Any) -> tuple[nn.Module, dict]:
    """Text for an encoder."""
    return build(**config), dict(input_ids=tokens(), attention_mask=padded())


def prompt(kind: str) -> tuple[nn.Module, dict]:
    """Text for a decoder, padded on the left."""
    return language_model(kind, **SIZES, **NO_DROPOUT, is_decoder=True), dict(input_ids=tokens(), attention_mask=padded().flip(1))


def speech() -> tuple[nn.Module, dict]:
    model, inputs = speecht5()
    return model, {name: tensor for name, tensor in inputs.items() if name != "decoder_input_ids"}


WRITERS = (  # which generate 8 tokens; the calls are those of patched layers
    Tower("led", functools.partial(source, led), 8 * 4, "cross attention with a cache", False),
    Tower("prophetnet", functools.partial(source, prophetnet), 2 + 8 * 2, "cross attention of three streams"),
    Tower("bigbird-pegasus", functools.partial(source, bigbird_pegasus), 2, "an encoder beside a decoder that uses the interface"),
    Tower("speecht5", speech, 2 + 8 * 4, "from sound; cross attention with a cache"),
    Tower("blip", blip, 2 + 8 * 4, "from an image, which is read across"),
    Tower("git", git, 8 * 2, "from an image, which stays in the cache"),
    Tower("megatron-bert", functools.partial(prompt, "MegatronBertForCausalLM"), 8 * 2, "a cache of BERT's layers", False),
    Tower("rembert", functools.partial(prompt, "RemBertForCausalLM"), 8 * 2, "a cache of BERT's layers", False),
    Tower("roformer", functools.partial(prompt, "RoFormerForCausalLM"), 8 * 2, "rotated keys in a cache", False),
)
