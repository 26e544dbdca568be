"""What transformers' own generate does with a tiny omni checkpoint: the Talker's codes, and what the Thinker gave for them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.tiny_omni import make_qwen3_omni, make_qwen25_omni

FAMILIES = ("qwen3", "qwen2.5")


@dataclass
class Spoken:
    """``ids`` [T] of the prompt; ``rows`` [T + answer, hidden] of the Thinker; ``codes`` [frames, codebooks]; ``stopped``:
    by a stop token, not by the limit."""

    ids: torch.Tensor
    rows: torch.Tensor
    codes: torch.Tensor
    stopped: bool


class Reference:
    def __init__(self, family: str, directory: Path) -> None:
        self.family = family
        self.directory = directory
        self.model: Any = (make_qwen3_omni if family == "qwen3" else make_qwen25_omni)(directory)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        if family != "qwen3":
            self.model.load_speakers(directory / "spk_dict.pt")
            self._keep_mask()
        self.speaker = "Ethan"

    def _keep_mask(self) -> None:
        """generate of transformers 5.24 drops a mask of ones, and without one Qwen2.5's Talker leaves the signs of its codes
        out of the prompt, and the positions of media; with padding beside it, it does not."""
        forward = self.model.talker.forward

        @functools.wraps(forward)
        def kept(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
            cache, rows = kwargs.get("cache"), kwargs.get("inputs_embeds")
            new = 1 if rows is None else rows.shape[1]
            past = 0 if cache is None else cache.get_seq_length()
            return forward(*args, attention_mask=torch.ones(1, past + new, dtype=torch.long), **kwargs)

        self.model.talker.forward = kept

    def ids(self, *turns: tuple[str, str]) -> torch.Tensor:
        messages = [{"role": role, "content": content} for role, content in turns]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(text, return_tensors="pt").input_ids

    def speak(self, ids: torch.Tensor, words: int, frames: int, speaker: str = "", **inputs: Any) -> Spoken:
        """Greedy text of ``words`` tokens and greedy speech of at most ``frames`` tokens of codebook 0."""
        kept: dict[str, Any] = {}
        model, talker = self.model, self.model.talker
        config = model.config.talker_config

        def recorded(name: str, call: Any) -> Any:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                kept[name] = call(*args, **kwargs)
                kept[name + "_arguments"] = kwargs
                return kept[name]

            return wrapped

        options: dict[str, Any] = {"thinker_eos_token_id": None} if self.family == "qwen3" else {
            "talker_eos_token_id": [config.tts_codec_pad_token_id, config.tts_codec_end_token_id]
        }
        vocoder = model.code2wav if self.family == "qwen3" else model.token2wav
        silence = lambda *args, **kwargs: torch.zeros(1, 1, 1)  # noqa: E731
        model.thinker.generate = recorded("thinker", type(model.thinker).generate.__get__(model.thinker))
        talker.generate = recorded("talker", type(talker).generate.__get__(talker))
        vocoder.forward = vocoder.chunked_decode = silence
        if self.family != "qwen3":
            options |= {"thinker_eos_token_id": -1}
        model.generate(
            ids, speaker=speaker or self.speaker, thinker_max_new_tokens=words, thinker_do_sample=False,
            talker_do_sample=False, talker_max_new_tokens=frames, **options, **inputs,
        )
        thinker, result = kept["thinker"], kept["talker"]
        return Spoken(ids[0], self._rows(thinker), *self._codes(result, kept["talker_arguments"], frames))

    def _rows(self, thinker: Any) -> torch.Tensor:
        config = self.model.config
        states = thinker.hidden_states
        layer = config.talker_config.accept_hidden_layer if self.family == "qwen3" else -1
        embedded = torch.cat([step[0] for step in states], dim=1)[0]
        hidden = torch.cat([step[layer] for step in states], dim=1)[0]
        suffix = "id" if self.family == "qwen3" else "index"
        names = [getattr(config.thinker_config, f"{kind}_token_{suffix}") for kind in ("audio", "image")]
        media = torch.isin(thinker.sequences[0, : len(hidden)], torch.tensor(names))[:, None]
        if self.family == "qwen3":
            return torch.where(media, hidden, embedded)
        return hidden + torch.where(media, 0.0, embedded)

    def _codes(self, result: Any, arguments: Any, frames: int) -> tuple[torch.Tensor, bool]:
        if self.family == "qwen3":
            tokens = result.sequences[0]
            codes = torch.cat([step[-1] for step in result.hidden_states if step[-1] is not None])
            return codes, int(tokens[-1]) == self.model.config.talker_config.codec_eos_token_id
        tokens = result[0, arguments["input_ids"].shape[1] :]
        stopped = int(tokens[-1]) in arguments["eos_token_id"]
        return (tokens[:-1] if stopped else tokens)[:, None], stopped
