"""Models of Transformers whose sequences ranks share train as one process does with eager attention: loss, gradients, curves."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import needs_cuda
from models import build
from processes import Processes
from torch import Tensor, distributed, nn

from dmattn.distributed import unshard
from dmattn.execution.backend import interpreting

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from dmattn.integrations import transformers as integration  # noqa: E402

Groups = Callable[..., Processes]
pytestmark = pytest.mark.skipif(interpreting(), reason="whole models; the interpreter takes milliseconds for each tile")

VOCABULARY = 64
DECODER = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    pad_token_id=0,
)
T5 = dict(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0, pad_token_id=0)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", DECODER),
    "mistral": ("MistralForCausalLM", DECODER | dict(sliding_window=5)),
    "qwen2": ("Qwen2ForCausalLM", DECODER | dict(use_sliding_window=True, sliding_window=6, max_window_layers=1)),
    "qwen3": ("Qwen3ForCausalLM", DECODER | dict(head_dim=8)),
    "gemma2": ("Gemma2ForCausalLM", DECODER | dict(head_dim=8, sliding_window=5, query_pre_attn_scalar=8, attn_logit_softcapping=3.0)),
    "gpt-oss": ("GptOssForCausalLM", DECODER | dict(head_dim=8, sliding_window=5, num_local_experts=4, num_experts_per_tok=2)),
    "t5": ("T5ForConditionalGeneration", T5 | dict(decoder_start_token_id=0)),
    "mt5": ("MT5ForConditionalGeneration", T5 | dict(decoder_start_token_id=0)),
    "umt5": ("UMT5ForConditionalGeneration", T5 | dict(decoder_start_token_id=0)),
}


def model_of(name: str, **changed: Any) -> nn.Module:
    kind, options = MODELS[name]
    kind = getattr(transformers, kind)
    return build(kind, kind.config_class(**(options | changed)))


def batch_of(model: nn.Module, padded: bool) -> dict[str, Tensor]:
    """24 tokens; an encoder-decoder's 16 labels, of which, padded, one rank of two has none in one row."""
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (2, 24), generator=random)
    real = torch.ones_like(tokens)
    if padded:
        real[0, -7:] = 0
    labels = torch.where(real == 1, tokens, -100)
    if model.config.is_encoder_decoder:
        labels = torch.randint(1, VOCABULARY, (2, 16), generator=random)
        if padded:
            labels[1, 4:] = -100
    return dict(input_ids=tokens * real, labels=labels) | (dict(attention_mask=real) if padded else {})


def step(name: str, padded: bool, shared: dict[str, str] | None, device: str = "cpu") -> tuple[float, dict[str, Tensor], Tensor]:
    """The loss, gradients and logits of a model, whose sequences are `shared` so, or which is eager's."""
    model = model_of(name).to(device)
    if shared is not None:
        integration.enable(model, group=distributed.group.WORLD, **shared)
    out = model(**on(device, batch_of(model, padded)))
    out.loss.backward()
    logits = out.logits.detach() if shared is None else unshard(out.logits.detach(), 1, order=shared.get("order", "zigzag"))
    return out.loss.item(), {key: x.grad for key, x in model.named_parameters() if x.grad is not None}, logits


def on(device: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: x.to(device) for key, x in batch.items()}


def step_of_rank(rank: int, kind: str, *arguments: Any) -> tuple[float, dict[str, Tensor], Tensor]:
    return step(*arguments, f"cuda:{rank}" if kind == "cuda" else "cpu")


STEPS = [
    *((name, number % 2 == 0, {}) for number, name in enumerate(MODELS)),
    ("llama", False, dict(order="contiguous", strategy="heads")),
    ("t5", True, dict(strategy="heads")),
    ("t5", False, dict(order="contiguous")),
]


@pytest.mark.parametrize(("name", "padded", "shared"), STEPS, ids=lambda x: "-".join(x.values()) if isinstance(x, dict) else None)
def test_loss_and_gradients_are_those_of_one_process(processes: Groups, name: str, padded: bool, shared: dict[str, str]) -> None:
    assert_loss_and_gradients(processes(2), name, padded, shared)


@needs_cuda
@pytest.mark.parametrize(("name", "padded", "shared"), [each for each in STEPS if each[0] in ("llama", "gpt-oss", "t5")], ids=str)
def test_loss_and_gradients_on_two_gpus(processes: Groups, name: str, padded: bool, shared: dict[str, str]) -> None:
    """One process has a CPU."""
    assert_loss_and_gradients(processes(2, "cuda"), name, padded, shared)


