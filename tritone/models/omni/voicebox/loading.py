"""From an omni checkpoint's directory to its VoiceBox; nothing but the vocoder's tensors is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tritone.errors import bad
from tritone.models.decoder.checkpoint import Checkpoint, Progress
from tritone.models.omni.voicebox.box import OmniVoiceBox
from tritone.models.omni.voicebox.code2wav import Code2Wav
from tritone.models.omni.voicebox.speakers import read_speakers
from tritone.models.omni.voicebox.token2wav import Token2Wav

QWEN3 = "Qwen3OmniMoeForConditionalGeneration"
QWEN25 = "Qwen2_5OmniForConditionalGeneration"


def load_voicebox(path: str | Path, device: str | torch.device = "cpu", progress: Progress | None = None) -> OmniVoiceBox:
    """The vocoder of a Qwen3-Omni or Qwen2.5-Omni checkpoint, in float32 whatever the files hold.

    ``progress`` gets (bytes done, bytes in all) of the vocoder's tensors. Raises ``InvalidArgument`` naming the field, file or
    tensor, what was found and what is allowed.
    """
    directory = Path(path)
    declared = _declared(directory)
    architectures = declared.get("architectures")
    if architectures == [QWEN3]:
        from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

        config = _section(declared, "code2wav_config", Qwen3OmniMoeCode2WavConfig)
        return Code2Wav(_load(directory, "code2wav.", Qwen3OmniMoeCode2Wav, config, device, progress))
    if architectures == [QWEN25]:
        from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniToken2WavConfig
        from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

        config = _section(declared, "token2wav_config", Qwen2_5OmniToken2WavConfig)
        speakers = read_speakers(directory, config.dit_config.enc_emb_dim, config.dit_config.mel_dim)
        model = _load(directory, "token2wav.", Qwen2_5OmniToken2WavModel, config, device, progress)
        return Token2Wav(model, {name: (a.to(device), b.to(device)) for name, (a, b) in speakers.items()})
    raise bad("architectures", architectures, f"[{QWEN3}] or [{QWEN25}]")


def _declared(directory: Path) -> dict[str, Any]:
    file = directory / "config.json"
    try:
        declared = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise bad("config.json", str(file), f"a readable JSON file ({error})") from error
    if not isinstance(declared, dict):
        raise bad("config.json", declared, "a JSON object")
    return declared


def _section(declared: dict[str, Any], name: str, cls: Any) -> Any:
    section = declared.get(name)
    if not isinstance(section, dict):
        raise bad(name, section, "the vocoder's configuration")
    try:
        return cls(**section)
    except Exception as error:  # transformers checks fields with exceptions of several libraries
        raise bad(name, section, f"what transformers takes ({error})") from error


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
