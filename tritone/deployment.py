"""One deployment is one YAML file: checkpoint, voice, and per stage device, precision, threads and sizes.

The supervisor validates the file, resolves what is automatic (threads, dtype, context length) and writes the result as
JSON into the server's run directory; every stage process reads that JSON through :func:`Deployment.from_environment`.
So all stages see the same values, and a typing mistake stops the start, not a request.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tritone.errors import InvalidArgument

ENVIRONMENT = "TRITONE_RUN"
"""Environment variable naming the run directory (in shared memory) that the supervisor made for this server."""

RESOLVED = "deployment.json"

DType = Literal["auto", "float32", "bfloat16"]
WeightsType = Literal["auto", "bf16", "float32", "fp8", "int8", "int4"]
KVType = Literal["auto", "bf16", "float32", "fp8"]
Fault = Literal[
    "stale_tag", "swapped_pages", "freed_while_read", "flipped_byte", "out_of_range", "dropped_transfer", "slow_transfer",
    "prefill_dies", "prefill_memory", "decode_dies",
]

DENSE_WEIGHTS: dict[str, DType] = {"bf16": "bfloat16", "float32": "float32"}
"""The ``dtype`` of each ``weights`` that is not quantised."""

DENSE_NAMES: dict[str, Literal["bf16", "float32"]] = {"bfloat16": "bf16", "float32": "float32"}
"""What a ``dtype`` is called among ``weights`` and ``kv``."""

OWN_VOICE = "checkpoint"
"""The ``voice`` that is the checkpoint's own talker and vocoder."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineStage(_Part):
    """Prefill or decode: one engine with its own weights and its own page pool."""

    device: Literal["cpu"] = "cpu"
    checkpoint: str | None = None
    """The deployment's checkpoint in another precision, such as a quantised copy; named like ``checkpoint`` there."""
    dtype: DType = "auto"
    """Activations, and weights that are not quantised; ``auto`` is what ``weights`` says if that is bf16 or float32, else
    bfloat16 where the CPU multiplies it natively, else float32."""
    weights: WeightsType = "auto"
    """Matrices of the layers. ``auto`` is what the checkpoint stores; ``fp8`` (e4m3, a scale for each row), ``int8`` (a scale
    for each row) and ``int4`` (one for each ``group``) keep what it stores so and round to nearest what it stores dense."""
    group: int = Field(default=64, ge=-1, le=4096)
    """Weights of a row that share a scale where ``int4`` is made here; -1 is the whole row."""
    kv: KVType = "auto"
    """Keys and values in the pages; ``fp8`` is e4m3, half the bytes of bf16; ``auto`` is ``dtype``."""
    threads: int = Field(default=0, ge=0, le=512)
    """Compute threads; 0 is the number of usable cores."""
    pool_tokens: int = Field(default=32768, ge=16)
    """Tokens that fit into the page pool (rounded down to whole pages)."""
    pool_bytes: int = Field(default=0, ge=0)
    """Memory of the page pool instead of ``pool_tokens``: the tokens are as many as fit. 0: ``pool_tokens`` decides."""
    max_sequences: int = Field(default=64, ge=1, le=4096)
    """Sequences computed in one step; further ones wait in the queue."""
    max_batch_tokens: int = Field(default=512, ge=16)
    """Tokens computed in one step; a longer prompt is computed in chunks of this size."""
    max_queue: int = Field(default=1024, ge=1)
    """Requests that may wait; one more is refused with UNAVAILABLE."""

    @field_validator("group")
    @classmethod
    def _group(cls, value: int) -> int:
        if value != -1 and (value <= 0 or value % (8 if value <= 256 else 256)):
            raise ValueError("must be -1 (a whole row) or a multiple of 8 (above 256, of 256)")
        return value

    @model_validator(mode="after")
    def _one_dense_type(self) -> EngineStage:
        dense = DENSE_WEIGHTS.get(self.weights)
        if dense is not None and self.dtype not in ("auto", dense):
            raise ValueError(f"weights: {self.weights!r} and dtype: {self.dtype!r} differ; allowed: dtype auto or {dense}")
        return self


