"""`tritone speak`: a given text, spoken into a file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tritone.client import Client
from tritone.commands import ask
from tritone.commands.terminal import errors


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("speak", help="speak a given text into a WAV file", description=__doc__)
    parser.add_argument("text", help="what to say; - reads it from standard input")
    parser.add_argument("--wav", type=Path, default=Path("out/speech.wav"), help="(%(default)s)")
    ask.add_server_options(parser)
    ask.add_speech_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    text = sys.stdin.read() if arguments.text == "-" else arguments.text
    with Client(arguments.url, arguments.timeout) as client:
        answer = ask.show(client.speak(text, **ask.request_options(arguments)), arguments.wav, echo=False)
    factor = answer.real_time_factor
    speed = f", {1 / factor:.1f} times as fast as spoken" if factor else ""
    errors.print(f"{arguments.wav}: {answer.audio_seconds:.1f} s of speech in {answer.total:.1f} s{speed}", style="dim")
    return 0
