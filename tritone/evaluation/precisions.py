"""What is compared: numbers of weights, activations, and keys and values, by the names of the command line.

``WEIGHTS[-gGROUP][-METHOD][+wide][+kv-fp8]``, or the directory of a checkpoint in place of the first part:

- weights: float32, bf16, fp8, int8, int4, nvfp4, or ``stored`` (as the evaluated checkpoint holds them);
- ``-g64``: INT4 weights with one scale (64 where nothing is said); ``-channel``: a whole row;
- method: rtn (where nothing is said), awq or gptq;
- ``+wide``: INT4 and INT8 weights meet bfloat16 activations; without it activations are rounded to INT8, row by row;
- ``+kv-fp8``: e4m3 keys and values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from quantization.quantize import METHODS
from quantization.rounding import PER_CHANNEL
from tritone.errors import bad

DEFAULT = ("bf16", "bf16+kv-fp8", "fp8", "int8", "int8+wide", "int4-g64", "int4-g64-gptq")
QUICK = ("bf16", "bf16+kv-fp8", "int8", "int4-g64")
ALL = (
    *DEFAULT,
    "int4-g64-awq",
    "float32+kv-fp8",
    "int8+kv-fp8",
    "int4-g64+wide",
    "int4-g64-gptq+wide",
    "nvfp4",
)
DENSE = ("float32", "bf16")
INTEGERS = ("int8", "int4")
_NAME = re.compile(r"(float32|bf16|stored|fp8|int8|nvfp4|int4)(?:-(?:g(\d+)|(channel)))?(?:-([a-z]+))?")
_TITLES = {"bf16": "bfloat16", "fp8": "FP8 e4m3", "int8": "INT8", "int4": "INT4", "nvfp4": "NVFP4, widened to float32"}
_METHODS = {"rtn": "to nearest", "awq": "AWQ", "gptq": "GPTQ"}


@dataclass(frozen=True)
class Precision:
    """One row of the evaluation. ``integers`` rounds activations to INT8 where weights are INT8 or INT4.

    ``directory`` is a checkpoint whose weights are taken as it stores them (``weights`` is then "stored").
    """

    name: str
    weights: str
    method: str = "rtn"
    group: int = 64
    kv: str = "bf16"
    integers: bool = True
    directory: Path | None = None

    @classmethod
    def parse(cls, name: str) -> Precision:
        """Raises ``InvalidArgument`` naming what is wrong."""
        first, integers, kv = name, True, "bf16"
        while first.endswith(("+wide", "+kv-fp8")):
            first, _, ending = first.rpartition("+")
            integers, kv = (False, kv) if ending == "wide" else (integers, "fp8")
        if "/" in first or Path(first).is_dir():
            if not Path(first).is_dir():
                raise bad("precisions", name, "a directory that exists, or WEIGHTS[-gGROUP][-METHOD]")
            return cls(name, "stored", kv=kv, integers=integers, directory=Path(first))
        match = _NAME.fullmatch(first)
        if match is None:
            allowed = "WEIGHTS[-gGROUP][-METHOD][+wide][+kv-fp8] with weights float32, bf16, fp8, int8, int4, nvfp4 or stored"
            raise bad("precisions", name, f"{allowed}, a checkpoint's directory, default, quick or all")
        weights, group, channel, method = match[1], match[2], match[3], match[4] or "rtn"
        if (group or channel) and weights != "int4":
            raise bad("precisions", name, "a group with int4 weights only")
        if method not in METHODS.get(weights, ("rtn",)):
            raise bad("precisions", name, f"for {weights}: {', '.join(METHODS.get(weights, ('no method',)))}")
        if not integers and weights not in (*INTEGERS, "stored"):
            raise bad("precisions", name, "+wide with int8, int4 or stored weights")
        if weights in ("float32", "nvfp4") and kv == "bf16":
            kv = "float32"
        return cls(name, weights, method, PER_CHANNEL if channel else int(group or 64), kv, integers)

    @property
    def wide(self) -> bool:
        """Whether activations are float32."""
        return self.weights in ("float32", "nvfp4")

    def describe(self) -> dict[str, str]:
        """Weights, activations, and keys and values in words."""
        if self.weights == "stored":
            weights = "as stored"
        else:
            weights = _TITLES.get(self.weights, self.weights)
            if self.weights == "int4":
                weights += " per channel" if self.group == PER_CHANNEL else f" groups of {self.group}"
            if self.weights not in DENSE:
                weights += f", {_METHODS[self.method]}"
        activations = "float32" if self.wide else "bfloat16"
        if self.integers and self.weights in INTEGERS:
            activations = "INT8 per token"
        elif self.integers and self.weights == "stored":
            activations = "INT8 per token with integer weights, else bfloat16"
        kv = {"bf16": "bfloat16", "fp8": "FP8 e4m3"}.get(self.kv, self.kv)
        return {"weights": weights, "activations": activations, "kv": kv}


def parse_precisions(text: str) -> list[Precision]:
    """A comma-separated list; ``default``, ``quick`` and ``all`` stand for lists of their own. Repeated names count once."""
    names: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        names += {"default": DEFAULT, "quick": QUICK, "all": ALL}.get(part, (part,))
    if not all(names):
        raise bad("precisions", text, "names with commas between them")
    return [Precision.parse(name) for name in dict.fromkeys(names)]
