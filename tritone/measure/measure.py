"""`tritone doctor --measure`: from a resolved deployment to the pairing that this machine runs fastest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from tritone.checkpoints import Progress
from tritone.deployment import Deployment, EngineStage
from tritone.errors import TritoneError, bad
from tritone.evaluation.build import WINDOW
from tritone.evaluation.candidates import is_quantized
from tritone.measure.accuracy import Accuracy, work_directory
from tritone.measure.choice import Choice, choose
from tritone.measure.pairings import COPY, Load, Pairing, Timed, time_pairings
from tritone.measure.workbench import Workbench
from tritone.models.decoder import load_kv_scales

ROUNDS = 9
_DENSE = {torch.bfloat16: "bf16", torch.float32: "float32"}
# Decoders in four precisions and the float32 reference beside a checkpoint of 16-bit weights.
_MEMORY_FACTOR = 4.5


@dataclass(frozen=True)
class Measured:
    """All pairings, the fastest first, the one that was chosen, and the dense one; ``source`` says what text was used."""

    timed: list[Timed]
    choice: Choice
    dense: Timed
    source: str


def measure(deployment: Deployment, load: Load, progress: Progress) -> Measured:
    """Compares the deployment's checkpoint in all precisions and, where a stage has a checkpoint of its own, that one too.

    Raises ``TritoneError`` where memory is short, sizes do not fit, or nothing is accurate enough.
    """
    checkpoint = Path(deployment.checkpoint)
    stages = {"prefill": deployment.prefill, "decode": deployment.decode}
    dtype_name = stages["decode"].dtype
    if stages["prefill"].dtype != dtype_name:
        raise bad("prefill.dtype", stages["prefill"].dtype, f"{dtype_name}, as in decode")
    if load.prompt + load.answer > deployment.max_context:
        raise bad("--prompt and --answer", load.prompt + load.answer, f"at most {deployment.max_context} tokens, the context")
    copies = {name: Path(stage.checkpoint) for name, stage in stages.items() if stage.checkpoint not in (None, str(checkpoint))}
    _check_memory(checkpoint, *copies.values())
    dtype: torch.dtype = getattr(torch, dtype_name)
    dense, limit = _DENSE[dtype], deployment.accuracy.max_perplexity_increase
    weights = ("auto",) if is_quantized(checkpoint) else (dense, "fp8", "int8", "int4")
    positions = max(load.prompt + load.answer, WINDOW) + deployment.page_size
    with Workbench(checkpoint, dtype, deployment.page_size) as bench, work_directory() as work:

        def line(text: str) -> Callable[[int, int], None]:
            return lambda done, total: progress(text, done, total)

        for name in weights:
            bench.load(name, positions, stages["decode"].group, line(f"loading {name} weights"))
        for stage, copy in copies.items():
            text = f"loading {stage}'s checkpoint"
            bench.load("auto", positions, stages[stage].group, line(text), name=f"{stage} {COPY}", checkpoint=copy)
        decoders = {
            stage: {name: bench.decoders[name] for name in weights}
            | ({COPY: bench.decoders[f"{stage} {COPY}"]} if stage in copies else {})
            for stage in stages
        }
        threads = (stages["prefill"].threads, stages["decode"].threads)
        first, second, kinds = decoders["prefill"], decoders["decode"], (dense, "fp8")
        timed = time_pairings(bench, first, second, dense, kinds, load, threads, ROUNDS, line("timing all pairings"))
        plain = next(one for one in timed if one.pairing == Pairing(weights[0], weights[0], dense))
        scales = {
            name: load_kv_scales(copies["decode"] if name == COPY else checkpoint, bench.config) for name in second
        }
        accuracy = Accuracy(checkpoint, first, second, scales, limit, Path(work), line("perplexity: reference"))
        choice = choose(timed, limit, lambda pairing: accuracy.increase(pairing, line(f"perplexity: {pairing}")))
    return Measured(timed, choice, plain, accuracy.source)


def chosen_deployment(deployment: Deployment, pairing: Pairing) -> Deployment:
    """The deployment with the pairing's precisions."""

    def stage(part: EngineStage, weights: str) -> EngineStage:
        if weights == COPY:
            return part.model_copy(update={"weights": "auto"})
        return part.model_copy(update={"weights": weights, "checkpoint": None})

    decode = stage(deployment.decode, pairing.decode).model_copy(update={"kv": pairing.kv})
    return deployment.model_copy(update={"prefill": stage(deployment.prefill, pairing.prefill), "decode": decode})


def _check_memory(*checkpoints: Path) -> None:
    sizes = [sum(path.stat().st_size for path in checkpoint.glob("*.safetensors")) for checkpoint in checkpoints]
    needed, available = _MEMORY_FACTOR * sizes[0] + sum(sizes[1:]), psutil.virtual_memory().available
    if needed > available:
        raise TritoneError(
            f"--measure holds the checkpoint in all precisions at once, about {needed / 2**30:.0f} GiB; "
            f"{available / 2**30:.0f} GiB are available",
            "RESOURCE_EXHAUSTED",
        )
