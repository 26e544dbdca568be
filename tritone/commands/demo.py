"""`tritone demo`: from nothing to a spoken answer. Prepares, starts a server, asks, shows how fast it was, and stops."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.table import Table

from tritone.client import Client
from tritone.commands import ask, launch
from tritone.commands.terminal import console

QUESTION = "Write two short sentences about the sea."
ANSWER_TOKENS = 60
REPETITION_PENALTY = 1.1
"""The demo checkpoint is small and repeats itself without it."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("demo", help="start, ask one question, write out/demo.wav, stop", description=__doc__)
    parser.add_argument("text", nargs="?", default=QUESTION, help="(%(default)s)")
    parser.add_argument("--wav", type=Path, default=Path("out/demo.wav"), help="(%(default)s)")
    launch.add_options(parser, server=False)
    ask.add_sampling_options(parser)
    parser.set_defaults(run=run, max_tokens=ANSWER_TOKENS, temperature=0.0, repetition_penalty=REPETITION_PENALTY)


def run(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    for port in ("http_port", "grpc_port", "metrics_port"):
        setattr(arguments, port, 0)
    deployment = launch.read_deployment(arguments)
    with launch.running(deployment) as server:
        ready = time.monotonic() - began
        # The command line's --voice names the deployment's voice here, not the request's.
        options = ask.request_options(arguments)
        options.pop("voice", None)
        speaks = server.deployment.voice is not None
        console.print(f"\n[bold]{arguments.text}[/]")
        with Client(server.grpc_url) as client:
            stream = client.chat(arguments.text, model="omni" if speaks else "chat", **options)
            answer = ask.show(stream, arguments.wav if speaks else None)
        began = time.monotonic()
    console.print(_table(answer, ready, time.monotonic() - began))
    if speaks:
        console.print(f"the speech: {arguments.wav} ({answer.audio_seconds:.1f} s)", soft_wrap=True)
    return 0


def _table(answer: ask.Answer, ready: float, stop: float) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")

    def row(name: str, value: float | None, form: str) -> None:
        table.add_row(name, "-" if value is None else form.format(value))

    row("time to first text", answer.first_text, "{:.3f} s")
    if answer.samples:
        row("time to first audio", answer.first_audio, "{:.3f} s")
        row("real-time factor", answer.real_time_factor, "{:.2f}")
    row("tokens/s", answer.tokens_per_second, "{:.1f}")
    row("tokens", float(answer.completion_tokens), "{:.0f}")
    row("server ready after", ready, "{:.1f} s")
    row("server stopped in", stop, "{:.1f} s")
    return table
