"""A converted model is reverted, copied, saved and loaded: by load_dynamic_mask, by auto classes, and never densely."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forks import in_processes
from models import TOLERANCE, VOCABULARY, build, distinct_batch, error, largest, train_step
from test_transformers import SIZES
from torch import nn

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from test_transformers_conversion import KEEP, convert, hooks, llama, whole_models  # noqa: E402

from dmattn.integrations import transformers as integration  # noqa: E402
from dmattn.integrations.transformers import loading  # noqa: E402

REFUSAL = "implementation=.of a model with dynamic masks: import dmattn.integrations.transformers and load it by an auto class or load_dyn"


@whole_models
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_revert_gives_the_original_back(implementation: str) -> None:
    model, batch = llama(), distinct_batch("left")
    model.set_attn_implementation(implementation)
    config, state, plain, before = model.config.to_dict(), copy.deepcopy(model.state_dict()), train_step(model, batch), hooks(model)
    integration.convert_to_dynamic_mask(model, keep=KEEP)
    converted = train_step(model, batch)
    assert model.state_dict().keys() - state.keys()
    assert error(converted.logits, plain.logits) > 1e-3
    integration.revert_dynamic_mask(model)
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == implementation
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert hooks(model) == before
    again = train_step(model, batch)
    assert torch.equal(again.logits, plain.logits)
    assert all(torch.equal(again.gradients[name], gradient) for name, gradient in plain.gradients.items())
    integration.convert_to_dynamic_mask(model, keep=KEEP)
    assert torch.equal(train_step(model, batch).logits, converted.logits)


@whole_models
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("AutoModelForCausalLM", dict(), id="auto"),
        pytest.param("LlamaForCausalLM", dict(), id="class"),
        pytest.param("AutoModelForCausalLM", dict(max_shard_size="8KB"), id="shards"),
    ],
)
def test_what_was_saved_is_loaded(name: str, settings: dict[str, Any], tmp_path) -> None:
    model = convert(llama(num_hidden_layers=3), layers=[0, 2]).eval()
    tokens = distinct_batch()["input_ids"]
    model.save_pretrained(tmp_path, **settings)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == bool(settings)
    kind = getattr(transformers, name)
    loaded = integration.load_dynamic_mask(kind, tmp_path, attn_implementation="eager")
    assert type(loaded) is transformers.LlamaForCausalLM
    assert loaded.config.dynamic_mask == {"keep": KEEP, "layers": [0, 2]}
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    integration.revert_dynamic_mask(loaded)
    assert loaded.config._attn_implementation == "eager"
    integration.revert_dynamic_mask(model)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@whole_models
def test_settings_of_from_pretrained_reach_it(tmp_path) -> None:
    model = convert(llama())
    model.save_pretrained(tmp_path)
    kind = transformers.AutoModelForCausalLM
    loaded, information = integration.load_dynamic_mask(kind, tmp_path, dtype=torch.float16, attention_dropout=0.5, output_loading_info=True)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float16}
    assert loaded.config.attention_dropout == loaded.model.layers[0].self_attn.attention_dropout == 0.5
    assert not information["missing_keys"]
    assert not information["unexpected_keys"]
    decoder = integration.load_dynamic_mask(transformers.AutoModel, tmp_path)
    assert type(decoder) is transformers.LlamaModel
    assert torch.equal(decoder.layers[1].self_attn.dynamic_mask.A, model.model.layers[1].self_attn.dynamic_mask.A)
    decoder.save_pretrained(tmp_path / "again")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "again").architectures == ["LlamaModel"]


@whole_models
def test_while_a_model_is_loaded_its_class_has_the_name_of_its_architecture(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers keeps what a class can record, such as hidden states, under its name."""
    names, convert_as_configured = [], loading.convert_as_configured

    def spy(model: nn.Module) -> None:
        names.append(str(type(model)))
        convert_as_configured(model)

    monkeypatch.setattr(loading, "convert_as_configured", spy)
    convert(llama()).save_pretrained(tmp_path)
    loaded = integration.load_dynamic_mask(transformers.AutoModel, tmp_path)
    assert names == [str(transformers.LlamaModel)]
    assert len(loaded(distinct_batch()["input_ids"], output_hidden_states=True).hidden_states) == 3


