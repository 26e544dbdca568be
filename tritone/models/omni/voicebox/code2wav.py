"""Qwen3-Omni's causal vocoder: every frame is computed once, and a chunk costs no repeated context.

Its attention alone reaches layers x (window - 1) frames back, 568 frames or 45 s in the released sizes, so recomputing a
shorter left context is not exact. A segment carries the state instead: the keys and values of the last window - 1 frames, for
each convolution the inputs that its next output still needs. So streamed and whole synthesis differ only by rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

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

    def __init__(self, model: Any) -> None:
        config = model.config
        self.model = model
        super().__init__(
            groups=config.num_quantizers,
            code_count=config.codebook_size,
            hop=int(model.total_upsample),
            plans={"latency": LATENCY, "quality": QUALITY},
            device=model.device,
        )

    def segment(self, mode: str, seed: int, index: int, voice: str | None) -> _CausalSegment:
        return _CausalSegment(self)

    def _whole(self, codes: Tensor, seed: int, voice: str | None) -> Float32Array:
        sound = self.model(codes[None])[0, 0].cpu().numpy()
        return np.concatenate([sound, silence(codes.shape[1] * self.hop - len(sound))])


class _CausalSegment:
    def __init__(self, box: Code2Wav) -> None:
        from transformers import DynamicCache

        self._model, self._hop = box.model, box.hop
        self._cache = DynamicCache(config=box.model.config)
        self._past: dict[torch.nn.Module, Tensor] = {}  # by convolution, [1, channels, inputs still needed]
        self._owed = 0  # samples, frames x hop less those returned

    def run(self, codes: Tensor, last: bool) -> Float32Array:
        sound = self._decode(codes) if codes.shape[1] else silence(0)
        self._owed += codes.shape[1] * self._hop - len(sound)
        return np.concatenate([sound, silence(self._owed)]) if last else sound

    def _decode(self, codes: Tensor) -> Float32Array:
        model = self._model
        hidden = model.code_embedding(codes[None] + model.code_offset).mean(1)
        hidden = model.pre_transformer(inputs_embeds=hidden, cache=self._cache, use_cache=True).last_hidden_state
        x = hidden.permute(0, 2, 1)  # [1, channels, frames]
        for transposed, block in model.upsample:
            x = self._next(block, self._transposed(transposed, x))
        inlet, *blocks, activation, outlet = model.decoder
        x = self._causal(inlet, x)
        for block in blocks:
            rise, transposed, *units = block.block
            x = self._transposed(transposed, rise(x))
            for unit in units:
                x = self._residual(unit, x)
        sound: Float32Array = self._causal(outlet, activation(x)).clamp(min=-1, max=1)[0, 0].cpu().numpy()
        return sound

    def _next(self, block: Any, x: Tensor) -> Tensor:
        hidden = block.norm(self._causal(block.dwconv, x).permute(0, 2, 1))
        hidden = block.gamma * block.pwconv2(block.act(block.pwconv1(hidden)))
        mixed: Tensor = x + hidden.permute(0, 2, 1)
        return mixed

    def _residual(self, unit: Any, x: Tensor) -> Tensor:
        return self._causal(unit.conv2, unit.act2(self._causal(unit.conv1, unit.act1(x)))) + x

    def _causal(self, module: Any, x: Tensor) -> Tensor:
        """[1, in, n] -> [1, out, n]; before the segment's begin are zeros."""
        if module.padding:
            past = self._past.get(module)
            x = F.pad(x, (module.padding, 0)) if past is None else torch.cat([past, x], dim=2)
            self._past[module] = x[..., -module.padding :].clone()
        convolved: Tensor = module.conv(x)
        return convolved

    def _transposed(self, module: Any, x: Tensor) -> Tensor:
        """[1, in, n] -> [1, out, n * stride], less what the module trims at the segment's begin."""
        overlap = module.left_pad // module.conv.stride[0]  # inputs that an output needs besides its own
        if overlap:
            past = self._past.get(module)
            x = x if past is None else torch.cat([past, x], dim=2)
            self._past[module] = x[..., -overlap:].clone()
        raised: Tensor = module(x)
        return raised
