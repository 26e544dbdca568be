"""From the name of a precision to a runner with its weights in memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from quantization.checkpoints import detect
from quantization.quantize import Settings, quantize_checkpoint
from tritone.errors import bad
from tritone.evaluation.precisions import DENSE, Precision
from tritone.evaluation.runner import Runner
from tritone.evaluation.store import checkpoint_key, digest
from tritone.models.decoder import key_offsets, load_decoder, load_kv_scales
from tritone.models.decoder.checkpoint import readable
from tritone.text.tokenizer import load_tokenizer

Report = Callable[[int, int], None]


def is_quantized(checkpoint: Path) -> bool:
    """Whether ``config.json`` says that the weights are quantised."""
    return bool(json.loads((checkpoint / "config.json").read_text(encoding="utf-8")).get("quantization_config"))


def check_grid(precision: Precision, checkpoint: Path, grid: int | None) -> None:
    """Refuses INT4 in groups that lie inside those of the 4-bit grid that the reference's weights are on already."""
    groups = []
    if precision.weights == "int4":
        groups = [precision.group]
    elif precision.weights == "stored":
        directory = precision.directory or checkpoint
        with readable():
            scheme = detect(json.loads((directory / "config.json").read_text(encoding="utf-8")))
        groups = [target.storage.group for target in scheme.targets if target.storage.weights == "int4"]
    if grid is not None and any(group > 0 and grid % group == 0 for group in groups):
        raise bad(
            "precisions",
            precision.name,
            f"INT4 in groups that do not divide {grid}: the reference's weights already lie on a 4-bit grid of groups of "
            f"{grid}, so next to nothing would be lost, which says nothing about other weights",
        )


class Candidates:
    """Loads precisions of ``checkpoint``; those that are quantised offline are written into ``work`` once.

    ``calibration`` gives the text for AWQ and GPTQ.
    """

    def __init__(self, checkpoint: Path, work: Path, calibration: Callable[[], Path]) -> None:
        self._checkpoint = checkpoint
        self._work = work
        self._calibration = calibration

    def source(self, precision: Precision, progress: Report) -> Path:
        """The checkpoint that the precision is loaded from; quantises first where that is needed."""
        if precision.directory is not None:
            return precision.directory
        if precision.weights in (*DENSE, "stored") or (precision.method == "rtn" and precision.weights != "nvfp4"):
            return self._checkpoint
        settings = Settings(precision.weights, group=precision.group, method=precision.method)
        text = self._calibration() if settings.needs_text else None
        read = None if text is None else hashlib.sha256(text.read_bytes()).hexdigest()
        key = digest([asdict(settings), checkpoint_key(self._checkpoint), read])
        with readable():
            return quantize_checkpoint(
                self._checkpoint,
                self._work / f"{precision.weights}-{precision.method}-{key[:8]}",
                settings,
                text,
                lambda done, total, unit: progress(done, total),
            )

    def load(self, precision: Precision, source: Path, positions: int, progress: Report) -> Runner:
        """``source`` is what :meth:`source` gave; ``positions``: tokens of the longest sequence."""
        dtype = torch.float32 if precision.wide else torch.bfloat16
        weights = precision.weights
        if source != self._checkpoint or weights == "stored":
            weights = "float32" if weights == "nvfp4" else "auto"
        decoder = load_decoder(
            source,
            dtype=dtype,
            progress=progress,
            max_positions=positions,
            weights=weights,
            group=precision.group,
            integers=precision.integers,
        )
        if precision.kv == "fp8":
            scales = load_kv_scales(source, decoder.config)
            return Runner(decoder, torch.bfloat16, scales, key_offsets(decoder, load_tokenizer(source), scales))
        return Runner(decoder, torch.float32 if precision.kv == "float32" else torch.bfloat16)