@whole_models
def test_what_cannot_be_loaded_is_named(tmp_path) -> None:
    kind, model = transformers.AutoModelForCausalLM, llama()
    model.save_pretrained(tmp_path / "original")
    with pytest.raises(ValueError, match="path: expected a converted model that save_pretrained wrote, received a LlamaForCausalLM without"):
        integration.load_dynamic_mask(kind, tmp_path / "original")
    integration.convert_to_dynamic_mask(model, keep=KEEP)
    state = {name: tensor for name, tensor in model.state_dict().items() if "layers.1.self_attn.dynamic_mask" not in name}
    model.save_pretrained(tmp_path / "part", state_dict=state)
    with pytest.raises(ValueError, match=r"path: expected files with all weights .* without model.layers.1.self_attn.dynamic_mask.A, model"):
        integration.load_dynamic_mask(kind, tmp_path / "part")
    unfit = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4))
    unfit.config.dynamic_mask = {"keep": KEEP, "layers": [0]}
    unfit.save_pretrained(tmp_path / "unfit")
    with pytest.raises(ValueError, match="path: expected a configuration that fits the model, received one that names a GPT2Attention"):
        integration.load_dynamic_mask(kind, tmp_path / "unfit")
    for wrong in ("LlamaForCausalLM", nn.Linear):
        with pytest.raises(TypeError, match=r"kind: expected a model class or an auto class of Transformers, received (str|Linear)"):
            integration.load_dynamic_mask(wrong, tmp_path)


@whole_models
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_a_copy_is_converted_and_reverts_alone(copied: Callable) -> None:
    model, tokens = convert(llama()).eval(), distinct_batch()["input_ids"]
    other, logits = copied(model), model(tokens).logits
    assert torch.equal(other(tokens).logits, logits)
    integration.revert_dynamic_mask(other)
    assert hooks(other) == 0
    assert not torch.equal(other(tokens).logits, logits)
    assert torch.equal(model(tokens).logits, logits)


# Without load_dynamic_mask


@whole_models
@pytest.mark.parametrize("settings", [dict(), dict(attn_implementation="sdpa"), dict(dtype=torch.float16)], ids=str)
def test_an_auto_class_loads_a_converted_model(settings: dict[str, Any], tmp_path) -> None:
    model, tokens = convert(llama(num_hidden_layers=3), layers=[0, 2]).eval(), distinct_batch()["input_ids"]
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **settings)
    assert type(loaded) is transformers.LlamaForCausalLM
    assert isinstance(loaded.config, transformers.LlamaConfig)
    changed = dict(dtype=None, _name_or_path="")
    assert loaded.config.to_dict() | changed == model.config.to_dict() | changed
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert error(loaded(tokens).logits, model(tokens).logits) <= largest(model(tokens).logits) * (1e-2 if "dtype" in settings else TOLERANCE)
    loaded.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text())["model_type"] == "dmattn_dynamic_mask"
    decoder = transformers.AutoModel.from_pretrained(tmp_path / "again")
    assert type(decoder) is transformers.LlamaModel
    assert decoder.config.dynamic_mask == {"keep": KEEP, "layers": [0, 2]}
    integration.revert_dynamic_mask(loaded)
    assert type(loaded.config) is transformers.LlamaConfig
    loaded.save_pretrained(tmp_path / "reverted")
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "reverted")
    assert plain.config.model_type == json.loads((tmp_path / "reverted/config.json").read_text())["model_type"] == "llama"
    assert plain.state_dict().keys() == loaded.state_dict().keys()


@whole_models
def test_a_configuration_alone_is_loaded_and_builds_a_converted_model(tmp_path) -> None:
    convert(llama()).config.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path, vocab_size=48)
    assert config.vocab_size == 48
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert type(model) is transformers.LlamaForCausalLM
    assert sum("dynamic_mask" in name for name, _ in model.named_parameters()) == 4


@whole_models
@pytest.mark.parametrize("settings", [dict(), dict(attn_implementation="eager")], ids=str)
def test_a_model_class_refuses_a_converted_model(settings: dict[str, Any], tmp_path) -> None:
    convert(llama()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=REFUSAL):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path, **settings)


LOADS = """
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM
for kind in (AutoModelForCausalLM, LlamaForCausalLM, AutoModel):
    for settings in ({{}}, dict(attn_implementation="eager"), dict(attn_implementation="sdpa")):
        try:
            model = kind.from_pretrained({path!r}, **settings)
        except ValueError as error:
            assert "dmattn" in str(error), error
            print("refused")
        else:
            print("loaded", type(model).__name__, sum("dynamic_mask" in name for name, _ in model.named_parameters()))
"""


