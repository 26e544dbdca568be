"""`tritone doctor --plan`: what a deployment takes of a memory, and what fits into the rest."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from tritone.cache import default_cache
from tritone.checkpoints import find_checkpoint
from tritone.commands import launch
from tritone.commands.terminal import console
from tritone.deployment import OWN_VOICE, Deployment
from tritone.errors import TritoneError, bad
from tritone.planning import Memory, Plan, plan, read_model
from tritone.planning.memory import parse_size, shown
from tritone.planning.plan import PAGES, Stage
from tritone.supervisor.resolve import has_bfloat16


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("planning")
    group.add_argument("--plan", type=Path, metavar="DEPLOYMENT", help="say what this deployment takes; reads only config.json")
    size = group.add_mutually_exclusive_group()
    size.add_argument("--gpu-memory", metavar="SIZE", help="of one GPU that holds all stages, such as 141GB or 80GiB")
    size.add_argument("--memory", metavar="SIZE", help="of a machine without a GPU")
    group.add_argument("--context", type=int, metavar="TOKENS", help="length that sessions are counted at (the longest)")


def refuse_without_plan(arguments: argparse.Namespace) -> None:
    for name in ("gpu_memory", "memory", "context"):
        if getattr(arguments, name) is not None:
            raise bad(f"--{name.replace('_', '-')}", getattr(arguments, name), "only together with --plan DEPLOYMENT")


def run(arguments: argparse.Namespace) -> int:
    if arguments.measure:
        raise bad("--plan", str(arguments.plan), "not together with --measure")
    memory = _memory(arguments)
    if arguments.context is not None and arguments.context < 1:
        raise bad("--context", arguments.context, "at least 1")
    if arguments.deployment != launch.DEFAULT_DEPLOYMENT:
        raise bad("--deployment", str(arguments.deployment), "not together with --plan, which names the deployment itself")
    arguments.deployment = arguments.plan
    deployment = launch.read_deployment(arguments)
    cache = default_cache()
    models = {
        name: read_model(find_checkpoint(checkpoint, cache))
        for name, checkpoint in (
            ("model", deployment.checkpoint),
            ("prefill", deployment.prefill.checkpoint),
            ("decode", deployment.decode.checkpoint),
        )
        if checkpoint is not None
    }
    planned = plan(deployment, models.pop("model"), memory, arguments.context or 0, **models)
    if arguments.json:
        print(json.dumps(_as_json(planned), indent=2))
    else:
        _print(planned, deployment, str(arguments.plan))
    if shortage := planned.shortage():
        raise TritoneError(shortage, "RESOURCE_EXHAUSTED")
    return 0


def _memory(arguments: argparse.Namespace) -> Memory:
    if arguments.gpu_memory is not None:
        return Memory("--gpu-memory", arguments.gpu_memory, parse_size("--gpu-memory", arguments.gpu_memory))
    if arguments.memory is None:
        raise bad("--plan", str(arguments.plan), "together with --gpu-memory SIZE or --memory SIZE")
    dense = "bf16" if has_bfloat16() else "float32"
    return Memory("--memory", arguments.memory, parse_size("--memory", arguments.memory), dense, packed_head=True)


def _print(planned: Plan, deployment: Deployment, source: str) -> None:
    def line(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    line(f"{source}: {planned.model.architecture} in {planned.memory.text}")
    line("Tables: what fits, by the precision of weights and of keys and values, into a")
    line(f"stage that gets all that the others leave. A session has {planned.context:,} tokens.")
    line("* is what the deployment says.")
    for stage in planned.stages:
        line(f"\n{stage.name}: {shown(stage.nbytes)}")
        for part in stage.parts:
            line(f"  {part.name}: {part.parameters:,} parameters")
        if stage.kv_bytes:
            sizes = ", ".join(f"{kind} {size:,} bytes" for kind, size in stage.kv_bytes.items())
            line(f"  keys and values of a token: {sizes}")
        for pool in stage.pools:
            line(f"  pool of {pool.name}: {pool.blocks:,} blocks of {pool.block_bytes:,} bytes, {shown(pool.nbytes)}")
        if stage.kv:
            held = planned.sessions(stage, tokens := _deployed_tokens(stage))
            line(f"  its pages hold {tokens:,} tokens ({stage.kv}): {held:,} sessions")
        console.print(_table(planned, stage))
    left = planned.memory.nbytes - planned.nbytes
    line(f"in all: {shown(planned.nbytes)} of {shown(planned.memory.nbytes)}" + (f", {shown(left)} left" if left >= 0 else ""))
    if deployment.voice not in (None, OWN_VOICE):
        line(f"not counted: the voice {deployment.voice}")


def _table(planned: Plan, stage: Stage) -> Table:
    """For each precision of the weights: what fits if the stage gets all that the others leave. At most 72 columns wide."""
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("weights", no_wrap=True)
    columns = [f"{what}\n{kv}" for what in ("tokens", "sessions") for kv in stage.kv_bytes]
    for column in ("size", *columns):
        table.add_column(column, justify="right", no_wrap=True)
    for weights, size in stage.weight_bytes.items():
        fits = [planned.tokens(stage, weights, kv) for kv in stage.kv_bytes]
        counts = [f"{count:,}" for count in (*fits, *(planned.sessions(stage, tokens) for tokens in fits))]
        table.add_row(f"{'*' if weights == stage.weights else ' '} {weights}", shown(size), *counts)
    return table


def _deployed_tokens(stage: Stage) -> int:
    return sum(pool.blocks for pool in stage.pools if pool.name == PAGES) * stage.page_size


def _as_json(planned: Plan) -> dict[str, Any]:
    left = planned.memory.nbytes - planned.nbytes
    return {
        "architecture": planned.model.architecture,
        "memory_bytes": planned.memory.nbytes,
        "context": planned.context,
        "bytes": planned.nbytes,
        "left_bytes": left,
        "fits": left >= 0,
        "stages": [_stage_as_json(planned, stage) for stage in planned.stages],
    }


def _stage_as_json(planned: Plan, stage: Stage) -> dict[str, Any]:
    fits = {
        weights: {kv: planned.tokens(stage, weights, kv) for kv in stage.kv_bytes} for weights in stage.weight_bytes
    }
    tokens = _deployed_tokens(stage)
    return {
        "name": stage.name,
        "parts": [
            {"name": part.name, "parameters": part.parameters, "quantisable_parameters": part.quantisable}
            for part in stage.parts
        ],
        "weights": stage.weights,
        "weight_bytes": dict(stage.weight_bytes),
        "kv": stage.kv or None,
        "kv_bytes_per_token": dict(stage.kv_bytes),
        "pools": [
            {"name": pool.name, "blocks": pool.blocks, "block_bytes": pool.block_bytes, "bytes": pool.nbytes}
            for pool in stage.pools
        ],
        "pool_tokens": tokens,
        "pool_sessions": planned.sessions(stage, tokens),
        "tokens_that_fit": fits,
        "sessions_that_fit": {
            weights: {kv: planned.sessions(stage, count) for kv, count in row.items()} for weights, row in fits.items()
        },
        "bytes": stage.nbytes,
    }
