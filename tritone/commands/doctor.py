"""`tritone doctor`: what this machine has, what is missing, and how to get it. Exit code 1 when something needed is missing.

With --measure it times every pairing of prefill's and decode's precisions on this machine instead, takes the fastest that
costs at most accuracy.max_perplexity_increase, and prints or writes the deployment with it. With --plan it says what a
deployment takes of a memory, from the checkpoint's config.json alone. Exit code 1 when that is too small.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from tritone.commands import launch, measuring, planning
from tritone.commands.checks import Check, run_checks
from tritone.commands.terminal import console

_MARKS = {"ok": "[green]ok[/]     ", "missing": "[bold red]missing[/]", "note": "[yellow]note[/]   "}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("doctor", help="say what is missing on this machine, and how to get it", description=__doc__)
    launch.add_options(parser)
    parser.add_argument("--json", action="store_true", help="for programs")
    measuring.add_options(parser)
    planning.add_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.plan is not None:
        return planning.run(arguments)
    planning.refuse_without_plan(arguments)
    if arguments.measure:
        return measuring.run(arguments)
    checks = run_checks(launch.read_deployment(arguments))
    missing = [check for check in checks if check.state == "missing"]
    if arguments.json:
        print(json.dumps({"ok": not missing, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        for check in checks:
            _print(check)
        console.print(f"\n{len(missing)} missing" if missing else "\nnothing is missing", style="bold")
    return 1 if missing else 0


def _print(check: Check) -> None:
    console.print(f"{_MARKS[check.state]}  {check.name:<15}", end="")
    console.print(check.detail, markup=False, soft_wrap=True)
    if check.fix:
        console.print(f"{'':<26}-> {check.fix}", markup=False, soft_wrap=True)
