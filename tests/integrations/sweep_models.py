"""A tiny model with random weights of every type in Transformers' MODEL_MAPPING, by rules that know names of attributes and no models.

:func:`tiny` makes a configuration: it reads the type's default one and shrinks the attributes whose names it knows, in inner configurations
too. Where such a model cannot be built or called, :func:`few_layers` keeps every width and shrinks layers, vocabulary and experts only.
OVERRIDES says the rest, type by type.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER = 64, 4, 2, 16, 48
LAYERS = 2
VOCABULARY = 128
SPECIAL = 64  # tokens from here on are special ones; texts are drawn from those below
LENGTH = 13
PADDED = 4  # tokens of padding in the first row of the batch
MOST_PARAMETERS = 70_000_000

Size = Callable[[int, dict[str, Any]], int]

# Names of integers, the first that matches decides: the number itself, or a function of the default.
RULES: tuple[tuple[str, int | Size], ...] = (
    (r"vocab_size$|vocab_size_per_layer_input$|^n_vocab|vocab_sizes$", VOCABULARY),
    (r"num_experts_per_tok|experts_per_tok|moe_top_?k|num_selected_experts|router_top_?k|^top_k_experts$|moe_topk|moe_k$", 2),
    (r"^n_group$|^topk_group$|n_shared_experts|num_shared_experts", 1),
    (r"(num|n)_(local_|routed_|zero_)?experts$|moe_num_experts|zero_expert_num", 4),
    (r"first_k_dense_replace|num_dense_layers|first_dense", 1),
    (r"(key_value|kv)_heads$|n_head_kv|num_key_value_attention_heads|kv_n_heads", lambda x, c: kv_heads(x, c)),
    (r"^index_topk$|num_topk_tokens", 4),
    (r"(^|_)n_?_?heads?$|num_(attention_)?heads$|_heads$|attention_heads$|^n_head$|num_query_groups", lambda x, c: power_of_two(min(x, HEADS))),
    (r"rotary_dim$", 8),
    (r"head_dim$|^d_kv$|^kv_channels$|head_size$|head_dim_|^attention_head_dim", lambda x, c: min(x, HEAD_DIM)),
    (r"lora_rank|_rank$", lambda x, c: min(x, 16)),
    (r"sliding_window|attention_chunk_size|local_attention$|attention_window_size", 5),
    (r"window_size$", lambda x, c: min(x, 4 * c["patch_size"] if x > 32 and isinstance(c.get("patch_size"), int) else 4)),
    (r"upsample_groups$", WIDTH),
    (r"(^|_)(num_|n_)?(hidden_|encoder_|decoder_)?layers?$|^depth$|_depth$|num_blocks$", lambda x, c: min(x, LAYERS)),
    (
        r"intermediate_size|ffn_dim|ffn_hidden|inner_dim|^n_inner|^d_ff$|mlp_dim|d_inner|feedforward|filter_size|mlp_size",
        lambda x, c: min(x, INNER),
    ),
    (r"(image|img)_size$", lambda x, c: image_size(x, c)),
    (r"max_source_positions", 32),
    (r"^max_(position_embeddings|positions|seq_len|sequence_length|length)|n_positions|n_ctx|max_.*positions", lambda x, c: min(x, 512)),
    (r"num_queries$|num_detection_tokens|query_length|num_query_tokens|num_latents", lambda x, c: min(x, 8)),
    (
        r"hidden_size|d_model|n_embd|embed_dim|_dim$|^dim$|width$|hidden_dim|embedding_size|projection_size|feature_size|hidden_channels",
        lambda x, c: min(x, WIDTH),
    ),
)
FEW = r"layers?$|depth|blocks|vocab|experts|expert_num|positions|max_len|queries|(image|img)_size$|sliding_window|chunk_size$|index_topk"
STOCHASTIC = r"drop|jitter|mask_(time|feature)_prob|noise"
PER_LAYER_INDEX = r"(index|indices|indexes|indexs|_ids|_idxs|layers|_layer|_idx)$"


def image_size(default: int, config: dict[str, Any]) -> int:
    patch = config.get("patch_size", 16)
    patch = max(patch) if isinstance(patch, (list, tuple)) else patch
    if isinstance(patch, int) and patch >= 8:
        return min(default, 4 * patch)
    return min(default, 128 if "window_size" in config else 64)


def kv_heads(default: int, config: dict[str, Any]) -> int:
    """As many as query heads where the default has as many: latent attention and others rely on it."""
    heads = next(
        (config[name] for name in ("num_attention_heads", "num_heads", "n_heads", "n_head", "decoder_attention_heads") if name in config), None
    )
    return min(default, HEADS if default == heads else KV_HEADS)


def power_of_two(x: int) -> int:
    return 1 << (x.bit_length() - 1) if x > 0 else x


# Attributes that many configurations leave unset, and models need.
UNSET: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    n_routed_experts=4,
    num_experts_per_tok=2,
    prediction_length=8,
    moe_intermediate_size=INNER,
    num_local_experts=4,
    pad_token_id=0,
    head_dim=HEAD_DIM,
)

# Configuration attributes of a type by name (``vision_config.depth`` for an inner one) that rules cannot tell.
OVERRIDES: dict[str, dict[str, Any]] = {
    "dots1": dict(n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1),
    "cohere_compass_text": dict(
        rope_parameters={each: dict(rope_type="default", rope_theta=10000.0) for each in ("full_attention", "sliding_attention")},
        layer_types=["sliding_attention", "full_attention"],
    ),
    "chameleon": dict(vocabulary_map={"<image>": 100, **{f"IMGIMG{chr(65 + i)}{chr(65 + j)}Z": 101 + i for i in range(4) for j in range(4)}}),
}
MROPE = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5, mrope_section=[2, 1, 1])
SMALL_CODEC = dict(num_filters=2, depths=[1] * 7, ffn_expansion=2)
PYRAMID = [[16, 16], [8, 8], [4, 4]]
for _kind in ("glm4v_text", "glm_image_text", "glm4v_moe_text"):
    OVERRIDES[_kind] = dict(rope_parameters=MROPE)
for _kind in ("gemma4_text", "gemma4_unified_text", "embedding_gemma2_text"):
    OVERRIDES[_kind] = dict(global_head_dim=32)
for _kind in ("gemma4", "gemma4_unified", "embedding_gemma2", "diffusion_gemma"):
    OVERRIDES[_kind] = {"text_config.global_head_dim": 32}
for _kind in ("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text"):
    OVERRIDES[_kind] = dict(head_dim=16)
OVERRIDES |= {
    "hunyuan_vl": {"text_config.head_dim": 16},
    "bamba": dict(attn_layer_indices=[1]),
    "granitemoehybrid": dict(layer_types=["mamba", "attention"]),
    "clap": {"audio_config.spec_size": 128, "audio_config.num_mel_bins": 32, "audio_config.hidden_size": 8 * WIDTH},
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1),
    "deepseek_ocr2": {"text_config.mlp_layer_types": ["dense", "sparse"]},
    "mamba2": dict(num_heads=8, head_dim=16),
    "moonshine_streaming": dict(num_key_value_heads=4),
    "recurrent_gemma": dict(num_hidden_layers=3),
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "align": {"projection_dim": 80, "vision_config.width_coefficient": 0.25, "vision_config.depth_coefficient": 1.0},
    "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "sam2": {"vision_config.backbone_config.hidden_size": 96, "vision_config.backbone_feature_sizes": PYRAMID},
    "sam3_tracker": {"vision_config.backbone_feature_sizes": PYRAMID},
    "depth_pro": {"patch_size": 64, "intermediate_hook_ids": [1, 0]}
    | {f"{each}_model_config.image_size": 64 for each in ("image", "patch", "fov")},
    "gemma3n_text": dict(
        num_hidden_layers=2,
        intermediate_size=INNER,
        activation_sparsity_pattern=[0.0, 0.0],
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "t5gemma2_encoder": {"text_config.dropout_rate": 0.0},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 16},
    "dots3_note": {"audio_config.adapter_input_size": WIDTH},
    "axk2": dict(index_topk=4),
    "blt": dict(encoder_hash_byte_group_vocab=64),
    "clvp": {f"{each}_config.num_attention_heads": 2 for each in ("text", "speech", "decoder")},
    "granite4_vision": dict(deepstack_layer_map=[[-1, 0]], downsample_rate="2/4"),
    "emu3": {
        "vocabulary_map": {"<image>": 100, "<|extra_200|>": 101} | {f"<|visual token {i:06}|>": i for i in range(SPECIAL)},
        "vq_config.codebook_size": SPECIAL,
        "vq_config.base_channels": 32,
        "vq_config.channel_multiplier": [1, 2, 2, 2],
    },
    "qwen4_exp_text": dict(indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8, indexer_compress_ratio=2),
    "blip-2": dict(image_token_id=100),
    "instructblip": dict(image_token_id=100),
    "instructblipvideo": dict(video_token_id=100),
    "sam3_lite_text_text_model": dict(num_hidden_layers=3),
    "mllama": {"text_config.cross_attention_layers": [1]},
    "tvp": dict(visual_prompt_size=8, max_img_size=64, num_frames=2),
    "nemo_speechlm": {"text_config.n_groups": 2, "text_config.layers_block_type": ["mamba", "attention", "moe"]},
    "nemotron": dict(num_key_value_heads=2),
    "step3p7": {"text_config.sliding_window": 5},
    "xmod": dict(default_language="en_XX"),
    "zamba": dict(num_hidden_layers=3, layers_block_type=["mamba", "hybrid", "hybrid"]),
    "perceiver": dict(num_latents=8, d_latents=WIDTH, num_self_attends_per_block=LAYERS),
    "janus": {
        "vision_config.num_image_tokens": 16,
        "vq_config.num_embeddings": VOCABULARY,
        "vq_config.base_channels": 32,
        "vq_config.channel_multiplier": [1, 2],
        "vq_config.latent_channels": WIDTH,
    },
    "muse_spark_audio": dict(hidden_sizes=[16, 32, 48, 64], depths=[1] * 4),
    "neucodec": dict(quantization_dim=2 * WIDTH),
    "xcodec2": dict(quantization_dim=2 * WIDTH),
    "vibevoice": {f"{inner}.{name}": value for inner in ("audio_config", "semantic_model_config") for name, value in SMALL_CODEC.items()},
    "vibevoice_asr": {
        f"{inner}_tokenizer_encoder_config.{name}": value for inner in ("acoustic", "semantic") for name, value in SMALL_CODEC.items()
    },
    "muse_spark": {"out_hidden_size": 4 * WIDTH, "audio_config.hidden_sizes": [16, 32, 48, 64], "audio_config.depths": [1] * 4},
    "vibevoice_acoustic_tokenizer": SMALL_CODEC,
    "vibevoice_acoustic_tokenizer_decoder": SMALL_CODEC,
    "vibevoice_acoustic_tokenizer_encoder": SMALL_CODEC,
    "lw_detr": dict(projector_scale_factors=[1.0]),
    "ernie4_5_vl_moe": {"text_config.rope_parameters": dict(rope_type="default", rope_theta=10000.0, mrope_section=[3, 3, 2])},
    "musicgen": {"decoder.num_codebooks": 1},
    "musicgen_melody": {"decoder.num_codebooks": 1},
    "kosmos-2": dict(latent_query_num=4),
    "seggpt": dict(num_hidden_layers=3, intermediate_hidden_state_indices=[1, 2], merge_index=0, image_size=[64, 32]),
    "molmo2": {"adapter_config.vision_feature_layer": [-1, -2]},
    "nemotron_h": dict(layers_block_type=["mamba", "attention", "moe"], n_groups=2),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "glm5_next_text": dict(index_kpool=2, num_key_value_heads=4),
    "glm5_next": {"text_config.index_kpool": 2, "text_config.num_key_value_heads": 4},
}
OVERRIDES["qwen4_exp"] = {f"text_config.{name}": value for name, value in OVERRIDES["qwen4_exp_text"].items()}
OVERRIDES["diffusion_gemma"] |= {
    f"text_config.{name}": value for name, value in dict(num_experts=4, top_k_experts=2, moe_intermediate_size=INNER).items()
}
OVERRIDES["cohere_compass"] = {f"text_config.{name}": value for name, value in OVERRIDES["cohere_compass_text"].items()}


def types() -> tuple[str, ...]:
    return tuple(MODEL_MAPPING_NAMES)


def model_class(kind: str) -> Any:
    """Of the several of Funnel, the first: the other is a part of it."""
    names = MODEL_MAPPING_NAMES[kind]
    return getattr(transformers, names if isinstance(names, str) else names[0])


def tiny(kind: str, widths: bool = True) -> PreTrainedConfig:
    config = _shrunk(CONFIG_MAPPING[kind](), widths, {}, OVERRIDES.get(kind, {}))
    wanted = model_class(kind).config_class or PreTrainedConfig  # the model of some is that of an inner configuration
    return next((each for each in configurations(config) if isinstance(each, wanted)), config)


def few_layers(kind: str) -> PreTrainedConfig:
    return tiny(kind, widths=False)


def _fields(kind: type) -> dict[str, Any]:
    """Parameters of a configuration's constructor and their defaults."""
    signature = inspect.signature(kind.__init__).parameters
    return {
        name: each.default for name, each in signature.items() if name != "self" and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    }


