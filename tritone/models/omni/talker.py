"""From a checkpoint's directory to its Talker, its voices and how it is sampled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tritone.errors import bad
from tritone.models.decoder import load_decoder
from tritone.models.decoder.checkpoint import Checkpoint, Progress
from tritone.models.decoder.weights import LinearReader
from tritone.models.omni.code_predictor import CodePredictor
from tritone.models.omni.heard import Hearing, hear_all, hear_user
from tritone.models.omni.qwen3_talker import Ids, Projection, Qwen3Talker
from tritone.models.omni.qwen25_talker import Codes, Qwen25Talker
from tritone.models.omni.voices import Voices
from tritone.options import Sampling

MODEL_TYPES = ("qwen3_omni_moe", "qwen2_5_omni")
_EMBEDDING = "thinker.model.embed_tokens.weight"
_SPECIAL = 1024
"""The last ids of Qwen3's codebook 0 are signs, as in the reference's own call."""
_SPEAKERS = "spk_dict.pt"
_CALLS = {
    "qwen3_omni_moe": {"temperature": 0.9, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.05, "max_new_tokens": 4096},
    "qwen2_5_omni": {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "repetition_penalty": 1.05, "max_new_tokens": 4096},
}
"""The defaults of the reference's own calls."""

OmniTalker = Qwen3Talker | Qwen25Talker


@dataclass(frozen=True)
class SpeechDefaults:
    """``sampling`` but for its seed; ``max_frames`` is the most that one answer speaks."""

    sampling: Sampling
    max_frames: int


def load_talker(
    path: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    progress: Progress | None = None,
    max_positions: int | None = None,
    weights: str = "auto",
    group: int = 64,
) -> OmniTalker:
    """The Talker of an omni checkpoint, without its Thinker; arguments as in ``load_decoder``.

    Raises ``InvalidArgument`` naming the field or tensor, what was found and what is allowed.
    """
    config = _declared(path)
    decoder = load_decoder(
        path, dtype, progress=progress, max_positions=max_positions, weights=weights, group=group, part="talker"
    )
    hidden, section = decoder.config.hidden_size, config["talker_config"]
    dense = "float32" if dtype == torch.float32 else "bf16"
    kernels = decoder.kernels
    if config["model_type"] == "qwen2_5_omni":
        name, width = "talker.thinker_to_talker_proj", decoder.config.embedding_size
        speakers = _speakers(path)
        with Checkpoint(path, {f"{name}.bias": (hidden,)}, {name: (hidden, width)}, _others) as checkpoint:
            reader = LinearReader(checkpoint, kernels, dtype, decoder.device, dense, group, True)
            projection = reader.linear([name], checkpoint.read(f"{name}.bias", dtype))
            ids = [section["tts_text_end_token_id"], section["tts_text_pad_token_id"]]
            rows = checkpoint.read_rows(_EMBEDDING, [*ids, *speakers.values()], dtype)
        codes = Codes(*(section[f"tts_codec_{sign}_token_id"] for sign in ("pad", "start", "end", "mask")))
        begins = dict(zip(speakers, rows[2:], strict=True))
        return Qwen25Talker(codes, decoder, projection, begins, rows[0], rows[1], voices_of(path))
    predictor = load_decoder(
        path, dtype, max_positions=section["num_code_groups"], weights=weights, group=group, part="code_predictor"
    )
    base, books = "talker.code_predictor", range(section["num_code_groups"] - 1)
    size, inner = predictor.config.vocab_size, decoder.config.intermediate_size
    tables = {f"{base}.model.codec_embedding.{n}.weight": (size, hidden) for n in books}
    linears = {f"{base}.lm_head.{n}": (size, hidden) for n in books}
    biases: dict[str, tuple[int, ...]] = {}
    for name in ("text_projection", "hidden_projection"):
        for part, shape in (("1", (inner, section["thinker_hidden_size"])), ("2", (hidden, inner))):
            linears[f"talker.{name}.linear_fc{part}"] = shape
            biases[f"talker.{name}.linear_fc{part}.bias"] = shape[:1]
    with Checkpoint(path, {**tables, **biases}, linears, _others) as checkpoint:
        reader = LinearReader(checkpoint, kernels, dtype, decoder.device, dense, group, True)
        text, media = (
            Projection(kernels, *(reader.linear([n], checkpoint.read(f"{n}.bias", dtype)) for n in names))
            for names in (tuple(f"talker.{p}_projection.linear_fc{k}" for k in "12") for p in ("text", "hidden"))
        )
        heads = [reader.linear([f"{base}.lm_head.{n}"], None) for n in books]
        embeddings = [checkpoint.read(name, dtype) for name in tables]
        signs = [config[f"tts_{sign}_token_id"] for sign in ("bos", "eos", "pad")]
        rows = checkpoint.read_rows(_EMBEDDING, signs, dtype)
    return Qwen3Talker(_ids(config), decoder, CodePredictor(predictor, embeddings, heads), text, media, rows, voices_of(path))