class Accuracy(_Part):
    """What a deployment may lose by its precisions; `tritone doctor --measure` chooses by it."""

    max_perplexity_increase: float = Field(default=1.0, ge=0)
    """Percent, beside the checkpoint in float32, on real text."""


class TalkerStage(_Part):
    """The Talker of ``demo:hibari`` takes ``threads`` and ``max_queue`` alone; all others are engines, with pages."""

    threads: int = Field(default=1, ge=1, le=512)
    dtype: DType = "auto"
    """Weights, activations and pages; ``auto`` is bfloat16 where the CPU multiplies it natively, else float32."""
    hidden_blocks: int = Field(default=2048, ge=16)
    """Blocks of the pool that carries hidden states from decode to the Talker, one block per event."""
    pool_tokens: int = Field(default=32768, ge=16)
    """Tokens that fit into the Talker's page pool: prompts as far as it reads them, and frames. Rounded down to whole pages."""
    max_sequences: int = Field(default=64, ge=1, le=4096)
    """Answers spoken in one step; further ones wait."""
    max_batch_tokens: int = Field(default=512, ge=16)
    """Tokens computed in one step."""
    max_queue: int = Field(default=1024, ge=1)
    """Pieces of text, or answers, that may wait; one more ends its request with UNAVAILABLE."""


class VoiceBoxStage(_Part):
    voice: str | None = None
    """The voice whose VoiceBox sounds a trained Talker, ``demo:hibari`` where it is null; of no use to other voices."""
    threads: int = Field(default=1, ge=1, le=512)
    batch: int = Field(default=1, ge=1, le=256)
    """Sessions of an omni checkpoint's VoiceBox computed together. A batch that is not full costs as much as a full one: so the
    bits of a session depend on this number, not on other sessions. 1 is best on CPUs. Of no use to other voices."""
    max_queue: int = Field(default=4096, ge=1)