def assert_loss_and_gradients(group: Processes, name: str, padded: bool, shared: dict[str, str]) -> None:
    """The mean over ranks of gradients is the gradient. A padded query's logits are each implementation's own choice."""
    loss, gradients, logits = step(name, padded, None)
    ranks = group.results(step_of_rank, group.kind, name, padded, shared)
    of_real = torch.ones(logits.shape[:2], dtype=torch.bool)
    if padded and "decoder_start_token_id" not in MODELS[name][1]:
        of_real = batch_of(model_of(name), True)["attention_mask"].bool()
    for ours, found, whole in ranks:
        assert ours == pytest.approx(loss, rel=1e-5)
        assert found.keys() == gradients.keys()
        torch.testing.assert_close(whole[of_real], logits[of_real], rtol=1e-4, atol=1e-4)
    for key, gradient in gradients.items():
        mean = sum(found[key] for _, found, _ in ranks) / 2
        assert (mean - gradient).abs().max() <= 5e-5 * max(gradient.abs().max(), 0.01), key


WAYS = ("ddp", "fsdp2", "checkpoint", "compile", "lora")


def curve(name: str, way: str, device: str = "cpu") -> list[float]:
    """Losses of steepest descent on two batches by turns."""
    model = wrapped = model_of(name).to(device)
    blocks = [module for module in model.modules() if type(module).__name__ in ("LlamaDecoderLayer", "T5Block")]
    if way.startswith("lora"):
        peft: Any = pytest.importorskip("peft")
        torch.manual_seed(0)
        wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"] if name == "llama" else ["q", "v"]))
        for key, parameter in wrapped.named_parameters():
            if "lora_B" in key:
                nn.init.normal_(parameter, std=0.5)
    if way in WAYS:
        integration.enable(wrapped, group=distributed.group.WORLD)
    if way == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    elif way == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        mesh = distributed.init_device_mesh(torch.device(device).type, (distributed.get_world_size(),))
        for module in (*blocks, model):
            fully_shard(module, mesh=mesh)
    elif way == "checkpoint":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    elif way == "compile":
        blocks[-1].compile(backend="eager")  # compiling takes seconds
    learned = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.SGD(learned, lr=0.5), []
    for number in range(4):
        loss = wrapped(**on(device, batch_of(model, number % 2 == 1))).loss
        loss.backward()
        if way in ("checkpoint", "compile", "lora"):
            for parameter in learned:
                distributed.all_reduce(parameter.grad)
                parameter.grad /= distributed.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def curves_of_rank(rank: int, kind: str, name: str, ways: list[str]) -> dict[str, list[float]]:
    return {way: curve(name, way, f"cuda:{rank}" if kind == "cuda" else "cpu") for way in ways}


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_curves_are_those_of_one_process(processes: Groups, name: str) -> None:
    """Under DDP and FSDP2, with checkpoints, in compiled blocks and with adapters."""
    assert_curves(processes(2), name, WAYS)


@needs_cuda
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_curves_on_two_gpus(processes: Groups, name: str) -> None:
    """One process has a CPU."""
    assert_curves(processes(2, "cuda"), name, WAYS[:-1])


def assert_curves(group: Processes, name: str, ways: tuple[str, ...]) -> None:
    one = {way: curve(name, "lora of one process" if way == "lora" else "eager") for way in ways if way in ("compile", "lora")}
    assert max(one["compile"]) > 1.05 * min(one["compile"])
    for found in group.results(curves_of_rank, group.kind, name, list(ways)):
        for way, losses in found.items():
            assert losses == pytest.approx(one.get(way, one["compile"]), rel=2e-4), way


def packed(rank: int, shared: bool) -> list[float]:
    """Documents in a row; and afterwards, when ranks share nothing more."""
    model = model_of("llama")
    model.set_attn_implementation("eager")
    ends = torch.tensor([0, 9, 10, 24], dtype=torch.int32)
    batch = {name: x[:1] for name, x in batch_of(model, False).items()}
    batch["position_ids"] = torch.cat([torch.arange(length) for length in (9, 1, 14)])[None]
    losses = []
    if shared:
        with integration.using(model, group=distributed.group.WORLD):
            losses.append(model(**batch, cu_seq_lens_q=ends, cu_seq_lens_k=ends).loss.item())
    losses.append(model(**batch, use_cache=False).loss.item())  # beside a cache places say nothing about documents
    return losses


