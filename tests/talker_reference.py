"""transformers' own generate with a tiny omni checkpoint: the Talker's codes, and the Thinker's rows that they were made of."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from perf.omni.tiny import make_qwen3_omni, make_qwen25_omni
from tests.omni_prompts import Asked, ask, audio_token, image_token

SPEAKER = "Ethan"


@dataclass(frozen=True)
class Speech:
    """``rows`` [prompt + answer, hidden]: one for each token that the Thinker took in. ``codes`` int64 [frames, codebooks]."""

    asked: Asked
    rows: torch.Tensor
    codes: torch.Tensor


class Reference:
    def __init__(self, family: str, directory: Path) -> None:
        self.family = family
        self.directory = directory
        self.model: Any = (make_qwen3_omni if family == "qwen3" else make_qwen25_omni)(directory)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self._kept: dict[str, Any] = {}
        self.model.thinker.generate = self._recorded("thinker", self.model.thinker.generate)
        self.model.talker.generate = self._recorded("talker", self.model.talker.generate)
        vocoder = self.model.code2wav if family == "qwen3" else self.model.token2wav
        vocoder.forward = vocoder.chunked_decode = lambda *args, **kwargs: torch.zeros(1, 1, 1)
        if family == "qwen3":
            # The positions of sounds are counted with it; transformers 5.24 looks for it here and leaves it out.
            self.model.config.talker_config.audio_config = self.model.config.thinker_config.audio_config
        else:
            self.model.load_speakers(directory / "spk_dict.pt")
            self._keep_mask()

    def speak(self, asked: Asked, words: int, frames: int, *, stops: list[int] | None = None) -> Speech:
        """Greedy text of ``words`` tokens, and greedy speech of ``frames`` frames or until one of ``stops`` (default: the
        checkpoint's)."""
        inputs = dict(asked.inputs)
        config = self.model.config.talker_config
        if self.family == "qwen3":
            stops = stops or [config.codec_eos_token_id]
            # A frame's residual codes are made in the step after it.
            options: dict[str, Any] = {"thinker_eos_token_id": None, "talker_max_new_tokens": frames + 1}
        else:
            stops = stops or [config.tts_codec_pad_token_id, config.tts_codec_end_token_id]
            options = {"thinker_eos_token_id": -1, "talker_max_new_tokens": frames}
            if "pixel_values" in inputs:  # which would reach the Talker too
                inputs["thinker_pixel_values"] = inputs.pop("pixel_values")
        self.model.generate(
            **inputs, **options, speaker=SPEAKER, thinker_max_new_tokens=words, thinker_do_sample=False,
            talker_do_sample=False, talker_eos_token_id=stops,
        )
        return Speech(asked, self._rows(asked, words), self._codes(stops))

    def answered(self, asked: Asked) -> list[int]:
        """The tokens of the answer that was spoken last."""
        return [int(token) for token in self._kept["thinker"].sequences[0, len(asked.ids) :]]

    def _recorded(self, name: str, call: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._kept[name] = call(*args, **kwargs)
            self._kept[f"{name}_arguments"] = kwargs
            return self._kept[name]

        return wrapped

    def _keep_mask(self) -> None:
        """generate of transformers 5.24 drops a mask of ones, and without one Qwen2.5's Talker leaves the signs of its codes
        out of the prompt, and the positions of media; with padding beside it, it does not."""
        forward = self.model.talker.forward

        @functools.wraps(forward)
        def kept(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
            rows = kwargs.get("inputs_embeds")
            length = kwargs["cache"].get_seq_length() + (1 if rows is None else rows.shape[1])
            return forward(*args, attention_mask=torch.ones(1, length, dtype=torch.long), **kwargs)

        self.model.talker.forward = kept

    def _rows(self, asked: Asked, words: int) -> torch.Tensor:
        config, states = self.model.config, self._kept["thinker"].hidden_states
        layer = config.talker_config.accept_hidden_layer if self.family == "qwen3" else -1
        embedded = torch.cat([step[0] for step in states], dim=1)[0]
        hidden = torch.cat([step[layer] for step in states], dim=1)[0]
        ids = torch.tensor(asked.ids + [0] * (words - 1))
        media = ((ids == audio_token(config.thinker_config)) | (ids == image_token(config.thinker_config)))[:, None]
        if self.family == "qwen3":
            return torch.where(media, hidden, embedded)
        return hidden + torch.where(media, 0.0, embedded)

    def _codes(self, stops: list[int]) -> torch.Tensor:
        result = self._kept["talker"]
        if self.family == "qwen3":
            return torch.cat([step[-1] for step in result.hidden_states if step[-1] is not None])
        tokens = result[0, self._kept["talker_arguments"]["input_ids"].shape[1] :]
        return (tokens[:-1] if int(tokens[-1]) in stops else tokens)[:, None]


def ask_text(reference: Reference, text: int = 0) -> Asked:
    return ask(reference.model, reference.tokenizer, 0, text)