class Integrity(_Part):
    """Checks of everything that requests share; docs/integrity.md says what and why."""

    mode: Literal["off", "raise", "log"] = "off"
    """``raise`` ends a request whose pages are not what it took; ``log`` counts and logs it; ``off`` looks at nothing."""
    checksum: bool = False
    """Digests of handed-over and of finished pages: compared where decode takes them over, and by the audit."""
    audit_seconds: float = Field(default=5.0, ge=0, le=3600)
    """How often the integrity stage sweeps both pools from outside; 0: never."""
    transfer_seconds: float = Field(default=10.0, gt=0)
    """A request whose pages take longer from prefill to decode ends."""
    faults: tuple[Fault, ...] = ()
    """Faults that a request may ask for by the option ``cache_salt`` = ``fault:<name>``; for tests."""

    @field_validator("mode", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads a bare off as false

    @model_validator(mode="after")
    def _meant(self) -> Integrity:
        if self.checksum and self.mode == "off":
            raise ValueError("checksum: true needs mode raise or log; mode is 'off'")
        if self.faults and self.mode == "off":
            raise ValueError(f"faults: {list(self.faults)} need mode raise or log; mode is 'off'")
        if "flipped_byte" in self.faults and not self.checksum:
            raise ValueError("faults: 'flipped_byte' is found by digests alone, and checksum is false; allowed: checksum true")
        return self


class Server(_Part):
    host: str = "127.0.0.1"
    http_port: int = Field(default=8000, ge=0, le=65535)
    grpc_port: int = Field(default=8001, ge=0, le=65535)
    metrics_port: int = Field(default=8002, ge=0, le=65535)
    """Ports; 0 takes a free one."""
    exit_timeout_seconds: int = Field(default=8, ge=1)
    """What still runs when the server is told to end is cut off after this time."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """How long running requests may go on when the server is asked to stop (SIGTERM); new ones are refused meanwhile."""


class Deployment(_Part):
    """A validated deployment. ``checkpoint`` and ``voice`` are directories once resolved."""

    name: str = "tritone"
    checkpoint: str = "demo:smollm2-135m-instruct"
    """A Hugging Face directory, a hub name (``Qwen/Qwen2.5-0.5B-Instruct``), or ``demo:smollm2-135m-instruct``."""
    voice: str | None = "demo:heart"
    """``demo:heart``, the trained Talker, which speaks in codes; ``demo:hibari``, which does not; the directory of a voice of
    either kind; ``checkpoint`` (the omni checkpoint's own Talker and vocoder); or null for text only."""
    page_size: int = Field(default=32, ge=16, le=64)
    """Tokens in one KV page, the same in prefill and decode."""
    max_context: int = Field(default=0, ge=0)
    """Prompt plus answer tokens of one request; 0 is the checkpoint's own limit."""
    default_max_tokens: int = Field(default=0, ge=0)
    """Answer length where a request names none; 0 is what the context still holds."""
    prefix_cache: bool = True
    """Whether prefill and decode keep the KV of full pages for prompts that begin alike."""
    max_wait_seconds: float = Field(default=30.0, gt=0)
    """A request whose prompt would have to wait longer than this is refused with UNAVAILABLE."""
    lease_seconds: float = Field(default=30.0, gt=0)
    """A hand-over block that its reader has not released after this time is taken back."""
    accuracy: Accuracy = Accuracy()
    integrity: Integrity = Integrity()
    prefill: EngineStage = EngineStage()
    decode: EngineStage = EngineStage()
    talker: TalkerStage = TalkerStage()
    voicebox: VoiceBoxStage = VoiceBoxStage()
    server: Server = Server()

    @field_validator("page_size")
    @classmethod
    def _multiple(cls, value: int) -> int:
        if value % 16:
            raise ValueError("must be a multiple of 16 (16, 32, 48 or 64)")
        return value

    @model_validator(mode="after")
    def _fits(self) -> Deployment:
        for stage in ("prefill", "decode"):
            part: EngineStage = getattr(self, stage)
            if part.pool_bytes:
                continue  # how many tokens that is depends on the checkpoint: checked again once resolved
            held = part.pool_tokens // self.page_size * self.page_size
            if not held or self.max_context > held:
                raise ValueError(
                    f"max_context: {self.max_context} does not fit into {stage}.pool_tokens: {part.pool_tokens}; "
                    "allowed: a pool that holds at least one request of full length"
                )
        return self

    @classmethod
    def parse(cls, data: Any, source: str) -> Deployment:
        """Validate ``data``; every wrong field is named with its value and what is allowed."""
        if not isinstance(data, dict):
            raise InvalidArgument(f"{source}: a deployment is a mapping of fields, found {type(data).__name__}")
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            lines = []
            for item in error.errors():
                field = ".".join(str(part) for part in item["loc"]) or "deployment"
                value = "" if item["loc"] == () else f" {item['input']!r}"
                hint = item["msg"]
                if item["type"] == "extra_forbidden":
                    hint = f"no such field; allowed: {', '.join(_fields_at(cls, item['loc'][:-1]))}"
                lines.append(f"  {field}:{value}: {hint}")
            raise InvalidArgument(f"{source} is not a valid deployment:\n" + "\n".join(lines)) from None

    @classmethod
    def load(cls, path: str | Path) -> Deployment:
        path = Path(path)
        if not path.is_file():
            known = sorted(p.stem for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
            raise InvalidArgument(f"deployment: {str(path)!r} is no file; found beside it: {', '.join(known) or 'none'}")
        try:
            return cls.parse(yaml.safe_load(path.read_text()), str(path))
        except UnicodeDecodeError as error:
            raise InvalidArgument(f"{path} is not UTF-8 text: {error}") from None
        except yaml.YAMLError as error:
            raise InvalidArgument(f"{path} is not YAML: {error}") from None

    @classmethod
    def from_environment(cls) -> Deployment:
        """The resolved deployment of the server this stage process belongs to."""
        return cls.parse(json.loads((run_directory() / RESOLVED).read_text()), RESOLVED)


def run_directory() -> Path:
    """The run directory: resolved deployment, pools, cancel board. Made and removed by the supervisor."""
    value = os.environ.get(ENVIRONMENT)
    if not value:
        raise InvalidArgument(f"{ENVIRONMENT} is not set: start the server with `tritone serve`, which makes the run directory")
    return Path(value)


def _fields_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    for part in location:
        annotation = model.model_fields[str(part)].annotation
        assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
        model = annotation
    return sorted(model.model_fields)
