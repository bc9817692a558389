"""Real models of other libraries, with random weights: dmattn's outputs and gradients of all parameters beside those of the library's own attention.

`own` computes as the library does without torch's function, where it can; `ours` is the same model made to call that function, or a backend.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from libraries import library
from torch import Tensor, nn

from dmattn import replace_sdpa
from dmattn.execution.backend import interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="whole models; the interpreter takes milliseconds for each tile")


class Pair(NamedTuple):
    """A model twice. `calls` counts attention layers; `learned` names parameters whose gradients come through a bias or a mask."""

    own: nn.Module
    ours: nn.Module
    call: Callable[[nn.Module], Tensor]
    calls: int
    learned: str | None = None
    rounding: float = 1e-9  # float64 throughout, but where a library rounds its softmax to float32


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def step(model: nn.Module, call: Callable[[nn.Module], Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Outputs, and the gradients of all parameters by name."""
    out = call(model)
    weights = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return out, dict(zip(names, torch.autograd.grad((out * weights).sum(), parameters, allow_unused=True), strict=True))


def assert_same(pair: Pair, around: Callable[[nn.Module], AbstractContextManager] | None = None) -> None:
    """`ours`, with replace_sdpa or in another context, does what `own` does."""
    torch.manual_seed(0)
    own, ours = pair.own.double(), pair.ours.double()
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # many biases begin as zeros
    ours.load_state_dict(own.state_dict())
    out, gradients = step(own, pair.call)
    with replace_sdpa() as replaced, nullcontext() if around is None else around(ours):
        got, ours_gradients = step(ours, pair.call)
    assert (replaced.calls, replaced.left) == (pair.calls, {})
    limits = dict(rtol=pair.rounding, atol=pair.rounding)
    torch.testing.assert_close(got, out, **limits)
    assert gradients.keys() == ours_gradients.keys()
    for name, gradient in gradients.items():
        if gradient is None:
            assert ours_gradients[name] is None
        else:
            scale = gradient.abs().max().item()
            torch.testing.assert_close(ours_gradients[name], gradient, rtol=pair.rounding, atol=pair.rounding * max(scale, 1.0), msg=name)
    if pair.learned is not None:
        learned = [gradient.norm() for name, gradient in gradients.items() if pair.learned in name]
        assert learned
        assert min(learned) > 0


def timm_pair(name: str, calls: int, learned: str | None = None, side: int = 32, **sizes: Any) -> Pair:
    library("torchvision")
    timm = library("timm")

    def build(fused: bool) -> nn.Module:
        timm.layers.set_fused_attn(fused, experimental=fused)
        try:
            return timm.create_model(name, img_size=side, num_classes=5, **sizes).eval()
        finally:
            timm.layers.set_fused_attn(True)

    return Pair(build(False), build(True), lambda model: model(normal(2, 3, side, side)), calls, learned)


def timm_vit() -> Pair:
    return timm_pair("vit_tiny_patch16_224", 2, depth=2, embed_dim=24, num_heads=3)


def timm_swin() -> Pair:
    """The second layer of the first stage shifts its windows, and adds a mask to the bias."""
    sizes = dict(window_size=4, patch_size=4, embed_dim=12, depths=(2, 1), num_heads=(2, 4))
    return timm_pair("swin_tiny_patch4_window7_224", 3, "relative_position_bias_table", **sizes)


def timm_beit() -> Pair:
    return timm_pair("beit_base_patch16_224", 2, "relative_position_bias_table", depth=2, embed_dim=24, num_heads=3)


def timm_relative() -> Pair:
    """A bias that a small network makes of distances."""
    return timm_pair("vit_relpos_small_patch16_224", 2, "rel_pos.mlp", rel_pos_type="mlp", depth=2, embed_dim=24, num_heads=3)


def torchvision_vit() -> Pair:
    """Through torch.nn.MultiheadAttention."""
    models = library("torchvision").models

    def build() -> nn.Module:
        return models.VisionTransformer(image_size=32, patch_size=16, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32).eval()

    return Pair(build(), build(), lambda model: model(normal(1, 3, 32, 32)), 2)


def x_transformers_pair(kind: str, learned: str | None, flash: bool, mask: bool = False, **options: Any) -> Pair:
    """T5's bias is refused beside `attn_flash`, as torch's fast kernels have no gradient for it: the layers are told afterwards."""
    library("torchvision")
    module = library("x_transformers")
    attend = library("x_transformers.attend").Attend

    def build(fused: bool) -> nn.Module:
        layers = getattr(module, kind)(dim=16, depth=2, heads=4, attn_dim_head=8, attn_flash=fused and flash, **options)
        model = module.TransformerWrapper(num_tokens=16, max_seq_len=9, attn_layers=layers).eval()
        for layer in model.modules():
            if fused and isinstance(layer, attend):
                layer.flash, layer.sdp_context_manager = True, nullcontext
        return model

    tokens = torch.arange(18).view(2, 9) % 16
    kept = dict(mask=torch.arange(9) < torch.tensor([[9], [6]])) if mask else {}
    return Pair(build(False), build(True), lambda model: model(tokens, **kept), 2, learned, 2e-6)


