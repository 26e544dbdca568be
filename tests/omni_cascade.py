"""All stages of a tiny omni checkpoint in one process, as a deployment makes them, and what transformers says to the same."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.omni_prompts import Asked
from tests.talker_reference import Reference
from tests.unit.helpers import FakeReply
from tests.unit.media_files import image_file, sound_file
from tritone.deployment import Deployment
from tritone.metrics import Metrics
from tritone.pools import CancelBoard, Views
from tritone.stages.build import build_decode, build_prefill
from tritone.stages.build_speech import build_talker, build_voicebox
from tritone.stages.integrity import IntegrityStage
from tritone.stages.postprocess import PostprocessStage
from tritone.stages.preprocess import PreprocessStage

FRAMES = 14
WORDS = 9


def written(directory: Path, **changes: Any) -> Deployment:
    """The deployment as a user writes it, small and in float32. The checkpoint speaks greedily from now on."""
    file = directory / "generation_config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"talker_do_sample": False, "talker_max_new_tokens": FRAMES}))
    engine = {"dtype": "float32", "threads": 1, "pool_tokens": 2048, "max_batch_tokens": 48}
    sizes = {
        "page_size": 16,
        "max_context": 1024,
        "prefill": engine,
        "decode": engine,
        "talker": {"dtype": "float32", "pool_tokens": 2048, "hidden_blocks": 256, "max_batch_tokens": 48},
        "integrity": {"mode": "raise", "checksum": True, "audit_seconds": 1.0},
        "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0},
    }
    return Deployment.parse({"checkpoint": str(directory), "voice": "checkpoint"} | sizes | changes, "tests")


def message(content: list[Any]) -> list[dict[str, Any]]:
    """A user's message of text, samples (1-dimensional, 16 kHz) and pixels (3-dimensional), after a system's."""
    parts: list[dict[str, Any]] = []
    for one in content:
        if isinstance(one, str):
            parts.append({"type": "text", "text": one})
        elif one.ndim == 1:
            data = base64.b64encode(sound_file(one, subtype="FLOAT")).decode()
            parts.append({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
        else:
            data = base64.b64encode(image_file(one)).decode()
            parts.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}})
    return [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": parts}]


def inputs(processor: Any, content: list[Any]) -> Any:
    """What transformers' processor makes of such a message."""
    kinds = {1: "audio", 3: "image"}
    parts = [{"type": "text", "text": c} if isinstance(c, str) else {"type": kinds[c.ndim]} for c in content]
    asked = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": parts}]
    text = processor.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    given = {
        name: [c for c in content if not isinstance(c, str) and c.ndim == rank] or None
        for name, rank in (("audio", 1), ("images", 3))
    }
    return processor(text=text, **given, return_tensors="pt")


def expected(reference: Reference, inputs: Any) -> tuple[list[int], torch.Tensor]:
    """transformers' greedy tokens [WORDS] and codes [frames, groups] for what its processor made of a message."""
    # It hands the Talker one token less, where ours has the last one's embedding.
    words = WORDS + 1 if reference.family == "qwen3" else WORDS
    asked = Asked(dict(inputs), None)
    speech = reference.speak(asked, words, FRAMES)
    return reference.answered(asked)[:WORDS], speech.codes


class Step(FakeReply):
    """Takes each message of one stage to the next."""

    def __init__(self, following: Callable[[Any, FakeReply], None], last: FakeReply, cancelled: bool = False) -> None:
        super().__init__(cancelled)
        self._following = following
        self._last = last

    def send(self, message: Any, *, last: bool = False) -> None:
        super().send(message, last=last)
        self._following(message, self._last)


class Stages:
    def __init__(self, deployment: Deployment, directory: Path) -> None:
        self.board = CancelBoard(directory)
        self.preprocess = PreprocessStage(deployment)
        self.prefill = build_prefill(deployment, directory, Metrics("prefill"))
        self.decode = build_decode(deployment, directory, Metrics("decode"))
        self.integrity = IntegrityStage(deployment, directory, self.board, Metrics("integrity"))
        self.talker = build_talker(deployment, directory, Metrics("talker"), False)
        self.voicebox = build_voicebox(deployment, directory, Metrics("voicebox"), False)
        self.postprocess = PostprocessStage(self.board, Views(directory), Metrics("postprocess"))
        self.codes: dict[int, list[np.ndarray[Any, Any]]] = {}

    def ask(self, messages: Any, role: Any = "omni", **options: Any) -> tuple[int, Client]:
        request = self.preprocess.generate(json.dumps(messages).encode(), options, role, time.monotonic())
        client = Client()
        tensors = request.to_tensors() | {"media": request.media_tensor()}
        there = type(request).from_tensors(tensors)
        self.prefill.submit(there, Step(self._checked, client))
        return request.session, client

    def stop(self) -> None:
        for stage in (self.prefill, self.decode, self.integrity, self.talker, self.voicebox):
            stage.stop()

    def _checked(self, message: Any, client: FakeReply) -> None:
        if message.handoff is not None or message.failure is not None:
            there = type(message).from_tensors(message.to_tensors())
            self.decode.submit(self.integrity.check(there, False), Step(self._spoken, client))
        else:
            self.decode.submit(message, Step(self._spoken, client))

    def _spoken(self, event: Any, client: FakeReply) -> None:
        self.talker.submit(type(event).from_tensors(event.to_tensors()), Step(self._sounded, client))

    def _sounded(self, event: Any, client: FakeReply) -> None:
        assert not event.hidden and event.heard is None
        if event.kind == "codes":
            self.codes.setdefault(event.session, []).append(event.codes)
        self.voicebox.submit(type(event).from_tensors(event.to_tensors()), Step(self._told, client))

    def _told(self, event: Any, client: FakeReply) -> None:
        self.postprocess.submit(type(event).from_tensors(event.to_tensors()), Part(client))


class Client(FakeReply):
    """What the client got; closed with the stream's end."""

    def audio(self) -> np.ndarray[Any, Any]:
        return np.concatenate([m["audio"] for m in self.messages if "audio" in m] or [np.zeros(0, np.float32)])

    def infos(self) -> list[dict[str, Any]]:
        return [json.loads(m["info"][0]) for m in self.messages if "info" in m]

    def tokens(self) -> list[int]:
        return [entry["token_id"] for info in self.infos() for entry in info.get("logprobs", ())]


class Part(FakeReply):
    """One answer of postprocess, of the many that make a client's stream."""

    def __init__(self, client: FakeReply) -> None:
        super().__init__()
        self._client = client

    def send(self, message: Any, *, last: bool = False) -> None:
        super().send(message, last=last)
        kind = message["event"][0].decode()
        self._client.send(message, last=kind in ("end", "error", "cancelled"))
