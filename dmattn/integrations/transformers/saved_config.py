"""The config.json of a converted model: no model of Transformers can be built from it but by loading.py, which builds a converted one.

Beside `dynamic_mask` it holds ::

    "model_type": "dmattn_dynamic_mask"                an auto class knows it from loading.py alone
    "dynamic_mask_of": "llama"                         the model type itself
    "attn_implementation", "experts_implementation"    a name that there is not, for which every model class refuses to be built

In memory a configuration is what it was: its class becomes a subclass of the same name that differs in what it writes and reads.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from transformers import PreTrainedConfig

__all__ = ["MODEL_TYPE", "mark", "marked_class", "original_type", "unmark"]

MODEL_TYPE = "dmattn_dynamic_mask"
_ORIGINAL = "dynamic_mask_of"
_REFUSED = ("attn_implementation", "experts_implementation")  # arguments of from_pretrained replace what the file says, hardly ever both
_HINT = "of a model with dynamic masks: import dmattn.integrations.transformers and load it by an auto class or load_dynamic_mask"


def mark(config: PreTrainedConfig) -> None:
    """Let `config` be saved as a converted model's."""
    kind: Any = type(config)
    config.__class__ = marked_class(kind)


def unmark(config: PreTrainedConfig) -> None:
    """The reverse of :func:`mark`."""
    if _is_marked(type(config)):
        config.__class__ = type(config).__mro__[1]


@cache
def marked_class(kind: Any) -> Any:
    """The class of marked configurations, for a class of configurations."""
    if _is_marked(kind):
        return kind

    def to_json_string(self: Any, *args: Any, **options: Any) -> str:
        saved = json.loads(kind.to_json_string(self, *args, **options))
        saved |= {_ORIGINAL: saved["model_type"], "model_type": MODEL_TYPE} | dict.fromkeys(_REFUSED, _HINT)
        return json.dumps(saved, indent=2, sort_keys=True) + "\n"

    def get_config_dict(cls: Any, *args: Any, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        saved, unused = kind.get_config_dict(*args, **options)
        return _without_mark(saved), unused

    def from_dict(cls: Any, config_dict: dict[str, Any], **options: Any) -> Any:
        result = kind.from_dict(_without_mark(config_dict), **options)
        mark(result[0] if isinstance(result, tuple) else result)
        return result

    def reduce(self: Any, protocol: Any) -> tuple:
        return _rebuilt, (kind, vars(self).copy())

    methods = dict(to_json_string=to_json_string, get_config_dict=classmethod(get_config_dict), from_dict=classmethod(from_dict))
    names = dict(__module__=kind.__module__, __qualname__=kind.__qualname__, __reduce_ex__=reduce, _dmattn_marked=True)
    return type(kind.__name__, (kind,), methods | names)


def original_type(saved: dict[str, Any]) -> str:
    """The model type of what a marked configuration wrote."""
    return saved[_ORIGINAL]


def _is_marked(kind: type) -> bool:
    return "_dmattn_marked" in vars(kind)


def _without_mark(saved: dict[str, Any]) -> dict[str, Any]:
    if saved.get("model_type") != MODEL_TYPE:
        return saved
    rest = {name: value for name, value in saved.items() if name != _ORIGINAL and not (name in _REFUSED and value == _HINT)}
    return rest | {"model_type": saved[_ORIGINAL]}


def _rebuilt(kind: Any, state: dict[str, Any]) -> Any:
    config = object.__new__(marked_class(kind))
    vars(config).update(state)
    return config
