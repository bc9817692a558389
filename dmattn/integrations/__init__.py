"""Ways into other libraries. Each module imports its library; importing dmattn imports none of them."""

from typing import TYPE_CHECKING

from ..absent import refusing

__all__ = ["diffusers", "doge", "transformers"]

if not TYPE_CHECKING:  # type checkers know all names, and would take any beside a __getattr__
    __getattr__ = refusing(__name__)
