"""From an omni checkpoint's directory to its VoiceBox; nothing but the vocoder's tensors is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tritone.models.decoder.checkpoint import Checkpoint, Progress
from tritone.models.omni.families import QWEN3, read_config
from tritone.models.omni.voicebox.box import OmniVoiceBox
from tritone.models.omni.voicebox.code2wav import Code2Wav
from tritone.models.omni.voicebox.speakers import read_speakers
from tritone.models.omni.voicebox.token2wav import Token2Wav


def load_voicebox(
    path: str | Path, device: str | torch.device = "cpu", progress: Progress | None = None, slots: int = 1
) -> OmniVoiceBox:
    """The vocoder of a Qwen3-Omni or Qwen2.5-Omni checkpoint, in batches of ``slots``; float32 whatever the files hold.

    ``progress`` gets (bytes done, bytes in all) of the vocoder's tensors. Raises ``InvalidArgument`` naming the field, file or
    tensor, what was found and what is allowed.
    """
    directory = Path(path)
    config, family = read_config(directory)
    if family is QWEN3:
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

        return Code2Wav(_load(directory, "code2wav.", Qwen3OmniMoeCode2Wav, config.code2wav_config, device, progress), slots)
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

    sizes = config.token2wav_config
    speakers = read_speakers(directory, sizes.dit_config.enc_emb_dim, sizes.dit_config.mel_dim)
    model = _load(directory, "token2wav.", Qwen2_5OmniToken2WavModel, sizes, device, progress)
    return Token2Wav(model, {name: (a.to(device), b.to(device)) for name, (a, b) in speakers.items()}, slots)


def _load(directory: Path, prefix: str, cls: Any, config: Any, device: str | torch.device, progress: Progress | None) -> Any:
    model = cls._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    names = list(model.state_dict())
    shapes = {prefix + name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    computed = {prefix + name for name, _ in model.named_buffers()} - set(shapes)  # follow from the configuration

    def ignored(name: str) -> bool:
        return not name.startswith(prefix) or name in computed

    with Checkpoint(directory, shapes, {}, ignored, progress) as checkpoint:
        model.load_state_dict({name: checkpoint.read(prefix + name, torch.float32) for name in names}, assign=True)
    return model.eval().requires_grad_(False).to(device)
