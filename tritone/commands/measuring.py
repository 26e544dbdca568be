"""`tritone doctor --measure`: the precisions that this machine runs fastest."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.box import SIMPLE
from rich.table import Table

from tritone.cache import default_cache
from tritone.commands import launch
from tritone.commands.terminal import ProgressLine, console
from tritone.deployment import Deployment
from tritone.errors import bad
from tritone.supervisor import resolve_deployment
from tritone.supervisor.resolve import usable_cores
from tritone.supervisor.run_directory import remove_stale
from tritone.supervisor.server import STAGE_ENVIRONMENT

if TYPE_CHECKING:
    from tritone.measure.measure import Measured
    from tritone.measure.pairings import Load

SHOWN = 10


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measuring")
    group.add_argument("--measure", action="store_true", help="time all precisions and choose the fastest accurate enough")
    group.add_argument("--prompt", type=int, default=512, help="tokens of the request that is timed (%(default)s)")
    group.add_argument("--answer", type=int, default=128, help="tokens of its answer (%(default)s)")
    group.add_argument("--batch", type=int, default=1, help="answers decoded at once (%(default)s)")
    group.add_argument("--write", type=Path, metavar="FILE", help="write the deployment there instead of printing it")


def run(arguments: argparse.Namespace) -> int:
    for name in ("prompt", "answer", "batch"):
        if getattr(arguments, name) < (2 if name == "answer" else 1):
            raise bad(f"--{name}", getattr(arguments, name), "at least 2" if name == "answer" else "at least 1")
    if arguments.write is not None and not arguments.write.absolute().parent.is_dir():
        raise bad("--write", str(arguments.write), "a file in a directory that exists")
    deployment = launch.read_deployment(arguments)
    remove_stale()
    # As in the processes of a server. OpenMP reads it when torch is loaded.
    os.environ.update(STAGE_ENVIRONMENT)
    from tritone.measure.measure import chosen_deployment, measure
    from tritone.measure.pairings import Load

    load = Load(arguments.prompt, arguments.answer, arguments.batch)
    with ProgressLine() as progress:
        resolved = resolve_deployment(deployment.model_copy(update={"voice": None}), default_cache(), progress)
        measured = measure(resolved, load, progress)
    text = _as_yaml(chosen_deployment(deployment, measured.choice.chosen.pairing), measured, load)
    if arguments.json:
        print(json.dumps(_as_json(measured, load), indent=2))
    else:
        console.print(_table(measured, load, deployment.accuracy.max_perplexity_increase))
    if arguments.write is not None:
        arguments.write.write_text(text)
        if not arguments.json:
            console.print(f"written: {arguments.write}", soft_wrap=True)
    elif not arguments.json:
        console.print(text, markup=False, soft_wrap=True)
    return 0


def _table(measured: Measured, load: Load, limit: float) -> Table:
    """The fastest ones, all whose accuracy was looked at, and the dense one."""
    increases = measured.choice.increases
    others = f", {load.batch} at once" if load.batch > 1 else ""
    title = f"a request of {load.prompt} + {load.answer} tokens{others}; perplexity may rise by {limit:g} %"
    table = Table(title=title, box=SIMPLE)
    for column in ("", "prefill", "decode", "kv", "s", "prompt", "answer", "perplexity +%"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for number, one in enumerate(measured.timed):
        if number >= SHOWN and one.pairing not in increases and one != measured.dense:
            continue
        found = increases.get(one.pairing)
        cost = "" if found is None else f"{found.value:.2f} ({found.low:.2f}…{found.high:.2f})"
        mark = "*" if one == measured.choice.chosen else ""
        names = (one.pairing.prefill, one.pairing.decode, one.pairing.kv)
        table.add_row(mark, *names, *(f"{seconds:.3f}" for seconds in (one.seconds, one.prefill, one.decode)), cost)
    return table


def _as_yaml(deployment: Deployment, measured: Measured, load: Load) -> str:
    chosen, increase = measured.choice.chosen, measured.choice.increases[measured.choice.chosen.pairing]
    always = {"name": deployment.name, "checkpoint": deployment.checkpoint, "voice": deployment.voice}
    data = always | deployment.model_dump(exclude_defaults=True)
    others = f", {load.batch} at once," if load.batch > 1 else ""
    lines = (
        f"# Precisions chosen by `tritone doctor --measure` on {usable_cores()} cores: a request of {load.prompt} tokens with",
        f"# an answer of {load.answer}{others} takes {chosen.seconds:.2f} s ({measured.dense.seconds:.2f} s with "
        f"{measured.dense.pairing.decode} throughout); perplexity rises by {increase.value:.2f} %.",
    )
    return "\n".join(lines) + "\n" + yaml.safe_dump(data, sort_keys=False)


def _as_json(measured: Measured, load: Load) -> dict[str, Any]:
    increases = measured.choice.increases
    return {
        "load": vars(load),
        "chosen": vars(measured.choice.chosen.pairing),
        "text": measured.source,
        "pairings": [
            {
                **vars(one.pairing),
                "seconds": one.seconds,
                "prefill_seconds": one.prefill,
                "hand_over_seconds": one.hand_over,
                "decode_seconds": one.decode,
                "perplexity_increase_percent": vars(increases[one.pairing]) if one.pairing in increases else None,
            }
            for one in measured.timed
        ],
    }
