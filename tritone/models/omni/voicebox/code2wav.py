"""Qwen3-Omni's causal vocoder: every frame is computed once, and a chunk costs no repeated context.

Its attention alone reaches layers x (window - 1) frames back, 568 frames or 45 s in the released sizes, so recomputing a
shorter left context is not exact. A segment carries the state instead: the keys and values of the last window - 1 frames, for
each convolution the inputs that its next output still needs. So streamed and whole synthesis differ only by rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tritone.models.omni.voicebox.batch import Call, Steps, Tensors
from tritone.models.omni.voicebox.box import Float32Array, OmniVoiceBox, silence
from tritone.models.omni.voicebox.plan import ChunkPlan

LATENCY = ChunkPlan(unit=1, lead=1, first=3, largest=24)
QUALITY = ChunkPlan(unit=1, lead=1, first=24, largest=24)
"""A frame is 80 ms. The lead is the part of a frame that the transposed convolutions trim."""


class Code2Wav(OmniVoiceBox):
    """``model`` is transformers' ``Qwen3OmniMoeCode2Wav`` with its weights. The voice is in the codes: ``voices`` is empty.

    The model gives a fixed number of samples less than frames x hop (555 in the released sizes): its transposed convolutions
    trim both ends. A segment ends with as many zeros, so that a frame always is hop samples.
    """

    def __init__(self, model: Any, slots: int = 1) -> None:
        config = model.config
        self.model = model
        super().__init__(
            groups=config.num_quantizers,
            code_count=config.codebook_size,
            hop=int(model.total_upsample),
            plans={"latency": LATENCY, "quality": QUALITY},
            device=model.device,
            slots=slots,
        )

    def segment(self, mode: str, seed: int, index: int, voice: str | None) -> _CausalSegment:
        return _CausalSegment(self)

    def decode(self, codes: Tensor, received: Tensor, *past: Tensor) -> Tensors:
        """The next chunk of B segments: int64 codes [B, groups, N], and [B] how many frames came before.

        ``past`` is nothing, for the first chunk, or what the call before returned after its samples, float32: for each layer
        of attention [B, 2, heads, window - 1, width], keys and values, newest last; for each convolution [B, channels, inputs].
        Returns samples, float32 [B, M], then the new past.
        """
        model, state = self.model, _Past(past, self.model.config.sliding_window - 1)
        hidden = model.code_embedding(codes + model.code_offset).mean(1)
        masks = dict.fromkeys(set(model.config.layer_types), state.mask(received, codes.shape[2]))
        places = received[:, None] + torch.arange(codes.shape[2], device=codes.device)
        found = model.pre_transformer(inputs_embeds=hidden, attention_mask=masks, position_ids=places, cache=state)
        x = found.last_hidden_state.permute(0, 2, 1)  # [B, channels, frames]
        for transposed, block in model.upsample:
            x = _convnext(block, state.transposed(transposed, x), state)
        inlet, *blocks, activation, outlet = model.decoder
        x = state.causal(inlet, x)
        for block in blocks:
            rise, transposed, *units = block.block
            x = state.transposed(transposed, rise(x))
            for unit in units:
                x = state.causal(unit.conv2, unit.act2(state.causal(unit.conv1, unit.act1(x)))) + x
        return state.causal(outlet, activation(x)).clamp(min=-1, max=1)[:, 0], *state.kept

    def _whole(self, codes: Tensor, seed: int, voice: str | None) -> Float32Array:
        sound = self.model(codes[None])[0, 0].cpu().numpy()
        return np.concatenate([sound, silence(codes.shape[1] * self.hop - len(sound))])


class _CausalSegment:
    def __init__(self, box: Code2Wav) -> None:
        self._box = box
        self._past: Tensors = ()
        self._received = 0  # frames
        self._owed = 0  # samples, frames x hop less those returned

    def run(self, codes: Tensor, last: bool) -> Steps[Float32Array]:
        sound, frames = silence(0), codes.shape[1]
        if frames:
            received = torch.tensor(self._received, device=codes.device)
            made, *past = yield Call(self._box.decode, (codes, received, *self._past))
            sound, self._past = made.cpu().numpy(), tuple(past)
            self._received += frames
        self._owed += frames * self._box.hop - len(sound)
        return np.concatenate([sound, silence(self._owed)]) if last else sound


class _Past:
    """What a pass needs of those before it, asked for in the order in which the network computes, and what it leaves in turn.
    Also the ``cache`` of transformers' attention: only ``update`` is called, since masks and positions are given."""

    def __init__(self, past: Tensors, reach: int) -> None:
        self._past: Iterator[Tensor] = iter(past)
        self._reach = reach  # frames back that attention sees
        self.kept: list[Tensor] = []

    def mask(self, received: Tensor, frames: int) -> Tensor:
        """Which keys, reach + ``frames``, each new frame sees: bool [B, 1, frames, reach + frames]."""
        reach = self._reach
        key = torch.arange(reach + frames, device=received.device)[None, :]  # from ``reach`` on those of the chunk
        query = torch.arange(reach, reach + frames, device=received.device)[:, None]
        exists = key >= (reach - received)[:, None, None, None]
        return exists & (key <= query) & (key >= query - reach)

    def update(self, keys: Tensor, values: Tensor, layer: int, **_: Any) -> tuple[Tensor, Tensor]:
        """New keys and values, [B, heads, N, width] -> those that the mask is about."""
        new = torch.stack([keys, values], dim=1)
        past = next(self._past, None)
        seen = F.pad(new, (0, 0, self._reach, 0)) if past is None else torch.cat([past, new], dim=3)
        self.kept.append(seen[:, :, :, seen.shape[3] - self._reach :])
        return seen[:, 0], seen[:, 1]

    def causal(self, module: Any, x: Tensor) -> Tensor:
        """[B, in, N] -> [B, out, N]; before the segment's begin are zeros."""
        if module.padding:
            past = next(self._past, None)
            x = F.pad(x, (module.padding, 0)) if past is None else torch.cat([past, x], dim=2)
            self.kept.append(x[..., -module.padding :])
        convolved: Tensor = module.conv(x)
        return convolved

    def transposed(self, module: Any, x: Tensor) -> Tensor:
        """[B, in, N] -> [B, out, N * stride], less what the module trims at the segment's begin."""
        overlap = module.left_pad // module.conv.stride[0]  # inputs that an output needs besides its own
        if overlap:
            past = next(self._past, None)
            x = x if past is None else torch.cat([past, x], dim=2)
            self.kept.append(x[..., -overlap:])
        raised: Tensor = module(x)
        return raised


def _convnext(block: Any, x: Tensor, state: _Past) -> Tensor:
    hidden = block.norm(state.causal(block.dwconv, x).permute(0, 2, 1))
    hidden = block.gamma * block.pwconv2(block.act(block.pwconv1(hidden)))
    mixed: Tensor = x + hidden.permute(0, 2, 1)
    return mixed
