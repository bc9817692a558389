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
        "TODO 1.2e+00 at output encoder_logits, padding none; beside sdpa 8.1e-14",
        "grounding-dino",
    ),
    (
        "DIFFERENT",
        "",
        "TODO 5.0e-01 at output encoder_last_hidden_state, padding right; sdpa: ValueError: BigBirdPegasusModel do",
        "bigbird_pegasus",
    ),
    (
        "DIFFERENT",
        "",
        "TODO 6.9e-01 at output text_audio_embeds, padding left; beside sdpa 2.3e-15",
        "pe_audio",
    ),
    (
        "DIFFERENT",
        "",
        "TODO 8.1e-01 at output last_hidden_state, padding right; sdpa: ValueError: GitModel does not support an a",
        "git",
    ),
    (
        "DIFFERENT",
        "",
        "TODO 9.8e-01 at output encoder_last_hidden_state_text, padding none; beside sdpa 9.4e-14",
        "mm-grounding-dino",
    ),
    (
        "DIFFERENT",
        "",
        "TODO sees the future (3.1e-01); 3.9e-01 at output last_hidden_state, padding right",
        "deepseek_v4",
    ),
    (
        "DIFFERENT",
        "5.17",
        "TODO 1.3e+00 at output last_hidden_state, padding none; beside sdpa 2.4e-15",
        "moshi",
    ),
    (
        "DIFFERENT",
        "5.17",
        "TODO 8.1e-01 at output last_hidden_state, padding right; beside sdpa 0.0e+00",
        "gemma4_audio",
    ),
    (
        "DIFFERENT",
        "5.23",
        "TODO 9.1e-01 at output pooler_output, padding none; sdpa: ValueError: BridgeTowerModel does not support a",
        "bridgetower",
    ),
    (
        "ERROR",
        "",
        "TODO ValueError: Attention mask should be of size (2, 1, 4, 4), but is torch.Size([2, 1, 8, 8]) (modeling",
        "informer",
    ),
    (
        "ERROR",
        "",
        "TODO ValueError: dmattn: indices: expected None, as AXK2Attention uses it in a way not supported, receive",
        "axk2",
    ),
    (
        "ERROR",
        "",
        "TODO ValueError: dmattn: indices: expected None, as DeepseekV32Attention uses it in a way not supported, ",
        "deepseek_v32",
    ),
    (
        "ERROR",
        "",
        "TODO ValueError: dmattn: indices: expected None, as Dots3NoteTextAttention uses it in a way not supported",
        "dots3_note dots3_note_text",
    ),
    (
        "ERROR",
        "",
        "TODO ValueError: dmattn: indices: expected None, as GlmMoeDsaAttention uses it in a way not supported, re",
        "glm_moe_dsa",
    ),
    (
        "ERROR",
        "",
        "TODO ValueError: dmattn: indices: expected None, as HYV4Attention uses it in a way not supported, receive",
        "hy_v4",
    ),
    (
        "ERROR",
        "",
        "TODO ValueError: dmattn: indices: expected None, as MistralLarge4TextAttention uses it in a way not suppo",
        "mistral_large4 mistral_large4_text",
    ),
    (
        "ERROR",
        "",
        "TODO ValueError: dmattn: sinks: expected None, as Inkling2SlidingAttention uses it in a way not supported",
        "inkling2 inkling2_text",
    ),
    (
        "ERROR",
        "5.17",
        "TODO ValueError: dmattn: attention_mask: expected a mask, as the causal alignment of 4 queries to 21 keys",
        "kosmos-2",
    ),
    (
        "ERROR",
        "5.17",
        "TODO ValueError: dmattn: mask: expected a shape broadcastable to (B, H, Sq, Sk) = (2, 4, 13, 17) with 4 o",
        "bridgetower",
    ),
    (
        "ERROR",
        "5.23",
        "TODO TypeError: torch.finfo() requires a floating point input type. Use torch.iinfo to handle 'torch.finf",
        "gemma4_audio",
    ),
    (
        "ERROR",
        "5.23",
        "TODO ValueError: dmattn: attention_mask: expected a mask, as a sliding window that is not causal has no o",
        "diffusion_gemma",
    ),
    (
        "NOT SERVED",
        "",
        "TODO ['DabDetrAttention', 'DetrAttention']; 0.0e+00 at outputs, padding none",
        "dab-detr",
    ),
    (
        "NOT SERVED",
        "",
        "TODO ['Gemma3nAudioAttention']; 0.0e+00 at outputs, padding none",
        "gemma3n_audio",
    ),
    (
        "NOT SERVED",
        "",
        "TODO ['PatchTSMixerGatedAttention']; 0.0e+00 at outputs, padding none",
        "patchtsmixer",
    ),
    (
        "NOT SERVED",
        "",
        "TODO ['SamHQVisionAttention']; 0.0e+00 at outputs, padding none",
        "sam_hq_vision_model",
    ),
    (
        "NOT SERVED",
        "",
        "TODO ['SamVisionAttention']; 0.0e+00 at outputs, padding none",
        "sam_vision_model",
    ),
    (
        "NOT SERVED",
        "5.17",
        "TODO ['TableTransformerAttention']; 0.0e+00 at outputs, padding none",
        "table-transformer",
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
        "align blt clap depth_pro ernie4_5_vl_moe gemma3n_text idefics inkling2_vision kyutai_speech_to_text "
        "lw_detr muse_glimmer_assistant musicgen musicgen_melody nemo_speechlm neucodec omdet-turbo oneformer "
        "paligemma pi0 pp_doclayout_v3 pp_doclayout_v4 pp_ocrv5_mobile_rec pp_ocrv5_server_rec "
        "pp_ocrv6_medium_det pp_ocrv6_small_det qwen3_asr_encoder qwen4_exp qwen4_exp_text rt_detr rt_detr_v2 "
        "sam2 sam3_tracker tvp unlimited_ocr uvdoc vivit voxtral_realtime voxtral_realtime_encoder "
        "voxtral_realtime_text wav2vec2-bert xclip xcodec xcodec2 xlstm xmod youtu zamba",
    ),
    (
        "UNUSABLE",
        "",
        "stays large when the widths that the rules know shrink",
        "emu3 janus muse_spark muse_spark_audio perceiver vibevoice vibevoice_acoustic_tokenizer "
        "vibevoice_acoustic_tokenizer_decoder vibevoice_acoustic_tokenizer_encoder vibevoice_asr",
    ),
    (
        "UNUSABLE",
        "",
        "takes longer than a minute",
        "vits",
    ),
    (
        "UNUSABLE",
        "5.17",
        "needs a configuration or inputs that the rules do not make",
        "blip-2 clvp cohere_compass cohere_compass_text d_fine dbrx deimv2 diffusion_gemma edgetam "
        "edgetam_vision_model efficientloftr granite4_vision mask2former vision-text-dual-encoder",
    ),
    (
        "UNUSABLE",
        "5.17",
        "stays large when the widths that the rules know shrink",
        "efficientnet",
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
        "needs a configuration or inputs that the rules do not make",
        "t5gemma2_encoder table-transformer time_series_transformer timesfm timesformer timm_backbone "
        "timm_wrapper video_llama_3_vision videomae",
    ),
    (
        "no attention",
        "",
        "convolutions, state spaces or other layers without attention",
        "bit convnext convnextv2 dac dinov3_convnext encodec falcon_mamba fnet focalnet hgnet_v2 mamba mllama "
        "mobilenet_v1 mobilenet_v2 poolformer pp_ocrv6_small_rec pp_ocrv6_tiny_rec regnet resnet "
        "sam3_lite_text_text_model textnet univnet",
    ),
    (
        "no attention",
        "5.23",
        "convolutions, state spaces or other layers without attention",
        "efficientnet mamba2",
    ),
)


def expected(kind: str) -> str | None:
    """The verdict that a type is listed with."""
    rows = (verdict for verdict, version, _, kinds in LISTED if kind in kinds.split() and transformers.__version__.startswith(version))
    return next(rows, None)