def _shrunk(config: Any, widths: bool, tokens: dict[int, int], overrides: dict[str, Any]) -> Any:
    fields, values = _fields(type(config)), dict(vars(config))
    values |= {name: getattr(config, name) for name in fields if name not in values and hasattr(config, name)}
    usual = type(config)()  # an inner configuration has other numbers where the outer one says so
    values["_mrope"] = _knows_mrope(config)
    changed: dict[str, Any] = {}
    chosen, depth = _layers({name: value for name, value in values.items() if name in fields})
    for name, value in values.items():
        if name.startswith("_") or name in ("transformers_version", "dtype", "architectures"):
            continue
        if isinstance(value, PreTrainedConfig) and type(value).__name__ == "TimmBackboneConfig":
            changed |= dict(use_timm_backbone=False, backbone_config=_resnet())
        elif isinstance(value, PreTrainedConfig):
            inner = {key.split(".", 1)[1]: each for key, each in overrides.items() if key.startswith(name + ".")}
            changed[name] = _shrunk(value, widths, tokens, inner)
        elif name in fields and value is None and name in UNSET:
            changed[name] = UNSET[name]
        elif name in fields:
            small = _small(name, value, values, widths, tokens, chosen, depth)
            given = small is not value or value != vars(usual).get(name, value)
            if given and not (fields[name] is None and isinstance(value, int) and _derived(name)):
                changed[name] = small
    levels = getattr(config, "out_indices", None)
    if isinstance(levels, (list, tuple)) and "out_indices" not in fields:  # of a backbone: as many levels of features as by default
        if depth > LAYERS:
            layers = max(len(chosen), len(levels))
            changed |= {"out_indices": list(range(layers - len(levels) + 1, layers + 1))}
            changed |= {name: layers for name in ("num_hidden_layers", "num_layers", "depth") if name in changed}
        else:
            changed["out_indices"] = list(levels)
    changed |= {name: value for name, value in overrides.items() if "." not in name and name != "inputs"}
    return type(config)(**changed)


