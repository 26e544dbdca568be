"""Prompts with media for the tiny omni checkpoints, made by transformers' own towers and position rules, and its answers."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from perf.omni.tiny import make_qwen3_omni, make_qwen25_omni
from tritone.models.decoder import Decoder, load_decoder
from tritone.models.omni.prompt import MediaPrompt

WORDS = ["Describe this sound in one sentence please.", "The quick brown fox jumps.", "Hello, how are you today?" * 3, "one"]


ANSWER = 12
"""Tokens of each answer."""
FAMILIES = {"qwen3": make_qwen3_omni, "qwen2.5": make_qwen25_omni}
MEDIA: dict[str, dict[str, Any]] = {
    "text": {},
    "sound": {"frames": (120,)},
    "image": {"grids": ((4, 6),)},
    "both": {"frames": (120, 33), "grids": ((4, 6), (8, 4))},
}


@dataclass(frozen=True)
class Asked:
    """One request: what transformers takes, and what the thinker's engine takes (``prompt`` is None for text)."""

    inputs: dict[str, torch.Tensor]
    prompt: MediaPrompt | None

    @property
    def ids(self) -> list[int]:
        return [int(token) for token in self.inputs["input_ids"][0]]


@dataclass(frozen=True)
class Answer:
    """transformers' greedy answer: tokens, the float32 logits [N, vocabulary] that they were chosen from, and for each step the
    states [layers + 1][1, tokens, hidden] of the tokens it took in."""

    tokens: list[int]
    logits: torch.Tensor
    states: tuple[tuple[torch.Tensor, ...], ...]


def image_token(config: Any) -> int:
    return int(getattr(config, "image_token_id", None) or config.image_token_index)


def audio_token(config: Any) -> int:
    return int(getattr(config, "audio_token_id", None) or config.audio_token_index)


