"""Real-sized models of Transformers with random weights: training steps and generation with each attention implementation.

All run in one process, one after the other; on a GPU in a new one after each that ended it or broke the device (:mod:`benchmarks.apart`).

A training step is forward, loss and backward in bfloat16, without an optimizer, whose cost is the same for all. Its speed is in tokens (of
the decoder and the encoder) or images per second from the median step; its memory is the peak of the allocator less what the model and the
inputs hold. Generation is greedy: the time of the prompt, and of each token after it. Losses of the first step stand beside each other: an
implementation whose loss is far from eager's computes something else. One that refuses, fails or runs out of memory is recorded with the
reason. T5 runs once more with dmattn and its position bias as pairs, which its layers hand over as a table otherwise. A stack of Pairformer
blocks (:mod:`benchmarks.pairformer`) stands for models like AlphaFold, which Transformers has not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from torch import Tensor, nn

from benchmarks import harness, plots
from benchmarks.apart import Apart
from benchmarks.pairformer import PAIR_WIDTH, SINGLE_WIDTH, Pairformer
from dmattn.integrations import doge
from dmattn.integrations import transformers as integration
from dmattn.integrations.transformers.bucket_tables import make_biases
from dmattn.report import show_table

OURS, PAIRS = "dmattn", "dmattn_pairs"
IMPLEMENTATIONS = (OURS, PAIRS, "sdpa", "flex_attention", "eager")
STEPS = 5
NEW_TOKENS, TURNS = 64, 5
Record = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A model class with the configuration of a published model, and the inputs of one measurement."""

    name: str
    kind: str
    config: dict[str, Any]
    batch: int
    length: int  # tokens, or pixels of a side
    unit: str = "tokens"
    generates: bool = False
    checkpoints: bool = False  # a layer keeps its inputs alone, and is computed again in the backward pass

    def build(self, device: torch.device, tiny: bool) -> nn.Module:
        """In bfloat16, the same random weights each time, in training mode."""
        kind = getattr(transformers, self.kind)
        config = kind.config_class(**(self.config | (TINY[self.kind] if tiny else {})))
        torch.manual_seed(0)
        with device:
            model = kind._from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
        if self.checkpoints:
            model.gradient_checkpointing_enable()
        return model.train()

    def inputs(self, model: nn.Module, device: torch.device) -> dict[str, Tensor]:
        """Random inputs with labels, the same each time."""
        seed = torch.Generator().manual_seed(0)
        if self.unit == "images":
            size = model.config.image_size
            pixels = torch.randn(self.batch, 3, size, size, generator=seed)
            return dict(pixel_values=pixels.to(device, torch.bfloat16), labels=torch.zeros(self.batch, dtype=torch.long, device=device))
        tokens = torch.randint(3, model.config.get_text_config().vocab_size, (self.batch, self.length), generator=seed).to(device)
        return dict(input_ids=tokens, labels=tokens)

    def units(self) -> int:
        """How many tokens or images a step has; an encoder-decoder counts both sides."""
        return self.batch if self.unit == "images" else self.batch * self.length * (2 if self.is_t5() else 1)

    def is_t5(self) -> bool:
        return self.kind.startswith("T5")


@dataclass(frozen=True)
class Pairs(Model):
    """A stack of Pairformer blocks, of which a part of the residues is padding."""

    def build(self, device: torch.device, tiny: bool) -> nn.Module:
        """In bfloat16, the same random weights each time."""
        torch.manual_seed(0)
        with device:
            return Pairformer(1 if tiny else self.config["blocks"]).to(torch.bfloat16).train()

    def inputs(self, model: nn.Module, device: torch.device) -> dict[str, Tensor]:
        """Random representations, the same each time."""
        seed = torch.Generator().manual_seed(0)
        sizes = {"single": (self.batch, self.length, SINGLE_WIDTH), "pairs": (self.batch, self.length, self.length, PAIR_WIDTH)}
        found = {name: torch.randn(size, generator=seed).to(device, torch.bfloat16) for name, size in sizes.items()}
        kept = torch.arange(self.length) < self.length - self.length // 16
        return found | {"kept": kept.expand(self.batch, -1).to(device)}


