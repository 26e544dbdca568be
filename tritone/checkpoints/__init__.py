"""Where weights come from: a directory, the demo packages, or the Hugging Face hub. Each name becomes a directory once."""

from tritone.checkpoints.progress import Progress
from tritone.checkpoints.resolve import (
    DEMO_CHECKPOINT,
    DEMO_TALKER,
    DEMO_VOICE,
    find_checkpoint,
    is_prepared,
    resolve_checkpoint,
    resolve_voice,
)

__all__ = [
    "DEMO_CHECKPOINT",
    "DEMO_TALKER",
    "DEMO_VOICE",
    "Progress",
    "find_checkpoint",
    "is_prepared",
    "resolve_checkpoint",
    "resolve_voice",
]
