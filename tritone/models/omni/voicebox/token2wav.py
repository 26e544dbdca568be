"""Qwen2.5-Omni's vocoder in windows: flow matching gives mel frames, BigVGAN gives their samples.

**Flow matching.** Attention is by blocks; a few layers see one block back or ahead, so one evaluation of the network reaches
as many blocks as there are such layers. A sample takes 36 evaluations, each of which reaches that far again, so exact windows
would need 36 reaches ahead. A window computes a chunk with ``_BACK`` reaches before it and ``_AHEAD`` after it; what is cut
off has passed through more evaluations than that. The noise of a frame depends only on seed, segment and the frame's place, so
windows agree where they overlap.

**BigVGAN** runs on mel frames that no longer change, with its whole reach on either side: it adds nothing but rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from tritone.errors import bad
from tritone.models.omni.voicebox.batch import Call, Steps, Tensors
from tritone.models.omni.voicebox.bigvgan import reach
from tritone.models.omni.voicebox.box import Float32Array, OmniVoiceBox, silence
from tritone.models.omni.voicebox.diffusion import Diffusion, Speaker
from tritone.models.omni.voicebox.plan import ChunkPlan
from tritone.models.voice.source import frame_noise

_BACK = 2
_AHEAD = {"latency": 1, "quality": 2}
_LARGEST = 8  # blocks; one is 0.24 s in the released sizes


class Token2Wav(OmniVoiceBox):
    """``model`` is transformers' ``Qwen2_5OmniToken2WavModel`` with its weights; ``speakers`` by name, default first, see
    ``read_speakers``. A frame is one code of one group.

    Raises ``InvalidArgument`` when a block of attention is not a whole number of codes.
    """

    def __init__(self, model: Any, speakers: Mapping[str, tuple[Tensor, Tensor]], slots: int = 1) -> None:
        dit, vocoder = model.config.dit_config, model.config.bigvgan_config
        if dit.block_size % dit.repeats:
            raise bad("dit_config.block_size", dit.block_size, f"a multiple of repeats, {dit.repeats}")
        self.repeats, self.block, self.mel_dim = dit.repeats, dit.block_size, dit.mel_dim
        self.back = _BACK * len(dit.look_backward_layers) * dit.block_size
        self.reach = reach(vocoder)
        self.mel_hop = prod(vocoder.upsample_rates)
        ahead = {mode: reaches * len(dit.look_ahead_layers) for mode, reaches in _AHEAD.items()}  # blocks
        self.ahead = {mode: blocks * dit.block_size for mode, blocks in ahead.items()}
        unit, waiting = dit.block_size // dit.repeats, -(-self.reach // dit.block_size)
        super().__init__(
            groups=1,
            code_count=dit.num_embeds + 1,
            hop=self.mel_hop * dit.repeats,
            plans={
                "latency": ChunkPlan(unit, waiting + ahead["latency"], first=1, largest=_LARGEST),
                "quality": ChunkPlan(unit, waiting + ahead["quality"], first=_LARGEST, largest=_LARGEST),
            },
            device=model.device,
            slots=slots,
            voices=tuple(speakers),
        )
        self.bigvgan = model.code2wav_bigvgan_model
        self.diffusion = Diffusion(model.code2wav_dit_model)
        with torch.inference_mode():
            self._speakers = {name: self.diffusion.speaker(*parts) for name, parts in speakers.items()}

    def segment(self, mode: str, seed: int, index: int, voice: str | None) -> _WindowedSegment:
        return _WindowedSegment(self, self.ahead[mode], seed, index, self._speaker(voice))

    def noise(self, seed: int, segment: int, first: int, count: int) -> Tensor:
        """Normal noise of mel frames first, first + 1, ..., float32 [count, mel_dim]."""
        values = frame_noise(seed, segment, first, count, -(-self.mel_dim // 2)).view("float32")[:, : self.mel_dim]
        return torch.from_numpy(values).to(self.device)

    def mel(self, codes: Tensor, noise: Tensor, reference: Tensor, condition: Tensor) -> Tensors:
        """``Diffusion.sample``."""
        return (self.diffusion.sample(codes, noise, reference, condition),)

    def sound(self, mel: Tensor) -> Tensors:
        """float32 [B, frames, mel_dim] -> samples, float32 [B, frames * mel_hop], not on the device."""
        return (self.bigvgan(mel.transpose(1, 2)).reshape(len(mel), -1),)

    def _whole(self, codes: Tensor, seed: int, voice: str | None) -> Float32Array:
        noise, speaker = self.noise(seed, 0, 0, codes.shape[1] * self.repeats), self._speaker(voice)
        (sound,) = self.sound(*self.mel(codes, noise[None], speaker.reference[None], speaker.condition[None]))
        whole: Float32Array = sound[0].numpy()
        return whole

    def _speaker(self, voice: str | None) -> Speaker:
        return self._speakers[self.voices[0] if voice is None else voice]


class _WindowedSegment:
    """Places are mel frames of the segment. Up to ``_settled`` the mel is final, up to ``_sounded`` its samples were given."""

    def __init__(self, box: Token2Wav, ahead: int, seed: int, index: int, speaker: Speaker) -> None:
        self._box, self._ahead, self._seed, self._index, self._speaker = box, ahead, seed, index, speaker
        self._codes = torch.zeros(0, dtype=torch.int64, device=box.device)  # from _codes_begin on
        self._mel = torch.zeros((0, box.mel_dim), device=box.device)  # from _mel_begin to _settled
        self._codes_begin = self._mel_begin = self._settled = self._sounded = 0

    def run(self, codes: Tensor, last: bool) -> Steps[Float32Array]:
        self._codes = torch.cat([self._codes, codes[0]])
        received = self._codes_begin + len(self._codes) * self._box.repeats
        until = received if last else received - self._ahead
        if until > self._settled:
            yield from self._settle(until)
        return (yield from self._sound(until if last else until - self._box.reach))

    def _settle(self, until: int) -> Steps[None]:
        box, speaker = self._box, self._speaker
        begin = max(0, self._settled - box.back)
        self._codes, self._codes_begin = self._codes[(begin - self._codes_begin) // box.repeats :], begin
        noise = box.noise(self._seed, self._index, begin, len(self._codes) * box.repeats)
        (mel,) = yield Call(box.mel, (self._codes, noise, speaker.reference, speaker.condition))
        self._mel = torch.cat([self._mel, mel[self._settled - begin : until - begin]])
        self._settled = until

    def _sound(self, until: int) -> Steps[Float32Array]:
        box = self._box
        if until <= self._sounded:
            return silence(0)
        begin = max(0, self._sounded - box.reach)
        self._mel, self._mel_begin = self._mel[begin - self._mel_begin :], begin
        (made,) = yield Call(box.sound, (self._mel,))
        sound: Float32Array = made.numpy()[(self._sounded - begin) * box.mel_hop : (until - begin) * box.mel_hop]
        self._sounded = until
        return sound
