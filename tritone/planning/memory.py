"""Sizes of memory as people write them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tritone.errors import bad

_UNITS = {"B": 1} | {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")


@dataclass(frozen=True)
class Memory:
    """What all stages of a deployment share, and what follows from where it is.

    ``option`` and ``text`` are how it was asked for. ``dense`` is the type (bf16, float32) that a stage's ``dtype: auto``
    becomes. ``packed_head``: a tied embedding is held a second time, packed for the head, as on CPUs.
    """

    option: str
    text: str
    nbytes: int
    dense: str = "bf16"
    packed_head: bool = False


def parse_size(field: str, text: str) -> int:
    """Bytes of ``141GB`` (powers of 1000) or ``80GiB`` (of 1024). InvalidArgument naming ``field`` for all else."""
    found = _SIZE.fullmatch(text.strip())
    units = {name.lower(): size for name, size in _UNITS.items()}
    unit = units.get(found[2].lower()) if found else None
    nbytes = int(float(found[1]) * unit) if found and unit else 0
    if nbytes < 1:
        raise bad(field, text, "a size above 0 with a unit (KB, MB, GB, TB or KiB, MiB, GiB, TiB), such as 141GB or 80GiB")
    return nbytes


def shown(nbytes: int) -> str:
    """Three digits or more, in powers of 1000: ``61.1 GB``."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"
