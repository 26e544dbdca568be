"""Rotary positions: frequencies, the table of cosines and sines, and positions of three axes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritone.errors import bad
from tritone.kernels import RopeTable

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_CHUNKED = {"qwen2_5_omni_text": (16, 24, 24), "qwen2_5_omni_talker": (16, 24, 24)}
_INTERLEAVED = {"qwen3_omni_moe_text": (24, 20, 20), "qwen3_omni_moe_talker_text": (24, 20, 20)}


def frequencies_of(config: Any, head_dim: int) -> tuple[tuple[float, ...], float]:
    """Radians a position, [head_dim / 2] values exact in float32, and what multiplies the cosines and sines."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise bad("rope_parameters.rope_type", kind, ", ".join(ROPE_TYPES))
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise bad("rope_parameters.partial_rotary_factor", parameters["partial_rotary_factor"], "1.0")
    if kind == "default":
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies, scaling = 1.0 / (parameters["rope_theta"] ** steps), 1.0
    else:
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return tuple(frequencies.float().tolist()), float(scaling)


def axes_of(config: Any, head_dim: int) -> tuple[int, ...] | None:
    """Which axis of a position (0 time, 1 height, 2 width) each of the head_dim / 2 frequencies turns by.

    None where positions have one axis. Qwen2.5-Omni gives each axis a stretch of frequencies; Qwen3-Omni lets height and width
    take every third from the second and third on, as many as their section says, and time the rest.
    """
    kind, half = config.model_type, head_dim // 2
    if kind not in _CHUNKED and kind not in _INTERLEAVED:
        return None
    section = config.rope_parameters.get("mrope_section", {**_CHUNKED, **_INTERLEAVED}[kind])
    if len(section) != 3 or sum(section) != half or min(section) < 0:
        raise bad("rope_parameters.mrope_section", list(section), f"three counts that sum to half of head_dim ({half})")
    if kind in _CHUNKED:
        return tuple(axis for axis, count in enumerate(section) for _ in range(count))
    axes = [0] * half
    for axis in (1, 2):
        for index in range(axis, min(section[axis] * 3, half), 3):
            axes[index] = axis
    return tuple(axes)


def rope_table(frequencies: tuple[float, ...], scaling: float, positions: int, device: torch.device) -> RopeTable:
    """Cosines and sines of position times frequency, float32 [positions, head_dim / 2], times ``scaling``."""
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * torch.tensor(frequencies, dtype=torch.float32)
    return RopeTable((angles.cos() * scaling).to(device), (angles.sin() * scaling).to(device))


def rope_rows(table: RopeTable, axes: tuple[int, ...], positions: Tensor) -> RopeTable:
    """One row for each token, taken from ``table`` by its ``positions`` int32 [3, T]: float32 [T, head_dim / 2].

    Raises ``IndexError`` for a position outside the table.
    """
    limit = table.cos.shape[0]
    if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < limit:
        raise IndexError(f"positions: a value is outside the {limit} positions allowed")
    rows = positions.long()[list(axes)].T.contiguous()  # [T, head_dim / 2]
    return RopeTable(table.cos.gather(0, rows), table.sin.gather(0, rows))