T5_LARGE = dict(d_model=1024, d_kv=64, d_ff=2816, num_layers=24, num_heads=16, feed_forward_proj="gated-gelu", dropout_rate=0.0)
T5_LARGE |= dict(decoder_start_token_id=0, use_cache=False)
SWIN_BASE = dict(image_size=224, embed_dim=128, depths=[2, 2, 18, 2], num_heads=[4, 8, 16, 32], window_size=7, drop_path_rate=0.0)
LLAMA_1B = dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64)
LLAMA_1B |= dict(vocab_size=32000, max_position_embeddings=1 << 17)
DOGE = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=8, vocab_size=32768)
DOGE |= dict(keep_window_size=1024, max_position_embeddings=1 << 15)
GPT_OSS = dict(num_hidden_layers=4, num_local_experts=4, num_experts_per_tok=2)  # as published: its attention; fewer layers and experts
GEMMA3 = dict(hidden_size=2560, intermediate_size=10240, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=4, vocab_size=32000)
GEMMA3 |= dict(head_dim=256, sliding_window=1024)
TINY: dict[str, dict[str, Any]] = {
    "T5ForConditionalGeneration": dict(d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=64),
    "SwinForImageClassification": dict(image_size=28, embed_dim=16, depths=[2], num_heads=[4]),
    "LlamaForCausalLM": dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=64
    ),
    "DogeForCausalLM": dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=64
    )
    | dict(keep_window_size=8),
    "ModernBertForMaskedLM": dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
    | dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2),
    "GptOssForCausalLM": dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=64),
    "Gemma3ForCausalLM": dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    | dict(head_dim=8, sliding_window=8, vocab_size=64),
}
MODELS = (
    Model("t5_large_512", "T5ForConditionalGeneration", T5_LARGE, 16, 512),
    Model("t5_large_2048", "T5ForConditionalGeneration", T5_LARGE, 4, 2048),
    Model("t5_large_4096", "T5ForConditionalGeneration", T5_LARGE, 1, 4096),
    Model("t5_large_16384", "T5ForConditionalGeneration", T5_LARGE, 1, 16384),
    Model("t5_large_16384_checkpoints", "T5ForConditionalGeneration", T5_LARGE, 1, 16384, checkpoints=True),
    Model("t5_large_32768_checkpoints", "T5ForConditionalGeneration", T5_LARGE, 1, 32768, checkpoints=True),
    Model("swin_base_224", "SwinForImageClassification", SWIN_BASE, 128, 224, unit="images"),
    Model("llama_1b_2048", "LlamaForCausalLM", LLAMA_1B, 4, 2048, generates=True),
    Model("llama_1b_16384", "LlamaForCausalLM", LLAMA_1B, 1, 16384, generates=True),
    Model("doge_4096", "DogeForCausalLM", DOGE, 2, 4096, generates=True),
    Model("modernbert_base_8192", "ModernBertForMaskedLM", {}, 2, 8192),
    Model("gpt_oss_8192", "GptOssForCausalLM", GPT_OSS, 1, 8192),
    Model("gemma3_8192", "Gemma3ForCausalLM", GEMMA3, 1, 8192),
    Pairs("pairformer_384", "Pairformer", dict(blocks=48), 1, 384, unit="residues"),
    Pairs("pairformer_768", "Pairformer", dict(blocks=48), 1, 768, unit="residues"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and record; the exit code is 0 when ours ran everywhere with a loss near eager's or, without it, any other's."""
    options = _options(arguments)
    if options.plot is not None:
        plots.models(harness.read_json(options.json), [harness.read_json(each, "--beside") for each in options.beside], options.plot)
        return 0
    device = harness.device_for(options.device, options.tiny)
    where = {**harness.environment(device), "transformers": transformers.__version__, "dtype": "bf16"}
    print(harness.describe(where), flush=True)
    target = options.json or harness.result_file("transformers", device)
    end = time.monotonic() + options.seconds
    records: list[Record] = []
    with Apart() as process:
        for model in MODELS:
            if options.models and model.name not in options.models:
                continue
            chosen = replace(model, batch=2, length=32) if options.tiny else model
            records.append(
                {"model": model.name, "kind": model.kind, "batch": chosen.batch, "length": chosen.length, "unit": model.unit, "runs": {}}
            )
            for implementation in options.implementations:
                if implementation == PAIRS and not model.is_t5():
                    continue
                start = time.perf_counter()
                found: Record = {"training": {"error": "not reached in the time"}}
                if time.monotonic() < end:
                    found = run_apart(process, chosen, implementation, device, options.tiny)
                records[-1]["runs"][implementation] = found
                print(f"{model.name} {implementation}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
                if target is not None:
                    harness.write_json(target, {"environment": where, "models": records})
    show(records)
    if target is not None:
        print(target)
    return 0 if records and all(sound(record) for record in records) else 1


def run_apart(process: Apart, model: Model, implementation: str, device: torch.device, tiny: bool) -> Record:
    """The same as :func:`run`, on a GPU in another process."""
    if device.type != "cuda":
        return run(model, implementation, device, tiny)
    try:
        return process.call(_run, model, implementation, device, tiny)
    except RuntimeError as error:
        return {"training": {"error": harness.reason(error)}}


def _run(model: Model, implementation: str, device: torch.device, tiny: bool) -> tuple[Record, bool]:
    record = run(model, implementation, device, tiny)
    return record, harness.is_broken(device)


def run(model: Model, implementation: str, device: torch.device, tiny: bool) -> Record:
    """One model with one implementation; a failure is recorded under the step that it ended."""
    record: Record = {}
    step = "training"
    network: nn.Module | None = None
    try:
        network = model.build(device, tiny)
        _set(network, implementation)
        batch = model.inputs(network, device)
        held = _allocated(device)
        record["training"] = training(network, batch, model.units(), device)
        record["training"]["peak_bytes"] = None if held is None else torch.cuda.max_memory_allocated(device) - held
        step = "generation"
        if model.generates:
            network.zero_grad(set_to_none=True)
            record["generation"] = generation(network.eval(), batch["input_ids"], device)
    except Exception as error:
        record[step] = {"error": harness.reason(error)}
    del network
    harness.release(device)
    return record


def training(network: nn.Module, batch: dict[str, Tensor], units: int, device: torch.device) -> Record:
    """Loss of the first step, and units per second from the median of the others."""
    losses, seconds = [], []
    for i in range(STEPS + 2):
        if i == 1 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        network.zero_grad(set_to_none=True)
        start = _now(device)
        loss = network(**batch).loss
        loss.backward()
        seconds.append(_now(device) - start)
        losses.append(loss.item())
    return {"loss": losses[0], "seconds": statistics.median(seconds[2:]), "per_second": units / statistics.median(seconds[2:])}


@torch.inference_mode()
def generation(network: nn.Module, tokens: Tensor, device: torch.device) -> Record:
    """Seconds of the prompt, and milliseconds of each further token. After a long prompt each token has a cache of a length of its own."""

    def seconds(new_tokens: int, left_out: int) -> float:
        start = _now(device)
        network.generate(tokens[:1, left_out:], max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
        return _now(device) - start

    seconds(2, 0)
    prompts, each = [], []
    for turn in range(1, TURNS + 1):
        start = turn * min(NEW_TOKENS, tokens.shape[1] // (TURNS + 1))
        seconds(1, start)  # what a prompt of this length alone takes is known then
        prompts.append(seconds(1, start))
        each.append((seconds(1 + NEW_TOKENS, start) - prompts[-1]) / NEW_TOKENS * 1e3)
    return {"prompt_seconds": statistics.median(prompts), "token_ms": statistics.median(each)}


def sound(record: Record) -> bool:
    """Whether ours ran, and its loss is that of another implementation but for roundings."""
    ours = record["runs"].get(OURS, {})
    others = (run.get("training", {}) for name, run in record["runs"].items() if name not in (OURS, PAIRS))
    losses = [training["loss"] for training in others if "loss" in training]
    if any("error" in step for step in ours.values()) or "loss" not in ours.get("training", {}):
        return False
    return not losses or min(abs(ours["training"]["loss"] - loss) for loss in losses) <= 0.02 * abs(ours["training"]["loss"])


def show(records: Sequence[Record]) -> None:
    """Print a table of training, one of generation, and why an implementation is missing."""
    rows, generated = [], []
    for record in records:
        for name, run in record["runs"].items():
            step = run.get("training", {})
            ratio = _ratio(record, name, lambda found: found["training"]["per_second"])
            memory = None if step.get("peak_bytes") is None else f"{step['peak_bytes'] / 2**30:.2f}"
            if "loss" in step:
                rows.append([record["model"], name, f"{step['per_second']:,.0f}", ratio, memory or "-", f"{step['loss']:.4f}"])
            made = run.get("generation", {})
            if "token_ms" in made:
                generated.append([record["model"], name, f"{made['prompt_seconds']:.3f}", f"{made['token_ms']:.2f}"])
            for what, found in run.items():
                if "error" in found:
                    print(f"{record['model']} {name} {what}: {found['error']}")
    show_table(
        ("model", "attention", "tokens, images or residues / s", f"{OURS} is faster", "peak GiB", "first loss"), rows, "Training step, bf16"
    )
    if generated:
        show_table(("model", "attention", "prompt s", "ms a token"), generated, f"Generation, batch 1, {NEW_TOKENS} tokens")


def _set(network: nn.Module, implementation: str) -> None:
    """In every model inside, too: before Transformers 5.23 its own method leaves the encoder and the decoder of a T5 as they were."""
    if isinstance(network, Pairformer):
        network.implementation = implementation
        return
    if implementation in (OURS, PAIRS):
        (doge if isinstance(network, transformers.DogeForCausalLM) else integration).enable(network)
        if implementation == PAIRS:
            make_biases()  # until the next model is enabled
        return
    models = [module for module in network.modules() if isinstance(module, transformers.PreTrainedModel)]
    for inner in models:
        inner.set_attn_implementation(implementation)
    if any(inner.config._attn_implementation != implementation for inner in models):
        raise ValueError(f"{type(network).__name__} does not take {implementation}")


def _ratio(record: Record, name: str, of: Callable[[Record], float]) -> str:
    try:
        return f"{of(record['runs'][OURS]) / of(record['runs'][name]):.2f}x"
    except KeyError:
        return "-"


def _allocated(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [model.name for model in MODELS]
    parser = argparse.ArgumentParser(description="Models of Transformers, trained and generating with each attention implementation.")
    parser.add_argument("--models", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}; by default all")
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=IMPLEMENTATIONS, metavar="NAME", help="by default all")
    parser.add_argument("--device", help="cpu, cuda or cuda:N; by default the GPU where there is one")
    parser.add_argument("--tiny", action="store_true", help="small models, for trying the code, on a CPU too")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no further implementation of a model after so many")
    parser.add_argument("--json", type=Path, metavar="FILE", help="by default benchmarks/results/transformers_<GPU>.json, and none on a CPU")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the plot of the --json file instead of measuring")
    beside = "with --plot: further result files, whose models are drawn instead of those of their names"
    parser.add_argument("--beside", nargs="+", type=Path, default=(), metavar="FILE", help=beside)
    options = parser.parse_args(arguments)
    if options.plot is not None and (options.json is None or not options.json.exists()):
        parser.error("--plot draws what a result file holds: expected --json FILE of an earlier run")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
