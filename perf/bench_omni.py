"""A tiny Qwen3-Omni under concurrent speech requests through the whole server, in three systems.

- ``overlapped``: the shipped cascade;
- ``without overlap``: the same stages, but Talker and VoiceBox begin when the stage before has said everything. Text and chunks
  of sound still reach the client as they are made, so overlap is all that differs (``perf/omni/without_overlap.py``);
- ``transformers``: its own ``generate``, with text as it is made, in one Triton model that takes request by request
  (``perf/omni/reference``). Server, protocol, client and threads are the same, so what differs is what is behind them.

All answers are greedy and equally long in text and sound. The systems take turns, burst by burst; questions alternate. Since
checkpoint and speech leave nothing to chance, all answers to one question must have the same sound, to the bit, in both
cascades: alone, among equal ones, and after another question. The first requests after a start are compared with later ones.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from perf.common import RESULTS, Bar, Spread, finish, is_quick, ratios
from perf.omni.load import Burst, ask, ask_together, figures
from perf.omni.plot import plot
from perf.omni.serving import SYSTEMS, make_checkpoint, server
from tritone.client import Client
from tritone.commands.terminal import ProgressLine
from tritone.supervisor import Server

TOKENS = 64
FRAMES = 192
"""15 s of speech: English has about four tokens a second."""
QUESTIONS = ("Hello, how are you today?", "Describe this sound in one sentence please.")
MODES = ("latency", "quality")
WIDTH = 132
"""Columns that the table needs."""


@dataclass(frozen=True)
class Plan:
    """``bursts``: by how many requests are in one, how many of both cascades and of transformers; ``starts`` of a server, and
    ``later`` requests beside each first one."""

    bursts: dict[int, tuple[int, int]]
    starts: int
    later: int


FULL = Plan({1: (7, 3), 4: (5, 2), 16: (5, 1), 64: (3, 1)}, starts=3, later=5)
QUICK = Plan({1: (2, 1), 2: (1, 1)}, starts=1, later=3)


def first_and_later(running: Server, count: int) -> dict[str, dict[str, float]]:
    """Seconds to the first audio of the first request of each mode after a start, and of the median of ``count`` later ones."""
    found = {}
    with Client(running.grpc_url) as client:
        client.is_ready()
        firsts = {mode: ask(client, QUESTIONS[0], TOKENS, audio_mode=mode).first_audio for mode in MODES}
        for mode, first in firsts.items():
            later = [ask(client, QUESTIONS[0], TOKENS, audio_mode=mode).first_audio for _ in range(count)]
            found[mode] = {"first": first, "later": median(later)}
    return found


def after_start(measured: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mode in MODES:
        first, later = ([one[mode][which] for one in measured] for which in ("first", "later"))
        found[mode] = {
            "first s": vars(Spread.of(first)), "later s": vars(Spread.of(later)), "first / later": vars(ratios(first, later))
        }
    return found


class Bench:
    def __init__(self, servers: dict[str, Server], progress: ProgressLine) -> None:
        self.servers, self.progress = servers, progress
        self.sounds: dict[str, set[str]] = {question: set() for question in QUESTIONS}
        """Of each question, the digests of what both cascades said."""

    def compare(self, streams: int, rounds: int, reference_rounds: int) -> dict[str, Any]:
        bursts: dict[str, list[Burst]] = {system: [] for system in self.servers}
        done, total = 0, 2 * rounds + reference_rounds
        for number in range(rounds):
            question = QUESTIONS[number % len(QUESTIONS)]
            for system, running in self.servers.items():
                if system == "transformers" and number >= reference_rounds:
                    continue
                self.progress(f"{streams} at once", done, total)
                done += 1
                burst = ask_together(running.grpc_url, streams, question, TOKENS)
                self._check(system, question, burst)
                bursts[system].append(burst)
        found: dict[str, Any] = {system: figures(made) for system, made in bursts.items()}
        middles = {system: [burst.middle("first_audio") for burst in made] for system, made in bursts.items()}
        ours = middles["overlapped"]
        for system in ("without overlap", "transformers"):
            found[f"first audio, overlapped / {system}"] = vars(ratios(ours[: len(middles[system])], middles[system]))
        return found

    def _check(self, system: str, question: str, burst: Burst) -> None:
        """That answers are as long as said and, without overlap, that no sound comes before the text's end."""
        for answer in burst.answers:
            assert abs(answer.audio_seconds / (FRAMES * 0.08) - 1) < 0.01, (system, answer)
            assert system == "overlapped" or answer.first_audio > answer.last_text, (system, answer)
        if system != "transformers":
            self.sounds[question].update(answer.sound for answer in burst.answers)


