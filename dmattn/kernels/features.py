"""The features of calls (:class:`.traits.Traits`) in the sets by which rows of the table say which ones they understand."""

from .traits import LEADING, LEADING_IN_RUNS, PARTIAL

MASKS = frozenset({"mask of pairs", "mask of keys", "mask of queries", "mask of heads", "block mask"})
PAIRWISE = frozenset({"mask of pairs", "block mask"})
BIASES = frozenset({"bias of pairs", "bias of keys", "bias of queries", "bias of heads"})
DISTANCES = frozenset({"bias of distances"})
INTERVALS = frozenset({"intervals", "intervals by head", "order"})
WINDOW = frozenset({"window"})
PAIR_BIAS = frozenset({"bias of pairs"})
SOFTCAP = frozenset({"softcap"})
SINKS = frozenset({"sinks"})
SHARED = frozenset({LEADING})
FURTHER = frozenset({PARTIAL})
EVERY = SINKS | SHARED | FURTHER  # features that rows serve, but those that sum what they are given over the keys of the call
PACKED = frozenset({"packed sequences"})
ALL = MASKS | BIASES | DISTANCES | INTERVALS | WINDOW | EVERY | PACKED | {"two intervals", LEADING_IN_RUNS, "dropout"} | SOFTCAP

_AXES = {"pairs": "(..., Sq, Sk)", "keys": "(..., 1, Sk)", "queries": "(..., Sq, 1)", "heads": "(..., 1, 1)"}
_NAMED = {f"{name} of {of}": f"a {name} {axes}" for name in ("mask", "bias") for of, axes in _AXES.items()}
_NAMED |= {"block mask": "a BlockMask", "bias of distances": "a RelativeBias", "window": "causal or window", "order": "keys in another order"}
_NAMED |= {"intervals": "an IntervalMask", "two intervals": "two intervals a key"}
_NAMED |= {"intervals by head": "intervals that differ among heads that share keys"}


def named_feature(feature: str) -> str:
    """A feature in words for who makes the call."""
    return _NAMED.get(feature, feature)


def named_family(family: str) -> str:
    """A family of GPUs, in the same way."""
    return {"hip": "AMD's GPUs"}.get(family, family)
