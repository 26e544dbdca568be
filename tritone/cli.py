"""The command line: `tritone serve | status | chat | speak | demo | prepare | quantize | evaluate | doctor`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from tritone.commands import chat, demo, doctor, evaluate, prepare, quantize, serve, speak, status
from tritone.errors import TritoneError

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Errors that a user can act on are one line, not a traceback."""
    parser = argparse.ArgumentParser(prog="tritone", description="Serves voice-and-text models on Triton Inference Server.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (serve, status, chat, speak, demo, prepare, quantize, evaluate, doctor):
        command.add_parser(commands)
    parsed = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = parsed.run
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return run(parsed)
    except TritoneError as error:
        print(f"tritone: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`| head`); Python's own flush at the exit would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