def growth(streams: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Of each system, first audio at each number of streams beside that of one alone."""

    def middle(row: Any, system: str) -> float:
        value: float = row[system]["first audio s"]["p50"]["median"]
        return value

    alone = streams["1"]
    return {system: {n: middle(row, system) / middle(alone, system) for n, row in streams.items()} for system in SYSTEMS}


def bars(results: dict[str, Any]) -> list[Bar]:
    """The worst of all numbers of streams, of both modes, of all questions."""
    overlap = max(row["first audio, overlapped / without overlap"]["median"] for row in results["streams"].values())
    first = max(row["first / later"]["median"] for row in results["after a start"].values())
    return [
        Bar("first audio / without overlap", overlap, "at most", 1 / 3),
        Bar("first audio after a start / later", first, "at most", 1.5),
        Bar("different sounds of one question", max(results["sounds of each question"].values()), "at most", 1),
    ]


def show(results: dict[str, Any], console: Console) -> None:
    workload = f"{results['tokens']} tokens and {results['seconds of speech']:.1f} s of speech each"
    table = Table(title=f"{workload}; median (range over bursts), p95")
    for column in ("", "first text s", "first audio s", "audio s / s", "real-time factor", "ours / its"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for streams, row in results["streams"].items():
        for system in SYSTEMS:
            found = row[system]
            text, audio = found["first text s"], found["first audio s"]
            middle = audio["p50"]
            ratio = row.get(f"first audio, overlapped / {system}")
            table.add_row(
                f"{streams}, {system}",
                f"{text['p50']['median']:.2g}, {text['p95']:.2g}",
                f"{middle['median']:.2g} ({middle['low']:.2g}–{middle['high']:.2g}), {audio['p95']:.2g}",
                f"{found['audio seconds / s']['median']:.1f}",
                f"{found['real-time factor']['median']:.2g}",
                f"{ratio['median']:.2g}" if ratio else "",
                end_section=system == SYSTEMS[-1],
            )
    console.print(table)
    for system, by_streams in results["growth of first audio"].items():
        grown = ", ".join(f"{n} at once {value:.1f} x" for n, value in by_streams.items())
        console.print(f"first audio beside one stream, {system}: {grown}")
    for mode, row in results["after a start"].items():
        console.print(f"{mode}: first request after a start / later ones {Spread(**row['first / later'])}")


def main() -> None:
    quick = is_quick()
    plan = QUICK if quick else FULL
    begun = time.monotonic()
    directory = Path(tempfile.mkdtemp(prefix="bench-omni-"))
    results: dict[str, Any] = {"tokens": TOKENS, "seconds of speech": FRAMES * 0.08, "streams": {}}
    try:
        checkpoint = make_checkpoint(directory, FRAMES)
        with ExitStack() as stack, ProgressLine() as progress:
            firsts = []
            for number in range(plan.starts - 1):
                progress("starts", number, plan.starts)
                with server("overlapped", checkpoint, directory) as running:
                    firsts.append(first_and_later(running, plan.later))
            servers = {}
            for system in SYSTEMS:
                progress(f"starting {system}")
                servers[system] = stack.enter_context(server(system, checkpoint, directory))
                if system == "overlapped":
                    firsts.append(first_and_later(servers[system], plan.later))
            results["after a start"] = after_start(firsts)
            bench = Bench(servers, progress)
            for streams, rounds in plan.bursts.items():
                results["streams"][str(streams)] = bench.compare(streams, *rounds)
            results["sounds of each question"] = {question: len(found) for question, found in bench.sounds.items()}
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    results["growth of first audio"] = growth(results["streams"])
    results["seconds taken"] = round(time.monotonic() - begun)
    show(results, Console(width=max(WIDTH, Console().width)))
    plot(results, RESULTS / f"omni{'.quick' if quick else ''}.png")
    finish("omni", results, bars(results))


if __name__ == "__main__":
    main()
