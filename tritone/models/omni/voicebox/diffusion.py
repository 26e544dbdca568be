"""Flow matching of Qwen2.5-Omni's token2wav: codes and noise in, mel frames out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

STEPS = 10
GUIDANCE = 0.5
SWAY = -1.0
"""transformers' defaults: points in time, weight of the guidance, and the sway that puts more points near the noise."""


@dataclass(frozen=True)
class Speaker:
    """A voice as the network takes it, with the row of zeros for guidance: [2, 1, enc_dim] and [2, 1, enc_emb_dim]."""

    reference: Tensor
    condition: Tensor


class Diffusion:
    """``model`` is transformers' ``Qwen2_5OmniToken2WavDiTModel`` with its weights.

    What does not change from one evaluation to the next (speaker, code embeddings, rotary angles) is computed once a window.
    """

    def __init__(self, model: Any) -> None:
        from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import RungeKutta4ODESolver

        self._model: Any = model
        self._solver: Any = RungeKutta4ODESolver
        times = torch.linspace(0, 1, STEPS, device=model.device)
        self._times = times + SWAY * (torch.cos(torch.pi / 2 * times) - 1 + times)

    def speaker(self, condition: Tensor, reference: Tensor) -> Speaker:
        """From [1, enc_emb_dim] and the mel of a recording, [1, T, mel_dim]."""
        both = torch.cat([reference, torch.zeros_like(reference)])
        encoded = self._model.input_embed.spk_encoder(both)
        return Speaker(encoded[:, None], torch.cat([condition, torch.zeros_like(condition)])[:, None])

    def sample(self, codes: Tensor, noise: Tensor, reference: Tensor, condition: Tensor) -> Tensor:
        """Mel frames of B windows, float32 [B, N * repeats, mel_dim].

        codes: int64 [B, N]. noise: float32 [B, N * repeats, mel_dim]. reference, condition: those of each window's ``Speaker``,
        [B, 2, 1, width]. The first frame must be the first of a block of attention. Positions count from the window's begin:
        attention depends on their differences only.
        """
        model, (windows, frames, _) = self._model, noise.shape
        text = torch.cat([model.text_embed(codes), model.text_embed(codes, drop_code=True)])
        # Rows are the windows with guidance, then the windows without.
        voice, manner = (part.transpose(0, 1).flatten(0, 1).expand(-1, frames, -1) for part in (reference, condition))
        fixed = torch.cat([voice, text, manner], dim=-1)
        places = torch.arange(frames, device=noise.device)
        angles = model.rotary_embed(noise, places[None])
        blocks = places // model.block_size
        distance = (blocks[None, :] - blocks[:, None])[None, None]  # [1, 1, frames, frames]

        def velocity(time: Tensor, state: Tensor) -> Tensor:
            moment = model.time_embed(time.repeat(2 * windows))
            hidden = model.input_embed.proj(torch.cat([state.repeat(2, 1, 1), fixed], dim=-1))
            for layer in model.transformer_blocks:
                hidden = layer(hidden, moment, position_embeddings=angles, block_diff=distance)
            guided, free = model.proj_out(model.norm_out(hidden, moment)).chunk(2)
            moved: Tensor = guided + (guided - free) * GUIDANCE
            return moved

        mel: Tensor = self._solver(function=velocity, initial_value=noise).integrate(self._times)[-1]
        return mel