def x_transformers_alibi() -> Pair:
    return x_transformers_pair("Decoder", None, True, alibi_pos_bias=True)


def x_transformers_t5() -> Pair:
    return x_transformers_pair("Encoder", "relative_attention_bias", False, mask=True, rel_pos_bias=True)


def x_transformers_t5_decoder() -> Pair:
    return x_transformers_pair("Decoder", "relative_attention_bias", False, rel_pos_bias=True)


def x_transformers_forgetting() -> Pair:
    """ALiBi with slopes that depend on the data."""
    return x_transformers_pair("Decoder", "data_dependent_alibi", True, attn_data_dependent_alibi=True)


def diffusers_unet() -> Pair:
    """A UNet with a text: self and cross attention of each block, under a mask of the text."""
    diffusers = library("diffusers")

    def build() -> nn.Module:
        return diffusers.UNet2DConditionModel(
            sample_size=8,
            in_channels=3,
            out_channels=3,
            layers_per_block=1,
            block_out_channels=(8, 16),
            norm_num_groups=4,
            cross_attention_dim=12,
            attention_head_dim=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        ).eval()

    kept = torch.arange(5) < torch.tensor([[5], [3]])
    own = build()
    own.set_attn_processor(library("diffusers.models.attention_processor").AttnProcessor())
    # two layers in the blocks that go up, one in those that go down and in the middle, each with two attentions
    return Pair(own, build(), lambda model: model(normal(2, 3, 8, 8), 7, normal(2, 5, 12), encoder_attention_mask=kept).sample, 8)


PAIRS = [
    timm_vit,
    timm_swin,
    timm_beit,
    timm_relative,
    torchvision_vit,
    x_transformers_alibi,
    x_transformers_t5,
    x_transformers_t5_decoder,
    x_transformers_forgetting,
    diffusers_unet,
]


@pytest.mark.parametrize("build", PAIRS, ids=lambda build: build.__name__)
def test_replace_sdpa_in(build: Callable[[], Pair]) -> None:
    torch.manual_seed(0)
    assert_same(build())


def test_torchvisions_swin_computes_its_own_weights() -> None:
    """And is not reached, as `calls` says."""
    torch.manual_seed(0)
    models = library("torchvision").models
    sizes = dict(patch_size=[4, 4], embed_dim=12, depths=[2], num_heads=[2], window_size=[4, 4], num_classes=5)
    model, image = models.SwinTransformer(**sizes).eval(), normal(1, 3, 32, 32).float()
    want = model(image)
    with replace_sdpa() as replaced:
        assert torch.equal(model(image), want)
    assert (replaced.calls, replaced.left) == (0, {})


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "attention", "is", "exact", "and", "so", "the", "gradient"]
SENTENCES = ["attention is exact", "and so is the gradient", "gradient"]


def sentence_model(folder: Path, kind: str) -> str:
    """A folder with a tiny sentence-transformers model, its tokenizer built here."""
    transformers = library("transformers")
    sizes = dict(vocab_size=len(WORDS), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**sizes, max_position_embeddings=20))
    base = folder / "base"
    model.save_pretrained(base)
    folder.joinpath("vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(base)
    modules = library("sentence_transformers.sentence_transformer.modules")
    parts = [modules.Transformer(str(base)), modules.Pooling(16, "mean")]
    library("sentence_transformers").SentenceTransformer(modules=parts, device="cpu").save(str(folder / "whole"))
    return str(folder / "whole")


def embeddings(model: Any) -> Tensor:
    """With gradients, where `encode` has none."""
    return model(model.preprocess(SENTENCES))["sentence_embedding"]


@pytest.mark.parametrize("how", ["replace_sdpa", "register", "patch"])
def test_sentence_transformers(how: str, tmp_path: Path) -> None:
    """BERT by torch's function and by the attention interface; MPNet, which has T5's bias and neither, by `patch`."""
    from dmattn.integrations import transformers as integration

    load = library("sentence_transformers").SentenceTransformer
    path = sentence_model(tmp_path, "MPNet" if how == "patch" else "Bert")
    own = load(path, device="cpu", model_kwargs=dict(attn_implementation="eager")).eval()
    named = dict(attn_implementation={"replace_sdpa": "sdpa", "register": "dmattn", "patch": "eager"}[how])
    if how == "register":
        integration.register()
    try:
        ours = load(path, device="cpu", model_kwargs=named).eval()
        if how == "patch":
            integration.patch(ours[0].model)
        pair = Pair(own, ours, embeddings, 2 if how == "replace_sdpa" else 0, "relative_attention_bias" if how == "patch" else None, 2e-6)
        assert_same(pair)
        torch.testing.assert_close(ours.encode(SENTENCES), own.encode(SENTENCES), rtol=1e-5, atol=1e-6)
        if how != "replace_sdpa":
            states = {each.state for each in integration.report(ours[0].model)}
            assert states == {"patched" if how == "patch" else "routed"}
    finally:
        integration.unregister()
