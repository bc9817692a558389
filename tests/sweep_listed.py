"""Types of MODEL_MAPPING that the sweep finds neither equal to their eager attention nor refused: the verdict, the versions of Transformers
(all, where none is named), the reason, and the types.

A row that is not needed any more fails the test as a missing one does. `python tests/sweep.py` prints both at its end.
"""

from __future__ import annotations

import transformers

LISTED: tuple[tuple[str, str, str, str], ...] = (
    (
        "DIFFERENT",
        "",
        "adds its mask to scores: a bool one lets it see the future",
        "git",
    ),
    (
        "DIFFERENT",
        "",
        "adds numbers to a mask of the type that it is given: a bool one lets it see the future",
        "deepseek_v4",
    ),
    (
        "DIFFERENT",
        "",
        "eager attention adds a bool mask of its own to scores as numbers; SDPA and dmattn read it as a mask",
        "grounding-dino mm-grounding-dino",
    ),
    (
        "DIFFERENT",
        "",
        "its original_full attention adds its mask to scores",
        "bigbird_pegasus",
    ),
    (
        "DIFFERENT",
        "5.17",
        "its attention adds its mask to scores",
        "gemma4_audio",
    ),
    (
        "DIFFERENT",
        "5.17",
        "without an attention mask the eager attention of 5.17 is not causal; SDPA and dmattn are",
        "kyutai_speech_to_text moshi",
    ),
    (
        "DIFFERENT",
        "5.23",
        "self attention is marked causal, gets no mask, and eager attention hides nothing then; 5.17 makes masks of other lengths",
        "bridgetower",
    ),
    (
        "ERROR",
        "",
        "its prob attention adds its mask to scores",
        "informer",
    ),
    (
        "ERROR",
        "",
        "sinks of its own kind",
        "inkling2 inkling2_text",
    ),
    (
        "ERROR",
        "",
        "sparse attention: the keys that an indexer chose arrive beside the mask",
        "axk2 deepseek_v32 dots3_note dots3_note_text glm_moe_dsa hy_v4 mistral_large4 mistral_large4_text",
    ),
    (
        "ERROR",
        "5.17",
        "attention across the image is marked causal, and gets no mask",
        "kosmos-2",
    ),
    (
        "ERROR",
        "5.17",
        "self attention is marked causal, gets no mask, and eager attention hides nothing then; 5.17 makes masks of other lengths",
        "bridgetower",
    ),
    (
        "ERROR",
        "5.23",
        "asks for a window that is not causal, without a mask",
        "diffusion_gemma",
    ),
    (
        "ERROR",
        "5.23",
        "its attention adds its mask to scores",
        "gemma4_audio",
    ),
    (
        "NOT SERVED",
        "",
        "enable() accepts it, and its own attention computes on",
        "dab-detr gemma3n_audio sam_hq_vision_model sam_vision_model table-transformer",
    ),
    (
        "NOT SERVED",
        "",
        "what is called attention is a gate",
        "patchtsmixer",
    ),
    (
        "UNUSABLE",
        "",
        "eager attention gives NaN for so few frames",
        "nemotron3_5_asr nemotron_asr_streaming nemotron_asr_streaming_encoder",
    ),
    (
        "UNUSABLE",
        "",
        "has no forward method",
        "bark glm_image_vqmodel",
    ),
    (
        "UNUSABLE",
        "",
        "is called with an inference session of frames instead of tensors",
        "edgetam_video sam2_video sam3_tracker_video sam3_video",
    ),
    (
        "UNUSABLE",
        "",
        "needs a configuration or inputs that the rules do not make",
        "blt inkling2_vision muse_glimmer_assistant omdet-turbo pp_ocrv5_mobile_rec pp_ocrv6_medium_det pp_ocrv6_small_det uvdoc xlstm",
    ),
    (
        "UNUSABLE",
        "",
        "takes a batch of one only",
        "tvp",
    ),
    (
        "UNUSABLE",
        "",
        "Transformers does not export its class",
        "voxtral_realtime_text",
    ),
    (
        "UNUSABLE",
        "5.17",
        "has no default configuration",
        "musicgen musicgen_melody",
    ),
    (
        "UNUSABLE",
        "5.17",
        "needs a configuration or inputs that the rules do not make",
        "cohere_compass cohere_compass_text diffusion_gemma edgetam edgetam_vision_model granite4_vision "
        "mask2former oneformer pp_doclayout_v3 vision-text-dual-encoder",
    ),
    (
        "UNUSABLE",
        "5.17",
        "takes longer than a minute",
        "falcon_h1 mamba2",
    ),
    (
        "UNUSABLE",
        "5.23",
        "takes longer than a minute",
        "vits",
    ),
    (
        "no attention",
        "",
        "convolutions, state spaces or other layers without attention",
        "bit convnext convnextv2 dac dinov3_convnext efficientnet encodec falcon_mamba fnet focalnet hgnet_v2 "
        "mamba mobilenet_v1 mobilenet_v2 poolformer pp_ocrv6_small_rec pp_ocrv6_tiny_rec regnet resnet "
        "textnet univnet",
    ),
    (
        "no attention",
        "5.23",
        "convolutions, state spaces or other layers without attention",
        "mamba2",
    ),
)


def expected(kind: str) -> str | None:
    """The verdict that a type is listed with."""
    rows = (verdict for verdict, version, _, kinds in LISTED if kind in kinds.split() and transformers.__version__.startswith(version))
    return next(rows, None)