def _resnet() -> PreTrainedConfig:
    """In place of a backbone of another library."""
    stages = [f"stage{i}" for i in range(1, 5)]
    return transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[1] * 4, layer_type="basic", out_features=stages)


def _derived(name: str) -> bool:
    """What a configuration computes from others where it is None."""
    return re.search(r"head_dim|intermediate|inner|ffn|hidden_size|_dim$", name) is not None


def _layers(values: dict[str, Any]) -> tuple[list[int], int]:
    """Layers to keep, one of each sort that per-layer lists tell apart and two at least, and how many there were."""
    depth = next(
        (values[name] for name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth") if isinstance(values.get(name), int)), 0
    )
    lists = [each for name, each in values.items() if isinstance(each, (list, tuple)) and len(each) == depth > 2 and "indices" not in name]
    seen: list[set] = [set() for _ in lists]
    chosen = []
    for layer in range(depth):
        sorts = [repr(each[layer]) for each in lists]
        if any(sort not in known for sort, known in zip(sorts, seen, strict=True)) and len(chosen) < 4:
            chosen.append(layer)
            for sort, known in zip(sorts, seen, strict=True):
                known.add(sort)
    chosen += [layer for layer in range(depth) if layer not in chosen][: max(0, LAYERS - len(chosen))]
    return sorted(chosen), depth


def _small(name: str, value: Any, values: dict[str, Any], widths: bool, tokens: dict[int, int], chosen: list[int], depth: int) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return False if name == "apply_spec_augment" else value
    if isinstance(value, float) or (isinstance(value, int) and re.search(r"drop(out|path)?(_prob|_rate)?$", name)):
        return 0.0 if re.search(STOCHASTIC, name) and value else value
    if isinstance(value, (list, tuple)):
        return _small_list(name, value, values, widths, chosen, depth)
    if isinstance(value, dict):
        return _small_rope(value, values, name) if widths and "rope" in name else value
    if not isinstance(value, int):
        return value
    if re.search(r"token_(id|index)$|_(id|idx|token)$", name):
        return _token(value, tokens)
    if depth and value == depth and re.search(r"^(num_hidden_layers|num_layers|n_layers?|depth)$", name):
        return len(chosen)
    if depth and re.search(PER_LAYER_INDEX, name) and not name.startswith(("num_", "n_")) and value >= len(chosen):
        return len(chosen) - 1
    for pattern, size in RULES:
        if re.search(pattern, name):
            if not (widths or re.search(FEW, name)):
                return value
            small = size if isinstance(size, int) else size(value, values)
            return small if value > small else value
    return value


def _small_list(name: str, value: Any, values: dict[str, Any], widths: bool, chosen: list[int], depth: int) -> Any:
    of = type(value)
    if re.search(r"token_ids?$|_token$", name):
        return value
    if depth > 2 and len(value) == depth and "indices" not in name:
        return of(value[layer] for layer in chosen)
    if value and all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        if name == "depths" or re.search(r"num_blocks|layer_repeats", name):
            return of(min(each, 2) for each in value)
        if re.search(PER_LAYER_INDEX, name) and not name.startswith("encode_proj") and depth and max(value) >= len(chosen):
            return of(dict.fromkeys(min(len(chosen) - 1, each * len(chosen) // depth) for each in value))
        if re.search(r"heads?$", name):
            return of(power_of_two(min(each, HEADS)) for each in value)
        if re.search(r"(image|img)_size$", name):
            return of(image_size(each, values) for each in value)
    return value


def _small_rope(rope: dict, values: dict[str, Any], name: str) -> dict:
    """Sections of pairs that sum to the smaller head dim's; where the modelling file has a default for them, too."""
    if any(isinstance(each, dict) for each in rope.values()):
        return {key: _small_rope(each, values, name) if isinstance(each, dict) else each for key, each in rope.items()}
    if "mrope_section" not in rope and not values.get("_mrope"):
        return rope
    pairs = int(HEAD_DIM * rope.get("partial_rotary_factor", values.get("partial_rotary_factor") or 1.0)) // 2
    third = max(1, pairs // 4)
    count = len(rope.get("mrope_section", (0, 0, 0)))
    return rope | dict(mrope_section=[pairs - third * (count - 1)] + [third] * (count - 1))


def _knows_mrope(config: Any) -> bool:
    try:
        return "mrope_section" in inspect.getsource(importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_")))
    except (ImportError, OSError):
        return False


def _token(value: int, tokens: dict[int, int]) -> int:
    if value < SPECIAL:
        return value
    return tokens.setdefault(value, SPECIAL + len(tokens) % (VOCABULARY - SPECIAL))


def build(kind: str, config: PreTrainedConfig) -> nn.Module:
    """With eager attention, in the default dtype, and weights large enough that attention is far from uniform."""
    made = model_class(kind)
    with torch.device("meta"):
        try:
            size = sum(each.numel() for each in made._from_config(config).parameters())
        except Exception as error:
            if not re.search("meta|item", str(error)):
                raise
            size = 0  # it computes with values while it is made
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(0)
    choices = dict(attn_implementation="eager", experts_implementation="eager", dtype=torch.get_default_dtype())
    model = made._from_config(config, **choices).to(torch.get_default_dtype())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            if parameter.ndim < 2:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            elif "relative_attention_bias" in name or "bias_table" in name or "rel_pos" in name:
                parameter.normal_(std=1.0)
            else:
                parameter.normal_(std=1.6 / math.sqrt(max(1, parameter.numel() // max(1, parameter.shape[0]))))
    return model.eval()


def configurations(config: Any) -> Iterator[Any]:
    yield config
    for each in vars(config).values():
        if isinstance(each, PreTrainedConfig):
            yield from configurations(each)


def look_up(config: Any, *names: str, among: str = "", default: Any = None) -> Any:
    """The first of `names` that a configuration or an inner one has, those first whose class has a name that matches `among`."""
    found = list(configurations(config))
    for each in sorted(found, key=lambda one: not (among and re.search(among, type(one).__name__))):
        for name in names:
            if isinstance(getattr(each, name, None), (int, list, tuple)):
                return getattr(each, name)
    return default
