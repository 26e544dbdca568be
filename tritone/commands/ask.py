"""Options of a request on the command line, and one answer streamed to the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tritone.client import IDLE_SECONDS, SAMPLE_RATE, Stream
from tritone.commands.sound import WaveFile
from tritone.commands.terminal import errors

DEFAULT_URL = "127.0.0.1:8001"
_OPTIONS: tuple[tuple[str, type, str], ...] = (
    ("max-tokens", int, "longest answer, in tokens"),
    ("temperature", float, "0 is greedy"),
    ("top-p", float, ""),
    ("top-k", int, ""),
    ("min-p", float, ""),
    ("repetition-penalty", float, ""),
    ("presence-penalty", float, ""),
    ("frequency-penalty", float, ""),
    ("seed", int, "the same seed gives the same answer"),
)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help="the server's gRPC address (%(default)s)")
    parser.add_argument("--timeout", type=float, default=IDLE_SECONDS, metavar="SECONDS", help="longest silence (%(default)s)")


def add_speech_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--voice", help="who speaks")
    parser.add_argument("--speed", type=float, help="1 is normal")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    for name, kind, text in _OPTIONS:
        parser.add_argument(f"--{name}", type=kind, help=text)
    parser.add_argument("--stop", action="append", help="text that ends the answer; may be repeated")


def request_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Those that were given; the server has its own defaults for the others."""
    names = [name.replace("-", "_") for name, _, _ in _OPTIONS] + ["stop", "voice", "speed"]
    return {name: value for name in names if (value := getattr(arguments, name, None)) is not None}


@dataclass
class Answer:
    """What came, and when: seconds since the request was sent."""

    text: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    samples: int = 0
    first_text: float | None = None
    last_text: float | None = None
    first_audio: float | None = None
    last_audio: float | None = None
    total: float = 0.0

    @property
    def audio_seconds(self) -> float:
        return self.samples / SAMPLE_RATE

    @property
    def completion_tokens(self) -> int:
        return int(self.info.get("usage", {}).get("completion_tokens", 0))

    @property
    def tokens_per_second(self) -> float | None:
        """Of the stream after its first token."""
        if self.first_text is None or self.last_text is None or self.last_text <= self.first_text:
            return None
        return (self.completion_tokens - 1) / (self.last_text - self.first_text)

    @property
    def real_time_factor(self) -> float | None:
        """Seconds from the request to the last audio, for one second of speech; below 1 is faster than it is spoken."""
        return self.last_audio / self.audio_seconds if self.last_audio is not None and self.samples else None


def show(stream: Stream, wav: Path | None = None, *, echo: bool = True) -> Answer:
    """Prints the text as it comes and writes the speech to ``wav``. Raises RequestError; Ctrl-C cancels the request."""
    answer = Answer()
    with contextlib.ExitStack() as stack:
        stack.enter_context(stream)
        file = stack.enter_context(WaveFile(wav)) if wav is not None else None
        for event in stream:
            when = event.received - stream.started
            if event.text:
                answer.first_text = when if answer.first_text is None else answer.first_text
                answer.last_text = when
                answer.text += event.text
                if echo:
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
            if event.audio is not None and event.audio.size:
                answer.first_audio = when if answer.first_audio is None else answer.first_audio
                answer.last_audio = when
                answer.samples += event.audio.size
                if file is not None:
                    file.write(event.audio)
            if event.kind == "audio_lost":
                errors.print(f"\n{event.info.get('message', 'the speech was lost')}", style="yellow", markup=False)
            if event.kind == "end":
                answer.info = dict(event.info)
        answer.total = time.monotonic() - stream.started
    if echo:
        sys.stdout.write("\n")
        sys.stdout.flush()
    return answer
