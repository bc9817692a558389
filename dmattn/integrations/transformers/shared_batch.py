"""Models whose sequences ranks share: whole batches in, of which each rank computes its share, and the loss of the whole out."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from ...arguments import kind
from ...checks import check_tensor
from ...distributed import shard, unshard
from ...distributed.shares import CONTIGUOUS, parts
from ...graphs import left_out_of_graphs
from .bucket_tables import describe_biases, forget_name
from .shared_attention import Sharing

__all__ = ["SharedModel"]

# Models in which no layer but attention reads another token, and which take places or distances in the whole sequence.
_DECODERS = (
    "Gemma2ForCausalLM",
    "GptOssForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
_ENCODER_DECODERS = ("MT5ForConditionalGeneration", "T5ForConditionalGeneration", "UMT5ForConditionalGeneration")
_OF_TOKENS = ("input_ids", "inputs_embeds", "position_ids", "decoder_input_ids", "decoder_inputs_embeds")  # (B, S, ...)
_PADDING = ("attention_mask", "decoder_attention_mask")  # (B, S)
_OF_ALL = ("cu_seq_lens_q", "cu_seq_lens_k", "num_items_in_batch")
_UNSUPPORTED = ("past_key_values", "encoder_outputs", "use_cache", "logits_to_keep", "output_router_logits")
_OF_CONFIGURATIONS = ("output_router_logits", "return_dict")  # which say it where a call does not
_STRETCHING = frozenset({"dynamic", "longrope"})  # rotary embeddings that go by the largest place that they are given
_IGNORED = -100  # the label that no loss counts
_ASKED = ("attention_dropout", "dropout_rate", "dropout", "sliding_window", "output_attentions")  # of configurations, by layers


class SharedModel:
    """A model, from when ranks begin to share its sequences until :meth:`end`. Its configurations are to be set to `name`."""

    def __init__(self, model: nn.Module, sharing: Sharing, name: str) -> None:
        models = _models(model)
        outermost = type(models[0] if models else model)
        kinds = {kind.__name__ for kind in outermost.__mro__ if kind.__module__.startswith("transformers.models.")}
        if kinds.isdisjoint((*_DECODERS, *_ENCODER_DECODERS)):
            expected = f"a model whose sequences ranks can share: {', '.join((*_DECODERS, *_ENCODER_DECODERS))}"
            raise ValueError(f"dmattn: model: expected {expected}, received {outermost.__name__}")
        stretching = _STRETCHING.intersection(_rope_types(getattr(models[0].config, "rope_parameters", None)))
        if stretching:
            expected = "rotary embeddings that do not depend on the length, of which a rank has its share"
            raise ValueError(f"dmattn: model: expected {expected}, received rope_type {sorted(stretching)[0]!r}")
        self.sharing, self.name = sharing, name
        self._configs: list[PreTrainedConfig] = [each.config for each in models]
        self._decodes_alone = kinds.isdisjoint(_ENCODER_DECODERS)
        self._positional = tuple(inspect.signature(model.forward).parameters)
        self._parameters = inspect.signature(models[0].forward).parameters
        self._weight: Tensor | None = None
        AttentionInterface.register(name, sharing.attend)
        AttentionMaskInterface.register(name, sharing.make_mask)
        describe_biases(name, is_shared=True)
        self._hooks = (
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        )

    def end(self) -> None:
        """The model takes and gives what it did before."""
        for hook in self._hooks:
            hook.remove()
        AttentionInterface._global_mapping.pop(self.name, None)
        AttentionMaskInterface._global_mapping.pop(self.name, None)
        forget_name(self.name)

    @left_out_of_graphs("it waits for other processes")
    def _before(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The arguments of this rank."""

        def prepare() -> tuple[dict[str, Any], Mapping[str, object]]:
            batch = {name: x for name, x in (dict(zip(self._positional, args, strict=False)) | kwargs).items() if x is not None}
            self._check(batch)
            return batch, self._modes(model) | {name: _seen(x) for name, x in sorted(batch.items())}

        batch = self.sharing.ranks.agree(prepare)
        if "use_cache" in self._parameters:
            batch["use_cache"] = False
        labels = batch.pop("labels", None)
        if labels is not None:
            self._share_labels(model, batch, labels)
        for name in _PADDING:
            if name in batch and bool((batch[name] != 0).all()):
                del batch[name]
        if "position_ids" in self._parameters and "position_ids" not in batch:
            tokens = batch["input_ids" if "input_ids" in batch else "inputs_embeds"]
            batch["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device)[None]
        batch |= {name: self._share(batch[name]) for name in (*_OF_TOKENS, *_PADDING) if name in batch}
        self.sharing.is_in_a_call = True
        return (), batch

    @left_out_of_graphs("it waits for other processes")
    def _after(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """The output with the loss of all ranks, which each of them has."""
        self.sharing.is_in_a_call = False
        loss = output.loss if isinstance(output, ModelOutput) and "loss" in output else None
        if loss is not None:
            if self._weight is not None:  # a rank without a label has no mean
                loss = torch.where(self._weight > 0, loss, 0.0) * self._weight
            output.loss = unshard(loss[None], 0, group=self.sharing.ranks.group, order=CONTIGUOUS).sum()
        return output

    def _share_labels(self, model: nn.Module, batch: dict[str, Any], labels: Tensor) -> None:
        """Labels of this rank's tokens, shifted while all are here, such that the shares of the loss sum to it."""
        if self._decodes_alone:
            shifted = torch.nn.functional.pad(labels, (0, 1), value=_IGNORED)[:, 1:]
            batch.setdefault("num_items_in_batch", (shifted != _IGNORED).sum())
            batch["labels"] = batch["shift_labels"] = self._share(shifted)
            return
        if "decoder_input_ids" not in batch and "decoder_inputs_embeds" not in batch:
            batch["decoder_input_ids"] = _models(model)[0]._shift_right(labels)
        batch["labels"] = self._share(labels)
        self._weight = (batch["labels"] != _IGNORED).sum() / (labels != _IGNORED).sum()

    def _modes(self, model: nn.Module) -> dict[str, object]:
        """What decides, besides the arguments, whether a layer refuses a call: it does so without the other ranks."""
        modules = [module.training for module in model.modules()]
        asked = {name: [getattr(config, name, None) for config in self._configs] for name in _ASKED}
        return {"training": f"{sum(modules)} of {len(modules)} modules", **asked}

    def _share(self, x: Tensor) -> Tensor:
        return shard(x, 1, group=self.sharing.ranks.group, order=self.sharing.order)

    def _check(self, batch: dict[str, Any]) -> None:
        """Raise unless each argument is one that is understood."""
        changed = [config for config in self._configs if config._attn_implementation != self.name]
        if changed:
            received = changed[0]._attn_implementation
            raise ValueError(f"dmattn: attn_implementation: expected what enable() set, {self.name!r}, until disable(), received {received!r}")
        asked = {name: getattr(self._configs[0], name, None) for name in _OF_CONFIGURATIONS} | batch
        for name in _UNSUPPORTED:
            given = asked.get(name)
            if given is not None and (isinstance(given, Tensor) or given):
                raise ValueError(f"dmattn: {name}: expected none where ranks share a sequence, received {type(given).__name__}")
        if asked.get("return_dict") is False:
            raise ValueError("dmattn: return_dict: expected True where ranks share a sequence, received False")
        packed = "cu_seq_lens_q" in batch or "cu_seq_lens_k" in batch
        if packed and not self._decodes_alone:
            raise ValueError("dmattn: cu_seq_lens_q: expected none in an encoder-decoder, received cumulative lengths")
        order, size = self.sharing.order, self.sharing.ranks.size
        unit, unit_of = parts(order, size), f"{size} ranks in {order} order"
        for name, x in batch.items():
            shared = name in (*_OF_TOKENS, *_PADDING, "labels")
            if shared:
                check_tensor(name, x)
            elif not isinstance(x, Tensor) or name in _OF_ALL:
                continue
            else:
                raise ValueError(f"dmattn: {name}: expected no such tensor where ranks share a sequence, received shape {tuple(x.shape)}")
            axes = 3 if name.endswith("embeds") else 2
            if x.ndim != axes or x.shape[1] % unit:
                expected = f"{axes} axes, the second of a length that {unit} divides, for {unit_of}"
                raise ValueError(f"dmattn: {name}: expected {expected}, received shape {tuple(x.shape)}")
        padded = "attention_mask" in batch and not bool((batch["attention_mask"] != 0).all())
        if packed and padded:
            raise ValueError("dmattn: attention_mask: expected none beside cu_seq_lens_q where ranks share a sequence, received padding")
        places = batch.get("position_ids")
        if places is not None and not packed and "attention_mask" not in batch and bool((places.diff(dim=1) != 1).any()):
            expected = (
                "places that rise by one, or cu_seq_lens_q and cu_seq_lens_k beside those of packed documents, where ranks share a sequence"
            )
            raise ValueError(f"dmattn: position_ids: expected {expected}, received others")


def _models(model: nn.Module) -> list[PreTrainedModel]:
    """Those of Transformers in a model, the outermost first, which may be inside what wraps it, as adapters do."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def _rope_types(parameters: Any) -> Iterator[str]:
    """Those of a configuration, which has parameters for all layers or for each type of them."""
    for name, value in parameters.items() if isinstance(parameters, dict) else ():
        if isinstance(value, dict):
            yield from _rope_types(value)
        elif name == "rope_type":
            yield value


def _seen(x: Any) -> str:
    """What ranks have to agree about an argument. Of integers that is what they hold, too: a sampler may have given ranks other batches."""
    if not isinstance(x, Tensor):
        return repr(x) if isinstance(x, (bool, int, float, str)) else kind(x)
    held = ""
    if not x.is_floating_point() and x.numel():
        mixed = (x.detach().flatten().long() + 1) * torch.arange(1, x.numel() + 1, device=x.device)
        held = f" that holds {(mixed ^ (mixed >> 7)).sum().item()}"
    return f"shape {tuple(x.shape)} of {x.dtype}{held}"
