"""Attention layers of Transformers that never reach its attention interface, computed by :func:`dmattn.attention`.

Each function is a method that :func:`dmattn.integrations.transformers.patch` gives to one class of layers: it takes what that layer takes, uses
its projections, and returns what it returns, with None for the attention weights. Its docstring has the score s_ij of query i and key j in head
h, before the mask; d is the head dim, m_h the slopes of ALiBi, Delta_ij the offset between two places in a window or an image.

Every parameter in a score gets its gradient. A bias that is constant along an axis is passed with that axis broadcast: ALiBi as (B, H, 1, K),
tables as (1, H, Q, K). A mask is bool; a float mask of the caller's own is a bias, added to the other in float32.
"""

from __future__ import annotations

from torch import nn

from . import bart, bert, biased, decoders, vision
from .shared import Family

__all__ = ["FAMILIES", "Family", "family_of"]

# By the module and the name of the class, as importing the models takes seconds.
FAMILIES: dict[str, Family] = decoders.FAMILIES | bert.FAMILIES | bart.FAMILIES | biased.FAMILIES | vision.FAMILIES


def family_of(kind: type[nn.Module]) -> Family | None:
    """The family of a class of layers; None where there is none."""
    return FAMILIES.get(f"{kind.__module__}.{kind.__name__}".removeprefix("transformers.models."))
