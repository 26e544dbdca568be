"""Decode and prefill speed of the engine beside `transformers`, and what Triton and speech add.

1. Engine against `transformers` generate (static batch, KV cache): same process, same threads, same checkpoint and dtype,
   run in turn. Decode is the batch over the median step after the first token; prefill is the time to the first token.
2. The share of a batch-1 decode step spent outside matrix multiplies.
3. The whole server: time per token seen by a client of `chat` beside the engine's own step at the same batch, and time to
   first audio of `omni`.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from perf.common import Bar, Spread, demo_deployment, finish, interleave, is_quick, ratios
from tritone.client import Client
from tritone.deployment import Deployment
from tritone.engine.engine import Engine
from tritone.engine.sequence import Sequence
from tritone.models.decoder import Decoder, DenseLinear
from tritone.options import Sampling
from tritone.sizes import required_shared_memory
from tritone.stages.build import build_engine
from tritone.supervisor import Server

BATCHES = (1, 8, 32)
PROMPT = 128
LONG_PROMPT = 512
QUESTION = "Write a short story about a lighthouse."
console = Console()


class EngineRunner:
    """Runs batches through scheduler and engine in this process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def run(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[float]]:
        """Seconds to the last sequence's first token, and the seconds of each step that decodes the whole batch alone."""
        scheduler = self.engine.scheduler
        greedy = Sampling(temperature=0.0)
        sequences = [Sequence(i + 1, list(ids), len(ids), greedy, tokens) for i, ids in enumerate(prompts)]
        begun = time.perf_counter()
        for sequence in sequences:
            scheduler.add(sequence)
        while any(sequence.answer_length < 1 for sequence in sequences):
            self.engine.step()
        first = time.perf_counter() - begun
        steps = []
        for _ in range(tokens - 1):
            begun = time.perf_counter()
            outputs = self.engine.step()
            steps.append(time.perf_counter() - begun)
            assert len(outputs) == len(sequences)
        for sequence in sequences:
            scheduler.remove(sequence)
        return first, steps

    def decode_rate(self, prompts: list[list[int]], tokens: int) -> float:
        return len(prompts) / median(self.run(prompts, tokens)[1])

    def prefill_rate(self, prompt: list[int]) -> float:
        return len(prompt) / self.run([prompt], 1)[0]


class TransformersRunner:
    def __init__(self, checkpoint: str, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], tokens: int) -> list[float]:
        """Seconds from the call to each token of the batch."""
        ids = torch.tensor(prompts)
        moments: list[float] = []

        def clock(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            moments.append(time.perf_counter() - begun)
            return torch.zeros(len(input_ids), dtype=torch.bool)

        begun = time.perf_counter()
        self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            pad_token_id=0, eos_token_id=None, stopping_criteria=[clock],
        )
        return moments

    def decode_rate(self, prompts: list[list[int]], tokens: int) -> float:
        moments = self._generate(prompts, tokens)
        return len(prompts) / median(later - earlier for earlier, later in pairwise(moments))

    def prefill_rate(self, prompt: list[int]) -> float:
        return len(prompt) / self._generate([prompt], 1)[0]


def prompts_of(count: int, length: int, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count * 1000 + length)
    return torch.randint(3, vocabulary, (count, length), generator=generator).tolist()


def compare(engine: EngineRunner, reference: TransformersRunner, vocabulary: int, quick: bool) -> dict[str, Any]:
    """Decode at every batch size and prefill, ours and theirs in turn."""
    results: dict[str, Any] = {}
    batches = (1, 32) if quick else BATCHES
    with Progress(console=console, transient=True) as progress:
        for batch in batches:
            tokens = (10 if batch == 1 else 5) if quick else 32
            rounds = 2 if quick else 5
            prompts = prompts_of(batch, PROMPT, vocabulary)
            task = progress.add_task(f"decode, batch {batch}", total=rounds)
            values = interleave(
                {
                    "tritone": lambda p=prompts, n=tokens: engine.decode_rate(p, n),
                    "transformers": lambda p=prompts, n=tokens: reference.decode_rate(p, n),
                },
                rounds,
                lambda done, total, t=task: progress.update(t, completed=done),
            )
            results[f"decode batch {batch}"] = summary(values)
        prompt = prompts_of(1, LONG_PROMPT, vocabulary)[0]
        rounds = 1 if quick else 7
        task = progress.add_task("prefill", total=rounds)
        values = interleave(
            {"tritone": lambda: engine.prefill_rate(prompt), "transformers": lambda: reference.prefill_rate(prompt)},
            rounds,
            lambda done, total: progress.update(task, completed=done),
        )
        results[f"prefill {LONG_PROMPT} tokens"] = summary(values)
    return results


def summary(values: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "unit": "tokens/s",
        "tritone": vars(Spread.of(values["tritone"])),
        "transformers": vars(Spread.of(values["transformers"])),
        "ratio": vars(ratios(values["tritone"], values["transformers"])),
    }


