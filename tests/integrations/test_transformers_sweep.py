"""Every type of Transformers' MODEL_MAPPING is served exactly, refused by name, or listed with its reason in sweep_listed.py.

``make test`` tries the types in FEW, ``make test-full`` (``DMATTN_FULL=1``) all of them. By hand, with the figures:
``python tests/integrations/sweep.py --types bert t5``.
"""

from __future__ import annotations

import gc
import os

import pytest

from dmattn.execution.backend import interpreting

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from sweep import sweep  # noqa: E402
from sweep_listed import expected  # noqa: E402
from sweep_models import types  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("registered"),
    pytest.mark.skipif(interpreting(), reason="whole models in float64; the interpreter's kernels serve no float64"),
]

FULL = bool(os.environ.get("DMATTN_FULL"))
FEW = (
    *("llama", "gemma3_text", "mixtral", "deepseek_v3", "gpt_oss", "gpt2", "bloom", "jamba"),  # decoders
    *("bert", "modernbert", "deberta-v2", "longformer"),  # encoders
    *("t5", "bart", "bigbird_pegasus", "informer"),  # pairs
    *("vit", "swin", "detr", "clip", "llava", "qwen2_vl", "git", "bridgetower"),  # images, and text with them
    *("whisper", "wav2vec2", "gemma4_audio"),  # sound
    *("deepseek_v4", "resnet"),  # its own mask arithmetic; no attention
)


@pytest.mark.parametrize("kind", types() if FULL else [kind for kind in FEW if kind in types()])
def test_a_type_is_equal_refused_or_listed(kind: str) -> None:
    result = sweep(kind)
    if FULL:
        gc.collect()  # some hundred models, one by one
    if result["verdict"] == "needs a package":
        pytest.skip(result["detail"])
    wanted = expected(kind)
    if wanted is None:
        assert result["verdict"] in ("equal", "refused"), result
    else:
        assert result["verdict"] == wanted, f"the row of {kind} in sweep_listed.py says {wanted}: {result}"
