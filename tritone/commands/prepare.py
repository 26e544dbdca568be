"""`tritone prepare`: makes or fetches the deployment's checkpoint and voice, so that a start need not."""

from __future__ import annotations

import argparse

from tritone.cache import default_cache
from tritone.commands import launch
from tritone.commands.terminal import ProgressLine, console
from tritone.supervisor import resolve_deployment


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("prepare", help="make or fetch checkpoint and voice", description=__doc__)
    launch.add_options(parser, server=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    deployment = launch.read_deployment(arguments)
    with ProgressLine() as progress:
        resolved = resolve_deployment(deployment, default_cache(), progress)
    console.print(f"checkpoint  {resolved.checkpoint}", soft_wrap=True)
    console.print(f"voice       {resolved.voice or 'none'}", soft_wrap=True)
    return 0