def voices_of(path: str | Path) -> Voices:
    """The voices of an omni checkpoint, without its weights."""
    config = _declared(path)
    if config["model_type"] == "qwen2_5_omni":
        return Voices.of(_speakers(path), "chelsie")
    return Voices.of(config["talker_config"]["speaker_id"], "ethan")


def hearing_of(path: str | Path) -> Hearing:
    """What the Talker of an omni checkpoint reads of a prompt, without its weights."""
    config = _declared(path)
    if config["model_type"] == "qwen2_5_omni":
        return hear_all
    ids = _ids(config)
    return partial(hear_user, turn=ids.turn, user=ids.user, assistant=ids.assistant, media=ids.media)


def speech_defaults(path: str | Path) -> SpeechDefaults:
    """What the checkpoint's ``generation_config.json`` says of its Talker (``talker_...``), else what the reference does."""
    values: dict[str, Any] = dict(_CALLS[_declared(path)["model_type"]])
    file = Path(path) / "generation_config.json"
    if file.exists():
        given = json.loads(file.read_text(encoding="utf-8"))
        values |= {name: given[f"talker_{name}"] for name in values if given.get(f"talker_{name}") is not None}
        if given.get("talker_do_sample") is False:
            values["temperature"] = 0.0
    frames = int(values.pop("max_new_tokens"))
    return SpeechDefaults(Sampling(**values), frames)


def _declared(path: str | Path) -> Mapping[str, Any]:
    """``config.json``, completed with the defaults of its classes."""
    from transformers import AutoConfig

    config: dict[str, Any] = AutoConfig.from_pretrained(str(path), local_files_only=True).to_dict()
    if config["model_type"] not in MODEL_TYPES:
        raise bad("model_type", config["model_type"], ", ".join(MODEL_TYPES))
    if not config.get("enable_audio_output", True):
        raise bad("enable_audio_output", False, "true: a checkpoint with a Talker")
    return config


def _ids(config: Mapping[str, Any]) -> Ids:
    talker = config["talker_config"]
    return Ids(
        turn=config["im_start_token_id"],
        user=config["user_token_id"],
        assistant=config["assistant_token_id"],
        media=frozenset(config["thinker_config"][f"{kind}_token_id"] for kind in ("audio", "image", "video")),
        before=(talker["codec_nothink_id"], talker["codec_think_bos_id"], talker["codec_think_eos_id"]),
        after=(talker["codec_pad_id"], talker["codec_bos_id"]),
        stop=talker["codec_eos_token_id"],
        special=_SPECIAL,
        speakers=dict(talker["speaker_id"]),
    )


def _speakers(path: str | Path) -> dict[str, int]:
    """Of each voice, the token that begins its text."""
    file = Path(path) / _SPEAKERS
    if not file.exists():
        raise bad("checkpoint", str(path), f"a folder with {_SPEAKERS}, which holds the voices")
    found = torch.load(file, map_location="cpu", weights_only=True)
    return {str(name): int(values["bos_token"]) for name, values in found.items()}


def _others(name: str) -> bool:
    """Tensors of other parts of the checkpoint may lie beside those that are read."""
    return True