def test_packed_documents(processes: Groups) -> None:
    (loss,) = packed(0, False)
    for ours in processes(2).results(packed, True):
        assert ours == pytest.approx([loss, loss], rel=1e-5)


def badly(rank: int, name: str) -> None:
    kind = "t5" if name in ("encoder outputs", "cumulative lengths of t5") else "llama"
    drops = dict(attention_dropout=0.5)
    changed = {"dropout": drops, "training on one": drops, "rope": dict(rope_scaling=dict(rope_type="dynamic", factor=2.0))}.get(name, {})
    model = model_of(kind, **changed)
    given: Any = dict(group=distributed.group.WORLD)
    if name in ("order", "strategy", "group"):
        given[name] = "tree"
    if name == "model":
        model = transformers.BertModel(transformers.BertConfig(**{x: DECODER[x] for x in list(DECODER)[:4]}, intermediate_size=48))
    if name == "enabled":
        integration.enable(model)
    integration.enable(model, **given)
    batch = batch_of(model, False)
    ends = torch.tensor([0, 9, 24])
    if name == "other attention":
        model.set_attn_implementation("sdpa")
    elif name == "part":
        model.model(input_ids=batch["input_ids"])
    elif name == "another batch":
        batch["input_ids"] = batch["input_ids"].roll(rank, 0)
    elif name == "training on one":
        model.train(rank == 0)
    batch |= {
        "length": {key: x[:, :22] for key, x in batch.items()},
        "length on one": {key: x[:, : 24 - 2 * rank] for key, x in batch.items()},
        "cache": dict(use_cache=True),
        "mask of pairs": dict(attention_mask=torch.ones(2, 1, 24, 24)),
        "documents": dict(position_ids=torch.arange(24)[None] % 9),
        "padded documents": dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, attention_mask=torch.zeros(2, 24)),
        "cumulative lengths of t5": dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends),
        "encoder outputs": dict(encoder_outputs=(torch.zeros(2, 24, 32),)),
        "unknown tensor": dict(token_type_ids=torch.zeros(2, 24)),
        "tuple": dict(return_dict=False),
    }.get(name, {})
    model(**batch)


REFUSED = {
    "order": "dmattn: order: expected 'zigzag' or 'contiguous', received 'tree'",
    "strategy": "dmattn: strategy: expected 'ring' or 'heads', received 'tree'",
    "group": "dmattn: group: expected a torch.distributed.ProcessGroup or None, received str",
    "model": "dmattn: model: expected a model whose sequences ranks can share: .*, received BertModel",
    "rope": "dmattn: model: expected rotary embeddings that do not depend on the length.*'dynamic'",
    "enabled": "dmattn: model: expected a model that is not enabled beside a group",
    "dropout": "dmattn: dropout: expected 0.0 where ranks share a sequence, received 0.5",
    "other attention": "dmattn: attn_implementation: expected what enable.. set, .* received 'sdpa'",
    "part": "dmattn: model: expected a call of the model that enable.. was given",
    "another batch": "dmattn: input_ids: expected the same on all ranks",
    "training on one": r"dmattn: training: expected the same on all ranks, received \d+ of \d+ modules on rank 0 and 0 of",
    "length": r"dmattn: input_ids: expected 2 axes, the second of a length that 4 divides.* received shape \(2, 22\)",
    "length on one": r"received.* shape \(2, 22\)",
    "cache": "dmattn: use_cache: expected none",
    "mask of pairs": "dmattn: attention_mask: expected 2 axes",
    "documents": "dmattn: position_ids: expected places that rise by one",
    "padded documents": "dmattn: attention_mask: expected none beside cu_seq_lens_q",
    "cumulative lengths of t5": "dmattn: cu_seq_lens_q: expected none in an encoder-decoder",
    "encoder outputs": "dmattn: encoder_outputs: expected none",
    "unknown tensor": "dmattn: token_type_ids: expected no such tensor",
    "tuple": "dmattn: return_dict: expected True",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_ranks_cannot_share_is_an_error_on_all(processes: Groups, name: str) -> None:
    for raised in processes(2).errors(badly, name):
        assert isinstance(raised, (TypeError, ValueError))
        assert re.search(REFUSED[name], str(raised)), str(raised)