def outside_matmul(engine: EngineRunner, vocabulary: int, rounds: int) -> Spread:
    """Share of batch-1 decode steps outside the linear layers, by a clock around every linear call (its own cost, about
    0.1 microseconds a call, counts as outside)."""
    spent = [0.0]
    plain = DenseLinear.__call__

    def timed(self: DenseLinear, x: torch.Tensor) -> torch.Tensor:
        begun = time.perf_counter()
        result = plain(self, x)
        spent[0] += time.perf_counter() - begun
        return result

    shares = []
    prompts = prompts_of(1, PROMPT, vocabulary)
    DenseLinear.__call__ = timed  # type: ignore[method-assign]
    try:
        for _ in range(rounds):
            spent[0] = 0.0
            engine.run(prompts, 1)
            prefill, spent[0] = spent[0], 0.0
            _, steps = engine.run(prompts, 33)
            shares.append(1 - (spent[0] - prefill) / sum(steps))
    finally:
        DenseLinear.__call__ = plain  # type: ignore[method-assign]
    return Spread.of(shares)


def stream_times(url: str, model: str, streams: int, tokens: int) -> list[dict[str, float]]:
    """Each of ``streams`` concurrent requests: first event, first audio, seconds between first and last text, tokens."""
    measured: list[dict[str, float]] = []

    def one() -> None:
        client = Client(url)
        begun = time.monotonic()
        texts: list[float] = []
        audio = 0.0
        info: Any = {}
        for event in client.chat(QUESTION, model=model, max_tokens=tokens, temperature=0.0, ignore_eos=True):
            if event.kind == "text":
                texts.append(event.received)
            if event.kind == "audio" and not audio:
                audio = event.received - begun
            info = event.info
        measured.append(
            {
                "first_text": texts[0] - begun,
                "first_audio": audio,
                "decoding": texts[-1] - texts[0],
                "tokens": info["usage"]["completion_tokens"],
                "total": time.monotonic() - begun,
                "audio_seconds": info["usage"]["audio_seconds"],
            }
        )

    threads = [threading.Thread(target=one) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return measured


def through_server(deployment: Deployment, engine: EngineRunner, vocabulary: int, quick: bool) -> dict[str, Any]:
    results: dict[str, Any] = {}
    rounds = 1 if quick else 5
    tokens = 16 if quick else 64
    with Server(deployment, shared_memory=required_shared_memory) as server:
        stream_times(server.grpc_url, "omni", 1, 8)
        for streams in (1, 16):
            prompts = prompts_of(streams, PROMPT // 3, vocabulary)
            per_step: dict[str, list[float]] = {"engine": [], "server": []}
            for _ in range(rounds):
                per_step["engine"].append(median(engine.run(prompts, tokens)[1]))
                runs = stream_times(server.grpc_url, "chat", streams, tokens)
                per_step["server"].append(max(r["decoding"] for r in runs) / (tokens - 1))
            overhead = [(a - b) / streams for a, b in zip(per_step["server"], per_step["engine"], strict=True)]
            results[f"{streams} streams"] = {
                "seconds per step, engine alone": vars(Spread.of(per_step["engine"])),
                "seconds per step, client of the server": vars(Spread.of(per_step["server"])),
                "milliseconds per event added": vars(Spread.of([1000 * value for value in overhead])),
            }
        for streams in (1, 8):
            runs = [run for _ in range(rounds) for run in stream_times(server.grpc_url, "omni", streams, 16 if quick else 40)]
            results[f"speech, {streams} streams"] = {
                "first text s": vars(Spread.of([r["first_text"] for r in runs])),
                "first audio s": vars(Spread.of([r["first_audio"] for r in runs])),
                "real-time factor": vars(Spread.of([r["total"] / r["audio_seconds"] for r in runs])),
            }
    return results


def show(results: dict[str, Any]) -> None:
    table = Table(title="Engine beside transformers (tokens/s, median and range)")
    for column in ("", "tritone", "transformers", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in results["engine"].items():
        table.add_row(name, *(str(Spread(**row[key])) for key in ("tritone", "transformers", "ratio")))
    console.print(table)
    table = Table(title="Through the server")
    for column in ("", "", "median (range)"):
        table.add_column(column)
    for name, row in results["server"].items():
        for figure, spread in row.items():
            table.add_row(name, figure, str(Spread(**spread)))
    console.print(table)


def main() -> None:
    quick = is_quick()
    # The same prompts come again and again; all of them shall be computed.
    deployment = demo_deployment(prefix_cache=False)
    part = deployment.decode
    directory = Path(tempfile.mkdtemp(prefix="bench-decode-", dir="/dev/shm"))
    try:
        engine, _, _ = build_engine(deployment, part, directory, "bench")
        runner = EngineRunner(engine)
        assert isinstance(engine.model, Decoder)
        vocabulary = engine.model.config.vocab_size
        reference = TransformersRunner(deployment.checkpoint, getattr(torch, part.dtype))
        results: dict[str, Any] = {
            "checkpoint": deployment.name,
            "dtype": part.dtype,
            "threads": part.threads,
            "engine": compare(runner, reference, vocabulary, quick),
        }
        share = outside_matmul(runner, vocabulary, 2 if quick else 7)
        results["share of a batch-1 step outside matrix multiplies"] = vars(share)
        del reference
        results["server"] = through_server(deployment, runner, vocabulary, quick)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    show(results)
    console.print(f"outside matrix multiplies, batch 1: {share}")
    rows = results["engine"]
    finish(
        "decode",
        results,
        [
            Bar("decode batch 1 / transformers", rows["decode batch 1"]["ratio"]["median"], "at least", 2.0),
            Bar("decode batch 32 / transformers", rows["decode batch 32"]["ratio"]["median"], "at least", 4.0),
            Bar("share outside matmul, batch 1", share.median, "at most", 0.35),
        ],
    )


if __name__ == "__main__":
    main()
