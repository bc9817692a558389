"""Types of MODEL_MAPPING that the sweep finds neither equal to their eager attention nor refused: the verdict, the versions of Transformers
(all, where none is named), the reason, and the types.

A row that is not needed any more fails the test as a missing one does. `python tests/integrations/sweep.py` prints both at its end.
"""

from __future__ import annotations

import transformers

LISTED: tuple[tuple[str, str, str, str], ...] = (
    (
        "DIFFERENT",
        "",
        "eager attention adds a bool mask of its own to scores as numbers; SDPA and dmattn read it as a mask",
        "grounding-dino mm-grounding-dino",
    ),
    (
        "DIFFERENT",
        "5.17",
        "without an attention mask the eager attention of 5.17 is not causal; SDPA and dmattn are",
        "kyutai_speech_to_text moshi",
    ),
    (
        "ERROR",
        "5.17",
        "attention across the image is marked causal, and gets no mask",
        "kosmos-2",
    ),
    (
        "ERROR",
        "5.23",
        "asks for a window that is not causal, without a mask",
        "diffusion_gemma",
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
        "cohere_compass cohere_compass_text diffusion_gemma edgetam edgetam_vision_model granite4_vision vision-text-dual-encoder",
    ),
    (
        "UNUSABLE",
        "5.17",
        "takes longer than a minute",
        "falcon_h1",
    ),
    (
        "UNUSABLE",
        "",
        "with random weights it predicts sounds of gigabytes, which may end the process: it is not run",
        "vits",
    ),
)
NOT_RUN = ("vits",)


def expected(kind: str) -> str | None:
    """The verdict that a type is listed with."""
    rows = (verdict for verdict, version, _, kinds in LISTED if kind in kinds.split() and transformers.__version__.startswith(version))
    return next(rows, None)
