"""Problems of every op, each of which judges itself by the rule of dmattn.equivalence against float64.

:func:`code` writes one down as Python that judges it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dmattn import FactoredBias, attention, attention_varlen, dynamic_mask_attention, merge_attention, reference
from dmattn.equivalence import Case, Inputs, Standard, Verdict, judge, plain, results, term_sizes, truth

Sides = tuple[int | None, int | None]
Prepared = Callable[[], dict[str, Tensor]]
PLAIN: dict[str, Any] = dict(causal=False, window=None, scale=None, softcap=None)  # options of a problem without any


@dataclass(frozen=True)
class AttentionProblem:
    """`attention`. With `reads_lse` its lse gets an incoming gradient too, which no training without a use of lse has."""

    case: Case
    reads_lse: bool = True

    def prepared(self, dtype: torch.dtype, device: str, seed: int) -> Prepared:
        """The call on tensors of this seed, with all gradients."""
        inputs = self._inputs(dtype, device, seed)
        function = attention if self.reads_lse else _without_lse_gradient
        return lambda: results(function, inputs, self.case.options)

    def verdicts(self, dtype: torch.dtype, device: str, seed: int) -> list[Verdict]:
        """One for each result and gradient."""
        standard = Standard.of(self._inputs(dtype, device, seed), self.case.options)
        return judge(self.prepared(dtype, device, seed)(), standard)

    def _inputs(self, dtype: torch.dtype, device: str, seed: int) -> Inputs:
        inputs = self.case.inputs(dtype, device, seed)
        return inputs if self.reads_lse else replace(inputs, d_lse=torch.zeros_like(inputs.d_lse))


@dataclass(frozen=True)
class MergeProblem:
    """`merge_attention` of `attention` over the keys before and after each of `cuts`, beside attention over all of them."""

    case: Case
    cuts: tuple[int, ...]

    def prepared(self, dtype: torch.dtype, device: str, seed: int) -> Prepared:
        """The calls on tensors of this seed, with all gradients."""
        inputs = self.case.inputs(dtype, device, seed)
        return lambda: results(self._merged(attention, merge_attention), inputs, self.case.options)

    def verdicts(self, dtype: torch.dtype, device: str, seed: int) -> list[Verdict]:
        """One for each result and gradient. Plain PyTorch has the same shares."""
        inputs, options = self.case.inputs(dtype, device, seed), self.case.options
        usual = results(self._merged(reference.attention, _plain_merge), inputs, options)
        standard = Standard(truth(inputs, options), usual, term_sizes(inputs, options))
        return judge(self.prepared(dtype, device, seed)(), standard)

    def _merged(self, function: Callable[..., Any], merge: Callable[..., Any]) -> Callable[..., Any]:
        def merged(query: Tensor, key: Tensor, value: Tensor, *, mask: Any, bias: Any, sinks: Tensor | None = None, **options: Any) -> Any:
            ends = (0, *self.cuts, key.shape[-2])
            shares = []
            for number, (begin, end) in enumerate(pairwise(ends)):
                keys = slice(begin, end)
                of_pairs = dict(mask=_columns(mask, keys), bias=_columns(bias, keys), sinks=sinks if number == 0 else None)
                shares.append(function(query, key[..., keys, :], value[..., keys, :], **of_pairs, **options))
            return merge(*zip(*shares, strict=True))

        return merged


@dataclass(frozen=True)
class DynamicProblem:
    """`dynamic_mask_attention`, beside attention with its mask written out. The bias of `case` is by key and key-value head."""

    case: Case
    keep: int
    causal: bool
    has_padding: bool

    def prepared(self, dtype: torch.dtype, device: str, seed: int) -> Prepared:
        """The call on tensors of this seed, with all gradients."""
        inputs, valid = self.case.inputs(dtype, device, seed), self._valid(device, seed)

        def dynamic(query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor, sinks: Tensor | None = None, **_: Any) -> Any:
            given = dict(keep=self.keep, causal=self.causal, key_padding_mask=valid, scale=self.case.scale, sinks=sinks)
            return dynamic_mask_attention(query, key, value, bias[:, :, 0], **given, return_lse=True)

        return lambda: results(dynamic, inputs, {})

    def verdicts(self, dtype: torch.dtype, device: str, seed: int) -> list[Verdict]:
        """One for each result and gradient."""
        inputs, valid = self.case.inputs(dtype, device, seed), self._valid(device, seed)
        assert inputs.bias is not None
        seen = dict(len_q=self.case.len_q, causal=self.causal, valid=None if valid is None else valid[:, None])
        kept = reference.dynamic_mask(inputs.bias[:, :, 0], self.keep, **seen)
        return judge(self.prepared(dtype, device, seed)(), Standard.of(replace(inputs, mask=kept), PLAIN | dict(scale=self.case.scale)))

    def _valid(self, device: str, seed: int) -> Tensor | None:
        """(B, Sk), True for a key that is no padding."""
        if not self.has_padding:
            return None
        chance = torch.Generator().manual_seed(seed)
        return (torch.rand((self.case.batch, self.case.sizes["k"]), generator=chance) < 0.8).to(device)


@dataclass(frozen=True)
class PackedProblem:
    """`attention_varlen`, beside a batch of padded sequences. `case` is that batch, and an entry of it as long as told by the lengths.

    Its mask and bias are those of the packed sequences. Beside a table of distances sequences lie at the end of the padded axes, and else at
    their beginning, so that positions are as in the sequence alone.
    """

    case: Case
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]

    def prepared(self, dtype: torch.dtype, device: str, seed: int) -> Prepared:
        """The call on tensors of this seed, with all gradients; tensors are packed and results padded in it."""
        inputs, real_q, real_k = self._inputs(dtype, device, seed)
        return lambda: results(self._packed(real_q, real_k), inputs, self.case.options)

    def verdicts(self, dtype: torch.dtype, device: str, seed: int) -> list[Verdict]:
        """One for each result and gradient, in the padded layout."""
        inputs, real_q, real_k = self._inputs(dtype, device, seed)
        visible, rules = self._visible(real_q, real_k), self.case.options | dict(causal=False, window=None)
        wide = replace(inputs, mask=visible if inputs.mask is None else visible & inputs.mask)
        sets = [self.prepared(dtype, device, seed)(), truth(wide, rules), plain(wide, rules)]
        for each in sets:  # a row of padding has no result
            each["lse"] = each["lse"].masked_fill(~real_q[:, None], 0.0)
            each["out"] = each["out"].masked_fill(~real_q[:, None, :, None], 0.0)
        return judge(sets[0], Standard(sets[1], sets[2], term_sizes(wide, rules)))

    def _inputs(self, dtype: torch.dtype, device: str, seed: int) -> tuple[Inputs, Tensor, Tensor]:
        """Padded tensors, without a gradient at padding; and which places of queries and of keys are tokens."""
        inputs = self.case.inputs(dtype, device, seed)
        real_q, real_k = (self._real(*of, device) for of in ((self.lengths_q, self.case.sizes["q"]), (self.lengths_k, self.case.sizes["k"])))
        return replace(inputs, d_out=inputs.d_out * real_q[:, None, :, None], d_lse=inputs.d_lse * real_q[:, None]), real_q, real_k

    def _real(self, lengths: tuple[int, ...], longest: int, device: str) -> Tensor:
        """(sequences, longest), True at a token."""
        counts, place = torch.tensor(lengths, device=device)[:, None], torch.arange(longest, device=device)
        return place >= longest - counts if self._at_the_end else place < counts

    @property
    def _at_the_end(self) -> bool:
        return self.case.table_zero is not None

    def _visible(self, real_q: Tensor, real_k: Tensor) -> Tensor:
        """(sequences, 1, longest, longest): pairs of tokens that causal and the window leave, by distances from each sequence's last."""

        def from_last(real: Tensor) -> Tensor:
            place = torch.arange(real.shape[1], device=real.device)
            return place - (real.shape[1] if self._at_the_end else real.sum(1, keepdim=True))

        distance = from_last(real_k)[..., None, :] - from_last(real_q)[..., :, None]
        left, right = _sides(self.case.window)
        visible = real_q[:, :, None] & real_k[:, None, :]
        if left is not None:
            visible = visible & (distance >= -left)
        right = 0 if self.case.causal and (right is None or right > 0) else right
        if right is not None:
            visible = visible & (distance <= right)
        return visible[:, None]

    def _packed(self, real_q: Tensor, real_k: Tensor) -> Callable[..., Any]:
        """`attention_varlen` of the tokens of padded tensors, with padded results."""
        ends_q, ends_k = (torch.tensor([0, *lengths], device=real_q.device).cumsum(0).int() for lengths in (self.lengths_q, self.lengths_k))
        longest = dict(max_seqlen_q=real_q.shape[1], max_seqlen_k=real_k.shape[1])

        def tokens(x: Tensor, real: Tensor) -> Tensor:
            return x.transpose(1, 2)[real]

        def padded(x: Tensor) -> Tensor:
            return x.new_zeros((*real_q.shape, *x.shape[1:])).index_put(real_q.nonzero(as_tuple=True), x)

        def packed(query: Tensor, key: Tensor, value: Tensor, *, bias: Any, **options: Any) -> tuple[Tensor, Tensor]:
            if isinstance(bias, FactoredBias):
                bias = FactoredBias(tokens(bias.rows, real_q), tokens(bias.cols, real_k))
            given = (tokens(query, real_q), tokens(key, real_k), tokens(value, real_k))
            out, lse = attention_varlen(*given, ends_q, ends_k, bias=bias, **longest, **options)
            return padded(out).transpose(1, 2), padded(lse.mT).transpose(1, 2)

        return packed


