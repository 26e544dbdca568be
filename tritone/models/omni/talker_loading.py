"""From a checkpoint's directory to its Talker; of the Thinker, a few rows of its embedding are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tritone.models.code_predictor import CodePredictor
from tritone.models.decoder import Decoder, load_decoder
from tritone.models.decoder.checkpoint import Checkpoint, Progress
from tritone.models.decoder.weights import LinearReader
from tritone.models.omni.families import QWEN25
from tritone.models.omni.qwen3_talker import Ids, Projection, Qwen3Talker
from tritone.models.omni.qwen25_talker import Codes, Qwen25Talker
from tritone.models.omni.talker_config import declared, voices_of
from tritone.models.omni.voicebox.speakers import read_text_begins

_THINKERS_EMBEDDING = "thinker.model.embed_tokens.weight"
_SPECIAL = 1024
"""The last ids of Qwen3's codebook 0 are signs, as in the reference's own call."""

OmniTalker = Qwen3Talker | Qwen25Talker


def load_talker(
    path: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    progress: Progress | None = None,
    max_positions: int | None = None,
    weights: str = "auto",
    group: int = 64,
) -> OmniTalker:
    """The Talker of an omni checkpoint; arguments as in ``load_decoder``. What is not a layer is held in ``dtype``.

    Raises ``InvalidArgument`` naming the field or tensor, what was found and what is allowed.
    """
    config = declared(path)

    def part(name: str, positions: int | None) -> Decoder:
        shown = progress if name == "talker" else None
        return load_decoder(path, dtype, progress=shown, max_positions=positions, weights=weights, group=group, part=name)

    decoder = part("talker", max_positions)
    if config["model_type"] == QWEN25.name:
        return _qwen25(path, config["talker_config"], decoder)
    return _qwen3(path, config, decoder, part("code_predictor", config["talker_config"]["num_code_groups"]))


def _qwen25(path: str | Path, section: Mapping[str, Any], decoder: Decoder) -> Qwen25Talker:
    name, size = "talker.thinker_to_talker_proj", decoder.config
    signs = [section["tts_text_end_token_id"], section["tts_text_pad_token_id"]]
    speakers = read_text_begins(Path(path))
    linears = {name: (size.hidden_size, size.embedding_size)}
    with _read(path, decoder, {f"{name}.bias": (size.hidden_size,)}, linears) as (checkpoint, linears_of):
        projection = linears_of.linear([name], checkpoint.read(f"{name}.bias", decoder.dtype))
        end, pad, *begins = checkpoint.read_rows(_THINKERS_EMBEDDING, [*signs, *speakers.values()], decoder.dtype)
    codes = Codes(*(section[f"tts_codec_{sign}_token_id"] for sign in ("pad", "start", "end", "mask")))
    return Qwen25Talker(codes, decoder, projection, dict(zip(speakers, begins, strict=True)), end, pad, voices_of(path))


def _qwen3(path: str | Path, config: Mapping[str, Any], decoder: Decoder, predictor: Decoder) -> Qwen3Talker:
    section, hidden, inner = config["talker_config"], decoder.config.hidden_size, decoder.config.intermediate_size
    books, codes = range(section["num_code_groups"] - 1), predictor.config.vocab_size
    tables = [f"talker.code_predictor.model.codec_embedding.{n}.weight" for n in books]
    heads = [f"talker.code_predictor.lm_head.{n}" for n in books]
    sizes = {"linear_fc1": (inner, section["thinker_hidden_size"]), "linear_fc2": (hidden, inner)}
    projections = {
        f"talker.{kind}_projection.{layer}": size for kind in ("text", "hidden") for layer, size in sizes.items()
    }
    tensors = dict.fromkeys(tables, (codes, hidden)) | {f"{name}.bias": size[:1] for name, size in projections.items()}
    linears = dict.fromkeys(heads, (codes, hidden)) | projections
    with _read(path, decoder, tensors, linears) as (checkpoint, linears_of):

        def projection(kind: str) -> Projection:
            names = [f"talker.{kind}_projection.{layer}" for layer in sizes]
            first, second = (linears_of.linear([name], checkpoint.read(f"{name}.bias", decoder.dtype)) for name in names)
            return Projection(decoder.kernels, first, second)

        residual = CodePredictor(
            predictor,
            [checkpoint.read(name, decoder.dtype) for name in tables],
            [linears_of.linear([name], None) for name in heads],
        )
        signs = [config[f"tts_{sign}_token_id"] for sign in ("bos", "eos", "pad")]
        rows = checkpoint.read_rows(_THINKERS_EMBEDDING, signs, decoder.dtype)
        text, media = projection("text"), projection("hidden")
    return Qwen3Talker(_ids(config), decoder, residual, text, media, rows, voices_of(path))


def _ids(config: Mapping[str, Any]) -> Ids:
    talker = config["talker_config"]
    return Ids(
        before=(talker["codec_nothink_id"], talker["codec_think_bos_id"], talker["codec_think_eos_id"]),
        after=(talker["codec_pad_id"], talker["codec_bos_id"]),
        stop=talker["codec_eos_token_id"],
        special=_SPECIAL,
        speakers=dict(talker["speaker_id"]),
    )


@contextmanager
def _read(
    path: str | Path,
    decoder: Decoder,
    tensors: Mapping[str, tuple[int, ...]],
    linears: Mapping[str, tuple[int, int]],
) -> Iterator[tuple[Checkpoint, LinearReader]]:
    """``tensors`` and ``linears`` of the checkpoint, made dense; beside them lie those of its other parts."""
    dense = "float32" if decoder.dtype == torch.float32 else "bf16"
    with torch.inference_mode(), Checkpoint(path, tensors, linears, lambda name: True) as checkpoint:
        yield checkpoint, LinearReader(checkpoint, decoder.kernels, decoder.dtype, decoder.device, dense, 64, True)
