"""The features of calls (:class:`.traits.Traits`) in the sets by which rows of the table say which ones they understand."""

from .traits import LEADING, LEADING_IN_RUNS, PARTIAL

MASKS = frozenset({"mask of pairs", "mask of keys", "mask of queries", "mask of heads", "block mask"})
BIASES = frozenset({"bias of pairs", "bias of keys", "bias of queries", "bias of heads"})
DISTANCES = frozenset({"bias of distances"})
INTERVALS = frozenset({"intervals", "intervals by head", "order"})
WINDOW = frozenset({"window"})
PAIR_BIAS = frozenset({"bias of pairs"})
SINKS = frozenset({"sinks"})
SHARED = frozenset({LEADING})
FURTHER = frozenset({PARTIAL})
EVERY = SINKS | SHARED | FURTHER  # features that rows serve, but those that sum what they are given over the keys of the call
PACKED = frozenset({"packed sequences"})
ALL = MASKS | BIASES | DISTANCES | INTERVALS | WINDOW | EVERY | PACKED | {"two intervals", LEADING_IN_RUNS, "softcap", "dropout"}
