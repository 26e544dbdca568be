"""What travels between the stages: typed messages, and the Triton tensors that carry them.

This is the one place where a message becomes tensors; the backends and their ``auto_complete_config`` read the same
:data:`STAGES` table, so configuration and code cannot drift apart. Messages hold references to shared blocks, never the
data itself; speech frames and audio, which are small and have one reader, travel as tensors.

numpy only: importable without torch and without Triton.
"""

from tritone.messages.codec import client_tensors, read_bytes, report_tensors
from tritone.messages.events import TERMINAL, Event, EventKind, failure_event, start_event
from tritone.messages.requests import BlockRefs, Failure, GenerateRequest, Handoff, MediaKey, Prefilled, TokenInfo
from tritone.messages.specs import FRAME_WIDTH, ROLE_OUTPUTS, STAGES, StageSpec, Tensors, TensorSpec

__all__ = [
    "FRAME_WIDTH",
    "ROLE_OUTPUTS",
    "STAGES",
    "TERMINAL",
    "BlockRefs",
    "Event",
    "EventKind",
    "Failure",
    "GenerateRequest",
    "Handoff",
    "MediaKey",
    "Prefilled",
    "StageSpec",
    "TensorSpec",
    "Tensors",
    "TokenInfo",
    "client_tensors",
    "failure_event",
    "read_bytes",
    "report_tensors",
    "start_event",
]
