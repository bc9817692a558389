"""Inputs for any model of Transformers, by the names of its forward method's parameters: one method of Inputs for each name that is known."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from sweep_models import LENGTH, PADDED, SPECIAL, WIDTH, look_up
from torch import Tensor, nn

# Sizes of inputs that no configuration tells.
SIZES: dict[str, dict[str, int]] = {
    "muse_glimmer_vision": dict(times=2),
    "muse_spark": dict(times=2, samples=3840),
    "muse_spark_audio": dict(samples=3840),
    "muse_spark_vision": dict(times=2),
    "gemma4_audio": dict(mels=128),
    "depth_pro": dict(image=256),
    "qwen3_asr_encoder": dict(frames=100),
    "seggpt": dict(image=32),
    "fun_asr_nano_encoder": dict(mels=560),
    "voxtral_realtime": dict(frames=8 * LENGTH),
    "kyutai_speech_to_text": dict(codebooks=33),
    "pi0": dict(images=2),
    "neucodec": dict(frames=12),
    "xcodec2": dict(frames=12),
    "speecht5": dict(mels=WIDTH),
    "granite_speech5_ctc": dict(mels=320),
    "granite_speech5_encoder": dict(mels=320),
}


class Inputs:
    """Makes the tensors that a forward method asks for; `image_tokens` stand in each row of a text."""

    def __init__(self, kind: str, model: nn.Module, padding: str, image_tokens: int = 0, variant: int = 0, change: bool = False) -> None:
        self.kind, self.config, self.padding, self.image_tokens = kind, model.config, padding, image_tokens
        self.random = torch.Generator().manual_seed(1)
        self.length = LENGTH + image_tokens + (1 if image_tokens else 0)
        self.variant = variant
        self.change = change
        self.names = list(inspect.signature(model.forward).parameters)
        size = look_up(self.config, "image_size", "img_size", "input_size", among="Vision|ViT|Image|Backbone", default=64)
        size = SIZES.get(kind, {}).get("image", size)
        self.height, self.width = (size, size) if isinstance(size, int) else (size[0], size[-1])
        self.channels = look_up(self.config, "num_channels", "in_channels", "in_chans", among="Vision|ViT|Image", default=3)
        self.channels = self.channels if isinstance(self.channels, int) else 3
        self.patch = look_up(self.config, "patch_size", among="Vision|ViT", default=16)
        self.patch = self.patch if isinstance(self.patch, int) else self.patch[0]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.random)

    def real(self, length: int) -> Tensor:
        keep = torch.ones(2, length, dtype=torch.long)
        padded = max(1, length * PADDED // LENGTH)
        if self.padding == "left":
            keep[0, :padded] = 0
        elif self.padding == "right":
            keep[0, -padded:] = 0
        return keep

    def make(self, names: list[str]) -> dict[str, Any]:
        given = {}
        for name in names:
            made = getattr(self, name, None)
            if made is not None:
                value = made()
                if value is not None:
                    given[name] = value
        return given

    # Text

    def input_ids(self) -> Tensor:
        highest = min(SPECIAL, look_up(self.config, "vocab_size", among="Text", default=SPECIAL))
        tokens = self.integers(5, highest, 2, self.length)
        if self.change:
            tokens[:, self.length // 2 :] = 5 + (tokens[:, self.length // 2 :] + 1) % (highest - 5)
        pad = look_up(self.config, "pad_token_id", default=0)
        pad = pad if isinstance(pad, int) and pad >= 0 else 0
        real = self.real(self.length)
        tokens = torch.where(real == 1, tokens, pad)
        end = look_up(self.config, "eos_token_id", among="Text")
        if isinstance(end, int) and end >= 0:  # some pool from it
            rows = torch.arange(2)
            tokens[rows, self.length - 1 - real.flip(-1).argmax(-1)] = end
        if self.image_tokens:
            tokens[:, PADDED + 2 : PADDED + 2 + self.image_tokens] = self.image_token()
        codebooks = SIZES.get(self.kind, {}).get("codebooks")
        return tokens[..., None].expand(-1, -1, codebooks) if codebooks else tokens

    def inputs_embeds(self) -> Tensor | None:
        others = ("input_ids", "pixel_values", "input_features", "input_values", "past_values")
        return None if any(name in self.names for name in others) else self.normal(2, LENGTH, WIDTH)

    def inputs(self) -> Tensor:
        return self.normal(2, LENGTH, look_up(self.config, "d_model"))

    def query_embeds(self) -> Tensor:
        return self.normal(2, 8, look_up(self.config, "hidden_size"))

    def qformer_input_ids(self) -> Tensor:
        return self.integers(5, SPECIAL, 2, LENGTH)

    def states(self) -> Tensor:
        return self.normal(2, LENGTH, look_up(self.config, "state_dim"))

    def actions(self) -> Tensor:
        return self.normal(2, LENGTH, look_up(self.config, "act_dim"))

    def returns_to_go(self) -> Tensor:
        return self.normal(2, LENGTH, 1)

    def timesteps(self) -> Tensor:
        return torch.arange(LENGTH).expand(2, -1)

    def encoder_hidden_states(self) -> Tensor | None:
        if "QFormer" not in type(self.config).__name__:
            return None
        return self.normal(2, 8, look_up(self.config, "encoder_hidden_size"))

    def visual_feats(self) -> Tensor:
        return self.normal(2, 6, look_up(self.config, "visual_feat_dim"))

    def visual_pos(self) -> Tensor:
        return self.normal(2, 6, look_up(self.config, "visual_pos_dim"))

    def visual_embeds(self) -> Tensor:
        return self.normal(2, 6, look_up(self.config, "visual_embedding_dim"))

    def image_embeds_position_mask(self) -> Tensor:
        keep = torch.zeros(2, self.length, dtype=torch.long)
        keep[:, PADDED + 2 : PADDED + 2 + look_up(self.config, "latent_query_num")] = 1
        return keep

    def image_attention_mask(self) -> Tensor:
        return torch.ones(2, self.length, 2, dtype=torch.long)

    def pixel_position_ids(self) -> Tensor:
        places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), -1).view(1, 16, 2)
        return places.expand(2, -1, -1).contiguous()

    def feature_attention_mask(self) -> Tensor:
        return torch.ones(2, self.frames(), dtype=torch.long)

    def target_sizes(self) -> Tensor:
        return torch.tensor([[4, 4]] * 2)

    def decoder_input_values(self) -> Tensor:
        return self.normal(2, LENGTH, self.mels())

    def past_values_padding(self) -> Tensor:
        return torch.zeros(2, self.past())

    def freq(self) -> Tensor:
        return torch.zeros(2, 1, dtype=torch.long)

    def spatial_shapes(self) -> Tensor:
        return torch.tensor([[4, 4]] * 2)

    def pixel_attention_mask(self) -> Tensor:
        return torch.ones(2, SIZES.get(self.kind, {}).get("images", 16), dtype=torch.long)

    def merge_sizes(self) -> Tensor:
        return torch.tensor([2, 2])

    def context_hidden_states(self) -> Tensor:
        return self.normal(2, LENGTH, look_up(self.config, "hidden_size") * len(look_up(self.config, "target_layer_ids")))

    def prompt_pixel_values(self) -> Tensor:
        return self.pixel_values()

    def prompt_masks(self) -> Tensor:
        return self.pixel_values()

    def latents(self) -> Tensor:
        return self.normal(2, look_up(self.config, "hidden_size"), 8)

    def action_embeds(self) -> Tensor:
        return self.normal(2, 8, look_up(self.config, "hidden_size", among="Text|Gemma"))

    def task_inputs(self) -> Tensor:
        return self.integers(5, SPECIAL, 2, look_up(self.config, "task_seq_len"))

    def audio_mel(self) -> Tensor:
        return self.normal(2, 64, self.mels())

    def audio_mel_mask(self) -> Tensor:
        return torch.zeros(2, 64, dtype=torch.bool)

    def noise_embeds(self) -> Tensor:
        return self.normal(2, 8, look_up(self.config, "hidden_size"))

    def image_token(self) -> int:
        return look_up(
            self.config, "image_token_id", "image_token_index", "audio_token_id", "audio_token_index", "im_patch_id", default=SPECIAL
        )

    def attention_mask(self) -> Tensor | None:
        if self.padding == "none":
            return None
        if "input_ids" in self.names:
            return self.real(self.length)
        if "input_features" in self.names:
            return self.real(self.frames())
        if "input_values" in self.names:
            return self.real(self.input_values().shape[-1])
        return None

    def decoder_input_ids(self) -> Tensor:
        return self.integers(5, SPECIAL, 2, LENGTH - 2)

    def bbox(self) -> Tensor:
        corner = self.integers(0, 100, 2, self.length, 2)
        return torch.cat([corner, corner + self.integers(1, 100, 2, self.length, 2)], -1)

    def mm_token_type_ids(self) -> Tensor | None:
        if not self.image_tokens:
            return None
        return (self.input_ids() == self.image_token()).long()

    def token_type_ids(self) -> Tensor | None:
        return self.mm_token_type_ids()

    # Images

    def pixel_values(self) -> Tensor:
        if self.flat() and not self.variant:
            return self.patches()
        if self.variant == 1:
            return self.normal(2, look_up(self.config, "num_frames", default=2), self.channels, self.height, self.width)
        if self.variant == 2:
            return self.normal(2 * 16, self.channels, self.patch, self.patch)
        if self.variant == 3:
            return self.normal(2, 16, self.channels * self.patch**2)
        return self.normal(2, self.channels, self.height, self.width)

    def flat(self) -> bool:
        return any("grid_thw" in name for name in self.names)

    def patches(self) -> Tensor:
        times = SIZES.get(self.kind, {}).get("times") or look_up(self.config, "temporal_patch_size", among="Vision", default=1)
        return self.normal(2 * 16, self.channels * times * self.patch**2)

    def image_sizes(self) -> Tensor | None:
        return torch.tensor([[self.height, self.width]] * 2) if self.kind == "emu3" else None

    def hidden_states(self) -> Tensor:
        if "AcousticTokenizer" not in type(self.config).__name__:
            return self.patches()
        if "Encoder" in type(self.config).__name__:
            return self.input_values()[:, None]
        return self.normal(2, look_up(self.config, "hidden_size"), 8)

    def grid_thw(self) -> Tensor:
        return torch.tensor([[1, 4, 4]] * 2)

    image_grid_thw = grid_thw

    def pixel_values_videos(self) -> Tensor | None:
        if "pixel_values" in self.names:
            return None
        frames = look_up(self.config, "num_frames", "frames_per_clip", default=2)
        return self.normal(2, frames, self.channels, self.height, self.width)

    # Sound

    def mels(self) -> int:
        names = (
            "num_mel_bins",
            "feature_size",
            "input_feat_per_channel",
            "feature_projection_input_dim",
            "input_feat_size",
            "input_dim",
            "n_mels",
        )
        return SIZES.get(self.kind, {}).get("mels") or look_up(self.config, *names, among="Audio|Encoder", default=80)

    def frames(self) -> int:
        """Encoders with learned positions take twice as many frames as they have positions."""
        positions = look_up(self.config, "max_source_positions", among="Audio|Encoder")
        if self.kind in SIZES and "frames" in SIZES[self.kind]:
            return SIZES[self.kind]["frames"]
        if self.variant == 0 and positions:
            return 2 * positions
        return look_up(self.config, "max_length", among="Spectrogram", default=64) if self.variant == 3 else 64

    def input_features(self) -> Tensor:
        """(B, frames, mels), (B, mels, frames) or (B, 1, frames, mels)."""
        x = self.normal(2, self.frames(), self.mels())
        if (
            self.variant == 2
            or (self.variant == 0 and self.frames() != 64)
            or (self.variant == 0 and look_up(self.config, "max_source_positions"))
        ):
            return x.mT.contiguous()
        return x[:, None] if self.variant == 3 else x

    def input_features_mask(self) -> Tensor:
        return self.real(self.frames())

    def input_values(self) -> Tensor:
        """Samples; with a channel; or features."""
        samples = SIZES.get(self.kind, {}).get("samples", 4000)
        shapes = ((2, samples), (2, 1, samples), (2, 2, samples), (2, self.frames(), self.mels()))
        return self.normal(*shapes[self.variant])

    # Time series

    def past_values(self) -> Tensor:
        channels = look_up(self.config, "num_input_channels")
        if channels:
            return self.normal(2, look_up(self.config, "context_length"), channels)
        return self.normal(2, self.past())

    def past(self) -> int:
        lags = look_up(self.config, "lags_sequence", default=[0])
        return look_up(self.config, "context_length", default=16) + max(lags)

    def time_features(self, length: int) -> Tensor:
        return self.normal(2, length, look_up(self.config, "num_time_features", default=1))

    def past_time_features(self) -> Tensor:
        return self.time_features(self.past())

    def past_observed_mask(self) -> Tensor:
        return torch.ones(2, self.past())

    def future_values(self) -> Tensor:
        return self.normal(2, look_up(self.config, "prediction_length", default=8))

    def future_time_features(self) -> Tensor:
        return self.time_features(look_up(self.config, "prediction_length", default=8))