Problem = AttentionProblem | MergeProblem | DynamicProblem | PackedProblem


def code(problem: Problem, dtype: torch.dtype, device: str, seed: int) -> str:
    """Python that judges the problem again."""
    names = f"from benchmarks.prove.problems import {type(problem).__name__}\nfrom dmattn.equivalence import Case"
    return f"import torch\n{names}\nprint(*{_constructor(problem)}.verdicts({dtype}, {device!r}, {seed}), sep='\\n')"


def _constructor(x: Any) -> str:
    """A dataclass as code, without what is as by default."""
    if not is_dataclass(x):
        return repr(x)
    given = {each.name: getattr(x, each.name) for each in fields(x) if getattr(x, each.name) != each.default}
    return f"{type(x).__name__}({', '.join(f'{name}={_constructor(value)}' for name, value in given.items())})"


def _without_lse_gradient(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """`attention` whose lse leads back to nothing."""
    out, lse = attention(*tensors, **options)
    return out, lse.detach().requires_grad_()


def _columns(x: Tensor | None, keys: slice) -> Tensor | None:
    """Those keys of a mask or bias of pairs, which may be shared by all keys."""
    return x if x is None or x.shape[-1] == 1 else x[..., keys]


def _plain_merge(outs: tuple[Tensor, ...], lses: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The formula of `merge_attention` in the tensors' own dtype."""
    stacked = torch.stack(lses)
    empty = (stacked == float("-inf")).all(0)
    stacked = stacked.masked_fill(empty, 0.0)
    out = (torch.stack(outs) * torch.softmax(stacked, 0)[..., None]).sum(0)
    return out.masked_fill(empty[..., None], 0.0), stacked.logsumexp(0).masked_fill(empty, float("-inf"))


def _sides(window: Any) -> Sides:
    return window if isinstance(window, tuple) else (window, window)