@whole_models
def test_a_process_loads_a_converted_model_converted_or_not_at_all(tmp_path) -> None:
    """With dmattn, and where it is not imported."""
    convert(llama()).save_pretrained(tmp_path)
    loads = LOADS.format(path=str(tmp_path))
    without, within = in_processes(
        [loads, "import dmattn.integrations.transformers\n" + loads], "from transformers import AutoModel, LlamaForCausalLM"
    )
    assert without.returncode == within.returncode == 0, without.stderr + within.stderr
    assert without.stdout.splitlines() == ["refused"] * 9
    assert within.stdout.splitlines() == ["loaded LlamaForCausalLM 4"] * 3 + ["refused"] * 3 + ["loaded LlamaModel 4"] * 3


@whole_models
def test_a_model_saved_before_its_configuration_said_so_is_loaded_by_load_dynamic_mask(tmp_path) -> None:
    """With `dynamic_mask` in a configuration of the original type."""
    model, tokens = convert(llama()).eval(), distinct_batch()["input_ids"]
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    saved["model_type"] = saved.pop("dynamic_mask_of")
    del saved["attn_implementation"], saved["experts_implementation"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    for kind in (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM):
        loaded = integration.load_dynamic_mask(kind, tmp_path)
        assert type(loaded) is transformers.LlamaForCausalLM
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")(tokens).logits, model(tokens).logits)


@whole_models
def test_a_decoder_inside_another_model_is_saved_with_it(tmp_path) -> None:
    """Llava: the model that saves has a configuration around the decoder's."""
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4)
    text = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, pad_token_id=0)
    model = build(
        transformers.LlavaForConditionalGeneration,
        transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=VOCABULARY - 1),
    ).eval()
    tokens = distinct_batch()["input_ids"].clamp(max=VOCABULARY - 2)
    convert(model)
    logits = model(tokens).logits
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=REFUSAL):
        transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path)
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert type(loaded) is transformers.LlavaForConditionalGeneration
    assert error(loaded(tokens).logits, logits) <= TOLERANCE * largest(logits)
    integration.revert_dynamic_mask(loaded)
    assert type(loaded.config) is transformers.LlavaConfig
    assert type(loaded.config.text_config) is transformers.LlamaConfig


@whole_models
def test_training_resumes_from_a_checkpoint(tmp_path) -> None:
    pytest.importorskip("accelerate")
    rows = [{name: tensor[number] for name, tensor in distinct_batch("left").items()} for number in range(2)]
    common = dict(save_steps=1, save_strategy="steps", learning_rate=0.1, per_device_train_batch_size=2, report_to=[], use_cpu=True)
    results = []
    for resumed in (False, True):
        model = convert(llama())
        settings = transformers.TrainingArguments(str(tmp_path), max_steps=2, disable_tqdm=True, **common)
        transformers.Trainer(model, settings, train_dataset=rows).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-1") if resumed else None
        )
        results.append(model.state_dict())
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())


@whole_models
def test_an_adapter_of_a_loaded_model_is_saved_and_loaded(tmp_path) -> None:
    peft = pytest.importorskip("peft")
    model, batch = convert(llama()), distinct_batch("left")
    model.save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, modules_to_save=["dynamic_mask"]))
    optimizer = torch.optim.SGD([parameter for parameter in adapted.parameters() if parameter.requires_grad], lr=0.5)
    train_step(adapted, batch)
    optimizer.step()
    adapted.save_pretrained(tmp_path / "adapter")
    logits = adapted.eval()(**batch).logits.detach()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    assert error(again(**batch).logits, logits) <= TOLERANCE * largest(logits)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda config: pickle.loads(pickle.dumps(config))], ids=["deepcopy", "copy", "pickle"]
)
def test_a_copied_configuration_is_saved_like_it(copied: Callable) -> None:
    config = convert(llama()).config
    other = copied(config)
    assert type(other) is type(config)
    assert other == config
    assert json.loads(other.to_json_string()) == json.loads(config.to_json_string())
    assert json.loads(other.to_json_string(use_diff=False))["model_type"] == "dmattn_dynamic_mask"
