"""Trains the Talker: `python -m training.voice.train`. Stop it at any time; it goes on from its last checkpoint, to the bit."""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path

import torch

from training.voice.batches import Batch, batches
from training.voice.loss import accuracy, losses
from training.voice.shards import CONTEXT_SHARDS, Shards
from training.voice.trainer import Plan, Trainer
from tritone.cache import default_cache
from tritone.checkpoints import DEMO_CHECKPOINT, DEMO_VOICE, resolve_checkpoint, resolve_voice
from tritone.models.talker.config import TalkerConfig
from tritone.models.talker.model import TalkerModel

CHECKPOINT = "checkpoint.pt"
KEEP_EVERY = 120.0  # seconds
REPORT_EVERY, VALIDATE_EVERY = 20, 200  # steps
VALIDATION_ROWS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=default_cache() / "train-voice", help="where everything made lies")
    parser.add_argument("--data", action="store_true", help="make the data and stop")
    arguments = parser.parse_args()
    checkpoint, voice = resolve_checkpoint(DEMO_CHECKPOINT, default_cache()), resolve_voice(DEMO_VOICE, default_cache())
    shards = Shards(arguments.cache, voice, checkpoint)
    if arguments.data:
        for index in range(len(shards)):
            shards.shard(index, contexts=index > 0 and index % CONTEXT_SHARDS == 0)
            print(f"data: {index + 1} of {len(shards)} shards", flush=True)
        return
    train(shards, Plan(), TalkerConfig(), arguments.cache / CHECKPOINT)


def train(shards: Shards, plan: Plan, config: TalkerConfig, path: Path) -> None:
    """Trains to the plan's end, from the checkpoint in ``path`` if there is one."""
    trainer = Trainer(config, plan)
    if path.is_file():
        trainer.load(path)
        print(f"goes on after step {trainer.step}", flush=True)
    gap = config.text_taps // 2
    validation = next(batches(shards.shard(0), VALIDATION_ROWS, plan.length, gap, plan.seed))
    means: torch.Tensor | None = None
    kept, begun, first = time.monotonic(), 0.0, trainer.step
    for batch in itertools.islice(shards.batches(plan, gap), trainer.step, plan.steps):
        begun = begun or time.process_time()  # after what a resumed training skips
        found = torch.tensor(trainer.train(batch))
        means = found if means is None else 0.97 * means + 0.03 * found
        if trainer.step % REPORT_EVERY == 0:
            left = (time.process_time() - begun) / (trainer.step - first) * (plan.steps - trainer.step) / 60
            print(
                f"step {trainer.step} of {plan.steps}: codebook 0 {means[0]:.3f}, others {means[1]:.3f} nats; "
                f"{left:.0f} minutes of one core left",
                flush=True,
            )
        if trainer.step % VALIDATE_EVERY == 0:
            print(validated(trainer.averaged, validation), flush=True)
        if time.monotonic() - kept > KEEP_EVERY or trainer.step == plan.steps:
            trainer.save(path)
            kept = time.monotonic()


@torch.no_grad()
def validated(model: TalkerModel, batch: Batch) -> str:
    """A line that says how well the model foretells answers it was not trained on."""
    with torch.autocast("cpu", torch.bfloat16):
        first, rest = losses(model, batch, None)
        codes, reads = accuracy(model, batch)
    return f"  validation: codebook 0 {first:.3f}, others {rest:.3f} nats; right: {codes:.1%} of codes, {reads:.1%} of reads"


if __name__ == "__main__":
    main()
