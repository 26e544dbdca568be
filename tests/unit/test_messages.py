"""Messages keep their content through Triton's tensors, and the tensors are those of the configuration."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import assert_fits, handoff, refs, request

from tritone.errors import InvalidArgument
from tritone.messages import (
    FRAME_WIDTH,
    ROLE_OUTPUTS,
    STAGES,
    TERMINAL,
    Event,
    Failure,
    GenerateRequest,
    MediaKey,
    Prefilled,
    TensorSpec,
    TokenInfo,
    client_tensors,
    failure_event,
    read_bytes,
    start_event,
)
from tritone.models.omni.heard import Heard
from tritone.options import Options, Sampling

TEXTS = ["", "plain", "naïve ß", "안녕하세요", "👩‍👩‍👧‍👦 🏳️‍🌈", '\x01\n\t"\\', "\u2028\ufeff"]
BIG = 2**63 - 1


def wire(tensors: dict[str, Any]) -> dict[str, Any]:
    """What arrives at the next stage: arrays of its own, which it must not need to write to."""
    copies = {name: array.copy() for name, array in tensors.items()}
    for array in copies.values():
        array.setflags(write=False)
    return copies


def same_request(left: GenerateRequest, right: GenerateRequest) -> bool:
    return np.array_equal(left.ids, right.ids) and replace(left, ids=right.ids) == right


def full_request() -> GenerateRequest:
    return request(
        BIG,
        ids=(0, 151_643, 2**31 - 1),
        stop_ids=(2, 7),
        sampling=Sampling(temperature=0.3, seed=BIG),
        max_tokens=9,
        stop=("👩‍👩‍👧‍👦", "끝"),
        logprobs=0,
        speech=True,
        voice="anna",
        speed=0.5,
        tools=({"name": "é"},),
    )


def test_generate_request() -> None:
    before = full_request()
    tensors = before.to_tensors()
    assert_fits("prefill", tensors, output=False)
    after = GenerateRequest.from_tensors(wire(tensors))
    assert same_request(before, after)
    assert after.ids.dtype == np.int32
    assert isinstance(after.stop_ids, tuple)
    assert isinstance(after.options.stop, tuple)


@pytest.mark.parametrize(
    ("given", "failure"),
    [
        (handoff(), None),
        (
            handoff(
                hidden=refs(pool="prefill_hidden", blocks=(1,), tags=(BIG,), shape=(8, 576), dtype="bfloat16")
            ),
            None,
        ),
        (handoff(first=0, cached_tokens=64), None),
        (handoff(hidden=refs(), hidden_rows=17, media=MediaKey(-31, 0, "00ff")), None),
        (replace(handoff(), first=TokenInfo(9, -0.25, ((9, -0.25), (4, -1.5)))), None),
        (None, Failure("error", "UNAVAILABLE", "später: 안녕 👋")),
        (None, Failure("cancelled")),
    ],
)
def test_prefilled(given: Any, failure: Any) -> None:
    before = Prefilled(full_request(), BIG, given, failure)
    tensors = before.to_tensors()
    assert_fits("prefill", tensors, output=True)
    assert_fits("integrity", tensors, output=False)
    assert_fits("integrity", tensors, output=True)
    assert_fits("decode", tensors, output=False)
    after = Prefilled.from_tensors(wire(tensors))
    assert before.request is not None and after.request is not None
    assert same_request(before.request, after.request)
    assert (after.session, after.handoff, after.failure) == (BIG, given, failure)


def test_a_beat_of_prefill_carries_its_session_only() -> None:
    tensors = Prefilled(None, BIG).to_tensors()
    assert_fits("integrity", tensors, output=True)
    assert Prefilled.from_tensors(wire(tensors)) == Prefilled(None, BIG)


EVENTS = [
    Event(BIG, "beat"),
    Event(BIG, "start", info={"options": {"voice": "é", "stop": ["끝"]}, "created": 12.5}),
    *[Event(1, "text", text=text) for text in TEXTS],
    Event(
        5,
        "text",
        text="é",
        info={"logprobs": [{"token_id": 1, "logprob": -0.5}]},
        hidden=(refs(), refs(slot=9)),
        rows=(70, 1),
    ),
    Event(5, "text", hidden=(refs(),), rows=(3,)),
    Event(5, "speak", text="안녕", info={"options": {}, "created": 1.25}),
    Event(5, "end", info={"finish_reason": "stop", "usage": {"prompt_tokens": 3}}),
    failure_event(5, Failure("error", "INTERNAL", "kaputt 💥"), {"completion_tokens": 2}),
    failure_event(5, Failure("cancelled")),
]


@pytest.mark.parametrize("before", EVENTS, ids=lambda event: event.kind)
def test_events_without_arrays(before: Event) -> None:
    tensors = before.to_tensors()
    for stage in ("talker", "voicebox", "postprocess"):
        assert_fits(stage, tensors, output=False)
    assert_fits("decode", tensors, output=True)
    assert Event.from_tensors(wire(tensors)) == before


@pytest.mark.parametrize("count", [0, 1, 57])
def test_frames(count: int) -> None:
    frames = np.arange(count * FRAME_WIDTH, dtype=np.float32).reshape(count, FRAME_WIDTH) / 7
    tensors = Event(3, "frames", info={"last": False}, frames=frames).to_tensors()
    assert_fits("talker", tensors, output=True)
    assert_fits("voicebox", tensors, output=False)
    after = Event.from_tensors(wire(tensors))
    assert after.frames is not None
    np.testing.assert_array_equal(after.frames, frames)
    assert after.info == {"last": False}
    assert after.audio is None


@pytest.mark.parametrize("shape", [(0, 16), (1, 1), (9, 16)])
def test_codes(shape: tuple[int, int]) -> None:
    codes = np.arange(shape[0] * shape[1]).reshape(shape) * 7
    tensors = Event(3, "codes", info={"last": True}, codes=codes).to_tensors()
    assert_fits("talker", tensors, output=True)
    assert_fits("voicebox", tensors, output=False)
    after = Event.from_tensors(wire(tensors))
    assert after.codes is not None and after.codes.dtype == np.int32
    np.testing.assert_array_equal(after.codes, codes)
    assert after.info == {"last": True} and after.frames is None


@pytest.mark.parametrize("count", [0, 1, 4800])
def test_audio(count: int) -> None:
    # Every second value of a wider array: not contiguous, and not yet float32.
    audio = np.linspace(-1, 1, 2 * count)[::2]
    tensors = Event(3, "audio", audio=audio).to_tensors()
    assert_fits("voicebox", tensors, output=True)
    assert_fits("postprocess", tensors, output=False)
    assert tensors["audio"].flags.c_contiguous
    after = Event.from_tensors(wire(tensors))
    assert after.audio is not None
    np.testing.assert_array_equal(after.audio, audio.astype(np.float32))


def test_the_last_kinds_are_exactly_three() -> None:
    assert {"end", "error", "cancelled"} == TERMINAL
    kinds = ("beat", "start", "text", "speak", "frames", "codes", "audio", "end", "error", "cancelled")
    assert [Event(1, kind).terminal for kind in kinds] == [False] * 7 + [True] * 3  # type: ignore[arg-type]


def test_failures_say_why() -> None:
    assert failure_event(1, Failure("error", "NOT_FOUND", "gone"), {"prompt_tokens": 2}).info == {
        "finish_reason": "error",
        "code": "NOT_FOUND",
        "message": "gone",
        "usage": {"prompt_tokens": 2},
    }
    assert failure_event(1, Failure("cancelled")).info == {"finish_reason": "cancelled"}


def test_start_tells_later_stages_the_options() -> None:
    event = start_event(full_request())
    assert (event.session, event.kind, event.info["created"]) == (BIG, "start", 12.5)
    arrived = Event.from_tensors(wire(event.to_tensors()))
    assert Options.from_json(arrived.info["options"]) == full_request().options


def test_client_tensors_leave_out_what_does_not_apply() -> None:
    assert set(client_tensors(0, "end")) == {"index", "event"}
    made = client_tensors(2**31 - 1, "text", text="👩‍👩‍👧‍👦", info={"a": "é"})
    assert made["index"].tolist() == [2**31 - 1]
    assert made["event"].tolist() == [b"text"]
    assert made["text"][0].decode() == "👩‍👩‍👧‍👦"
    assert json.loads(made["info"][0]) == {"a": "é"}
    audio = client_tensors(1, "audio", audio=np.zeros(3, np.float32), audio_base64="AAA=")
    for tensors in (made, audio):
        spec = {tensor.name for tensor in STAGES["postprocess"].outputs}
        assert set(tensors) <= spec


@pytest.mark.parametrize(
    "array",
    [np.array([], np.object_), np.array([b"a", b"b"], np.object_), np.array([[b"a", b"b"]], np.object_)],
)
def test_a_string_tensor_of_another_shape_is_named(array: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_bytes({"messages": array}, "messages")
    assert caught.value.message == f"messages: shape {list(array.shape)} is not allowed; allowed: [1]"


@pytest.mark.parametrize(
    "array",
    [
        np.array([b"\xff\x00"], np.object_),
        np.array([[b"\xff\x00"]], np.object_),
        np.array(b"\xff\x00", np.object_),
    ],
)
def test_a_single_string_is_read_whatever_its_rank(array: Any) -> None:
    assert read_bytes({"messages": array}, "messages") == b"\xff\x00"


def test_text_in_place_of_bytes_is_utf8() -> None:
    assert read_bytes({"messages": np.array(["é"], np.object_)}, "messages") == "é".encode()


def test_configuration_entries() -> None:
    spec = TensorSpec("audio", "FP32", (-1,), optional=True)
    assert spec.as_dict(output=False) == {
        "name": "audio",
        "data_type": "TYPE_FP32",
        "dims": [-1],
        "optional": True,
    }
    assert spec.as_dict(output=True) == {"name": "audio", "data_type": "TYPE_FP32", "dims": [-1]}


def test_each_stage_takes_what_the_one_before_gives() -> None:
    order = ("prefill", "integrity", "decode", "talker", "voicebox", "postprocess")
    for before, after in itertools.pairwise(order):
        given = {(tensor.name, tensor.dtype, tensor.dims) for tensor in STAGES[before].outputs}
        required = {
            (tensor.name, tensor.dtype, tensor.dims) for tensor in STAGES[after].inputs if not tensor.optional
        }
        assert required <= given, (before, after)
    assert set(ROLE_OUTPUTS) <= {tensor.name for tensor in STAGES["preprocess"].outputs}
    assert {name for name, spec in STAGES.items() if not spec.decoupled} == {"integrity"}


def test_what_is_heard_travels_with_the_hand_over_and_the_first_text() -> None:
    heard = Heard(19, ((3, 7), (10, 16)), ((12, 14),), 16, ((0, 1), (0, 2), (0, 1)))
    before = Prefilled(full_request(), 7, handoff(heard=heard))
    assert Prefilled.from_tensors(wire(before.to_tensors())).handoff == before.handoff
    event = Event(5, "text", hidden=(refs(),), rows=(20,), heard=heard)
    assert Event.from_tensors(wire(event.to_tensors())) == event