def ask(
    model: Any,
    tokenizer: Any,
    seed: int,
    text: int = 0,
    *,
    frames: tuple[int, ...] = (),
    grids: tuple[tuple[int, int], ...] = (),
) -> Asked:
    """A question, the ``text``-th, with sounds of so many mel ``frames`` and images of so many patches (height, width)."""
    thinker, config = model.thinker, model.thinker.config
    draw = torch.Generator().manual_seed(seed)
    inputs: dict[str, torch.Tensor] = {}
    counts: list[int] = []
    embeddings: dict[str, torch.Tensor] = {}
    deepstack = torch.zeros(0, 0, 0)
    with torch.no_grad():
        if frames:
            mask = torch.arange(max(frames))[None] < torch.tensor(frames)[:, None]
            inputs["input_features"] = torch.randn(len(frames), 128, max(frames), generator=draw) * mask[:, None]
            inputs["feature_attention_mask"] = mask.long()
            given = (inputs["input_features"], inputs["feature_attention_mask"])
            embeddings["audio"] = thinker.get_audio_features(*given, return_dict=True).last_hidden_state
            counts = [len(_sound(thinker, inputs, index)) for index in range(len(frames))]
        if grids:
            inputs["image_grid_thw"] = torch.tensor([[1, *grid] for grid in grids])
            patch = config.vision_config.patch_size**2 * config.vision_config.temporal_patch_size * 3
            patches = int(inputs["image_grid_thw"].prod(-1).sum())
            inputs["pixel_values"] = torch.randn(patches, patch, generator=draw)
            seen = thinker.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True)
            embeddings["image"] = torch.cat(list(seen.pooler_output))
            if getattr(seen, "deepstack_features", None):
                deepstack = torch.stack([torch.cat(list(layer)) for layer in seen.deepstack_features])
        sounds = "".join(tokenizer.audio_bos_token + tokenizer.audio_token * n + tokenizer.audio_eos_token for n in counts)
        sizes = [height * width // 4 for height, width in grids]
        images = "".join(tokenizer.vision_bos_token + tokenizer.image_token * n + tokenizer.vision_eos_token for n in sizes)
        system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        user = f"<|im_start|>user\n{images}{WORDS[text]}{sounds}<|im_end|>\n<|im_start|>assistant\n"
        inputs["input_ids"] = torch.tensor([tokenizer.encode(system + user)])
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        return Asked(inputs, _prompt(thinker, inputs, embeddings, deepstack) if embeddings else None)


def _sound(thinker: Any, inputs: dict[str, torch.Tensor], index: int) -> torch.Tensor:
    one = (inputs["input_features"][index : index + 1], inputs["feature_attention_mask"][index : index + 1])
    found: torch.Tensor = thinker.get_audio_features(*one, return_dict=True).last_hidden_state
    return found


def _prompt(
    thinker: Any, inputs: dict[str, torch.Tensor], embeddings: dict[str, torch.Tensor], deepstack: torch.Tensor
) -> MediaPrompt:
    ids = inputs["input_ids"][0]
    mask = inputs.get("feature_attention_mask")
    positions, delta = thinker.get_rope_index(
        inputs["input_ids"], inputs.get("image_grid_thw"), None, inputs["attention_mask"], False,
        None if mask is None else mask.sum(-1),
    )
    rows = torch.zeros(len(ids), thinker.config.text_config.hidden_size, dtype=thinker.dtype)
    replaced = torch.zeros(len(ids), dtype=torch.bool)
    visual = ids == image_token(thinker.config)
    for name, where in (("audio", ids == audio_token(thinker.config)), ("image", visual)):
        if name in embeddings:
            rows[where] = embeddings[name].to(rows.dtype)
            replaced |= where
    data = b"".join(inputs[name].float().numpy().tobytes() for name in ("input_features", "pixel_values") if name in inputs)
    return MediaPrompt(
        ids=ids.numpy().astype(np.int32),
        positions=positions[:, 0].numpy().astype(np.int32),
        delta=int(delta),
        places=replaced.nonzero()[:, 0].numpy().astype(np.int32),
        embeddings=rows[replaced],
        visual=visual.nonzero()[:, 0].numpy().astype(np.int32),
        deepstack=deepstack,
        digest=hashlib.sha256(data).digest(),
    )


def answer(model: Any, asked: Asked, tokens: int) -> Answer:
    with torch.no_grad():
        made = model.thinker.generate(
            **asked.inputs, max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True, output_hidden_states=True,
            output_logits=True, eos_token_id=None, pad_token_id=0,
        )
    answered = made.sequences[0, asked.inputs["input_ids"].shape[1] :]
    return Answer([int(token) for token in answered], torch.cat(made.logits).float(), made.hidden_states)


def checkpoint(family: str, directory: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Path]:
    """transformers' model, its tokenizer, and where both lie."""
    return _made(family, directory, dtype)


@functools.cache
def _made(family: str, directory: Path, dtype: torch.dtype) -> tuple[Any, Any, Path]:
    path = directory / f"{family}-{dtype}"
    path.mkdir(parents=True)
    model = FAMILIES[family](path, dtype)
    return model, transformers.AutoTokenizer.from_pretrained(path), path


@functools.cache
def expected(family: str, directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, tuple[Asked, Answer]]:
    model, tokenizer, _ = checkpoint(family, directory, dtype)
    asked = {name: ask(model, tokenizer, seed, seed, **media) for seed, (name, media) in enumerate(MEDIA.items())}
    return {name: (one, answer(model, one, ANSWER)) for name, one in asked.items()}


@functools.cache
def decoder(family: str, directory: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(checkpoint(family, directory, dtype)[2], dtype, max_positions=512)


def handed(family: str, model: Any, asked: Asked, wanted: Answer) -> torch.Tensor:
    """The rows of the prompt and of all tokens of the answer but the last, by transformers' own states."""
    states = [torch.cat([step[layer][0] for step in wanted.states]) for layer in range(len(wanted.states[0]))]
    places = torch.zeros(len(states[0]), 1, dtype=torch.bool)
    if asked.prompt is not None:
        places[torch.from_numpy(asked.prompt.places).long()] = True
    if family == "qwen3":
        return torch.where(places, states[model.config.talker_config.accept_hidden_layer], states[0])
    return states[-1] + states[0].masked_fill(places, 0)
