"""What several unit tests share: a recording reply, a small tokenizer, a way to wait."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tritone.errors import TritoneError
from tritone.messages import STAGES, BlockRefs, GenerateRequest, Handoff, TokenInfo
from tritone.options import Options

NUMPY_TYPES = {"UINT64": np.uint64, "INT32": np.int32, "UINT8": np.uint8, "FP32": np.float32, "STRING": np.object_}

MARKUP = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CORPUS = (
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox does not.",
    "Numbers 0123456789, and a list: one, two, three. STOP here, or stop there.",
    "안녕하세요 세계 안녕 세계",
    "user\nassistant\nsystem\n",
)


class FakeReply:
    """Records the answers to one request and, like Triton, refuses any after the last."""

    def __init__(self, cancelled: bool = False, log: list[Any] | None = None) -> None:
        """``log`` also gets every message, in the order of all replies that share it."""
        self.messages: list[Any] = []
        self.log = log if log is not None else []
        self.faults: list[str] = []
        self.cancelled = cancelled
        self._closed = threading.Event()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def send(self, message: Any, *, last: bool = False) -> None:
        if self.closed:
            self.faults.append(f"sent after the end: {message}")
            raise RuntimeError("sent after the end")
        self.messages.append(message)
        self.log.append(message)
        if last:
            self._closed.set()

    def close(self) -> None:
        if self.closed:
            self.faults.append("closed twice")
        self._closed.set()

    def fail(self, error: TritoneError) -> None:
        self.send(error, last=True)

    def is_cancelled(self) -> bool:
        return self.cancelled

    def wait(self, seconds: float = 5.0) -> list[Any]:
        assert self._closed.wait(seconds), f"the reply was not closed in {seconds} s; so far: {self.messages}"
        assert not self.faults
        return self.messages


def wait_until(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.002)


def assert_fits(stage: str, tensors: dict[str, Any], *, output: bool) -> None:
    """The tensors have the names, types and shapes that the stage's table promises to Triton."""
    spec = STAGES[stage]
    table = {tensor.name: tensor for tensor in (spec.outputs if output else spec.inputs)}
    assert set(tensors) <= set(table)
    assert {name for name, tensor in table.items() if not tensor.optional} <= set(tensors)
    for name, array in tensors.items():
        dims = table[name].dims
        assert array.dtype == NUMPY_TYPES[table[name].dtype], name
        assert len(array.shape) == len(dims), name
        assert all(want in (-1, have) for have, want in zip(array.shape, dims, strict=True)), name


@functools.cache
def byte_level_tokenizer() -> Any:
    """A byte-level BPE of some 330 tokens: most emoji and all rare characters fall apart into bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=list(MARKUP),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@functools.cache
def byte_tokens() -> dict[int, int]:
    """The token that stands for each single byte in :func:`byte_level_tokenizer`."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in characters]
    characters |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    tokenizer = byte_level_tokenizer()
    return {byte: tokenizer.token_to_id(character) for byte, character in characters.items()}


def tokens_of_bytes(data: bytes) -> list[int]:
    return [byte_tokens()[byte] for byte in data]


def refs(**changes: Any) -> BlockRefs:
    values: dict[str, Any] = {
        "pool": "prefill_pages",
        "epoch": 2**62 + 1,
        "blocks": (3, 0, 7),
        "tags": (11, 2**63 + 5, 12),
        "slot": 3,
        "nonce": 2**62,
        "shape": (2, 2, 1, 16, 4),
        "dtype": "float32",
    }
    return BlockRefs(**(values | changes))


def handoff(first: int = 5, **changes: Any) -> Handoff:
    values: dict[str, Any] = {
        "first": TokenInfo(first),
        "pages": refs(),
        "page_size": 16,
        "hidden": None,
        "cached_tokens": 0,
        "timings": {"queue": 0.25, "prefill": 0.5, "handed_over": 100.0},
    }
    return Handoff(**(values | changes))


def request(
    session: int = 7, ids: tuple[int, ...] = (1, 2, 3), stop_ids: tuple[int, ...] = (), **options: Any
) -> GenerateRequest:
    return GenerateRequest(session, np.asarray(ids, np.int32), Options(**options), stop_ids, created=12.5)
