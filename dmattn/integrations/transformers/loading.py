"""Loading a converted model: by :func:`load_dynamic_mask`, or by an auto class of Transformers once this module is imported."""

from __future__ import annotations

from functools import cache
from typing import Any

from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .conversion import convert_as_configured
from .saved_config import MODEL_TYPE, marked_class, original_type

__all__ = ["load_dynamic_mask"]


def load_dynamic_mask(kind: Any, path: Any, **settings: Any) -> Any:
    """A converted model that ``save_pretrained`` wrote, with the weights of its dynamic masks.

    ``kind.from_pretrained(path, **settings)`` in every respect (`dtype`, `device_map`, sharded files, the Hub, ...) but that the model is
    converted while it is built, as its configuration says. An auto class does the same by itself once dmattn.integrations.transformers is
    imported; a model class refuses such a path, as does Transformers without that import.

    Args:
        kind: a model class of Transformers or one of its auto classes, such as AutoModelForCausalLM.
        path: a folder or the name of a repository on the Hub.
        settings: arguments of ``from_pretrained``. `attn_implementation` is what :func:`revert_dynamic_mask` returns to.

    Returns:
        A model of the class that ``kind.from_pretrained`` returns; with ``output_loading_info=True`` a tuple of it and the information.

    Raises:
        TypeError: `kind` is no such class.
        ValueError: the saved model is not a converted one, or its files lack weights of its dynamic masks.
    """
    if not isinstance(kind, type) or not (issubclass(kind, PreTrainedModel) or hasattr(kind, "_model_mapping")):
        received = kind.__name__ if isinstance(kind, type) else type(kind).__name__
        raise TypeError(f"dmattn: kind: expected a model class or an auto class of Transformers, received {received}")
    architecture: Any = kind if issubclass(kind, PreTrainedModel) else _architecture(kind, path, settings)
    return _converting(architecture).from_pretrained(path, **settings)


@cache
def _converting(architecture: Any) -> Any:
    """A subclass of a model class whose models are converted while they are built, and of `architecture` from then on."""
    if "_dmattn_converts" in vars(architecture):
        return architecture

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        architecture.__init__(self, *args, **kwargs)
        convert_as_configured(self)
        self.__class__ = architecture

    def from_pretrained(cls: Any, path: Any, *args: Any, output_loading_info: bool = False, **settings: Any) -> Any:
        model, information = architecture.from_pretrained.__func__(cls, path, *args, output_loading_info=True, **settings)
        missing = sorted(name for name in information["missing_keys"] if "dynamic_mask." in name)
        if missing:
            raise ValueError(
                f"dmattn: path: expected files with all weights of the dynamic masks, received {path} without {', '.join(missing)}"
            )
        return (model, information) if output_loading_info else model

    # Of the same name, as Transformers keeps facts about a class by its name and writes it into the configuration.
    names = dict(
        __module__=architecture.__module__, __qualname__=architecture.__qualname__, config_class=marked_class(architecture.config_class)
    )
    methods = dict(__init__=build, from_pretrained=classmethod(from_pretrained), _dmattn_converts=True)
    return type(architecture.__name__, (architecture,), names | methods)


class DynamicMaskConfig(PreTrainedConfig):
    """What Transformers' auto classes read a converted model's config.json by: it makes the configuration of the model type itself."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        kind = CONFIG_MAPPING[original_type(config_dict)]
        _register_models(kind)
        return marked_class(kind).from_dict(config_dict, **options)


@cache
def _register_models(kind: Any) -> None:
    """Let auto classes take converting classes for marked configurations of class `kind`, of the model classes that they have for it."""
    autos: list[Any] = [x for x in vars(modeling_auto).values() if isinstance(x, type) and getattr(x, "_model_mapping", None) is not None]
    for auto in autos:
        if kind in auto._model_mapping:
            models = auto._model_mapping[kind]
            chosen = tuple(map(_converting, models)) if isinstance(models, (list, tuple)) else _converting(models)
            auto._model_mapping._extra_content[marked_class(kind)] = chosen  # register() of 5.17 ignores classes named as Transformers' own


AutoConfig.register(MODEL_TYPE, DynamicMaskConfig)


def _architecture(auto: Any, path: Any, settings: dict[str, Any]) -> type[PreTrainedModel]:
    """The class that an auto class loads a path as."""
    config = settings.get("config")
    if not isinstance(config, PreTrainedConfig):
        others = {name: value for name, value in settings.items() if name not in ("config", "dtype", "torch_dtype", "device_map")}
        config, _ = AutoConfig.from_pretrained(path if config is None else config, return_unused_kwargs=True, **others)
    classes = auto._model_mapping[type(config)]
    if not isinstance(classes, (list, tuple)):
        return classes
    return next((x for x in classes if x.__name__ in (config.architectures or ())), classes[0])
