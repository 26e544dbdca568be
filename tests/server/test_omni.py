"""A tiny Qwen3-Omni checkpoint through the real server: what transformers answers, heard and seen, and spoken as it streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import transformers

from tests.omni_cascade import WORDS, expected, inputs, message, written
from tests.omni_processor import reference_processor
from tests.server.helpers import (
    Answer,
    Request,
    ask,
    ask_together,
    generate,
    http_get,
    integrity_report,
    nothing_left_behind,
    refusal,
)
from tests.talker_reference import SPEAKER, Reference
from tests.unit.media_files import noise, pixels
from tritone.cache import default_cache
from tritone.models.omni.voicebox.loading import load_voicebox
from tritone.supervisor import Server, resolve_deployment

ASKED: dict[str, list[Any]] = {
    "text": ["Hello, how are you today?"],
    "audio": ["Describe this sound in one sentence please.", noise(16_000)],
    "image": [pixels(100, 64), "Describe"],
}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": WORDS, "ignore_eos": True, "logprobs": 0, "voice": SPEAKER.lower()}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference("qwen3", tmp_path_factory.mktemp("qwen3-omni"))


@pytest.fixture(scope="module")
def wanted(reference: Reference) -> dict[str, tuple[list[int], Any]]:
    processor = reference_processor(transformers.Qwen3OmniMoeProcessor, reference.directory)
    return {name: expected(reference, inputs(processor, content)) for name, content in ASKED.items()}


@pytest.fixture(scope="module")
def omni(reference: Reference) -> Iterator[Server]:
    with Server(resolve_deployment(written(reference.directory), default_cache())) as running:
        yield running


@pytest.fixture(autouse=True)
def unhurt(omni: Server) -> Iterator[None]:
    """After each test the server is ready, holds nothing, and has as many free blocks as before."""
    with nothing_left_behind(omni):
        yield


def test_tokens_codes_and_sound_are_those_of_transformers(
    omni: Server, reference: Reference, wanted: dict[str, tuple[list[int], Any]]
) -> None:
    """All at once."""
    answers = ask_together(omni, "omni", [(message(content), GREEDY) for content in ASKED.values()])
    box = load_voicebox(reference.directory)
    for answer, (name, (tokens, codes)) in zip(answers, wanted.items(), strict=True):
        answer.check_complete()
        assert answer.tokens == tokens, name
        sound, whole = answer.audio, box.oneshot(codes.numpy())
        assert len(sound) == len(codes) * box.hop
        assert 10 * np.log10((whole**2).sum() / ((sound - whole) ** 2).sum()) > 60
        assert answer.kinds.count("audio") > 1, "the sound comes in pieces"
        usage = answer.usage
        assert usage["completion_tokens"] == WORDS and usage["audio_seconds"] == len(sound) / 24_000
        assert (usage["prompt_audio_tokens"] > 0) == (name == "audio")
        assert (usage["prompt_image_tokens"] > 0) == (name == "image")


def test_the_talkers_pages_are_checked_and_swept(omni: Server) -> None:
    ask(omni, "omni", "Hello", **GREEDY)
    report = integrity_report(omni)
    assert report["ready"] and set(report["pools"]) >= {"prefill_pages", "decode_pages", "talker_pages"}
    for pool in report["pools"].values():
        assert not pool["mismatches"]
    talker = report["pools"]["talker_pages"]
    assert talker["pages_checked"] > 0 and talker["blocks_swept"] > 0


def test_the_same_without_speech_over_http(omni: Server, wanted: dict[str, tuple[list[int], Any]]) -> None:
    options = {name: value for name, value in GREEDY.items() if name != "voice"}
    body = {"messages": json.dumps(message(ASKED["image"])), "stream": False, **options}
    status, found = generate(omni, "chat", body)
    assert status == 200
    info = json.loads(found["info"])
    assert [entry["token_id"] for entry in info["logprobs"]] == wanted["image"][0]


def test_both_modes_give_one_sound_and_quality_begins_with_a_large_piece(omni: Server) -> None:
    answers = {mode: ask(omni, "omni", "Hello", **GREEDY, audio_mode=mode) for mode in ("latency", "quality")}
    first = {mode: len(next(r.audio for r in answer.responses if r.audio is not None)) for mode, answer in answers.items()}
    assert first["latency"] < first["quality"]
    np.testing.assert_allclose(answers["latency"].audio, answers["quality"].audio, rtol=0, atol=1e-4)


def test_an_answer_of_one_token_is_spoken(omni: Server) -> None:
    answer = ask(omni, "omni", "Hello", **(GREEDY | {"max_tokens": 1}))
    answer.check_complete()
    assert len(answer.tokens) == 1 and len(answer.audio)


def test_voices_are_listed_and_others_refused(omni: Server) -> None:
    found = http_get(omni, "/v2/models/omni/config")["parameters"]
    assert found["voices"]["string_value"] == "aiden, chelsie, ethan"
    assert found["default_voice"]["string_value"] == "ethan"
    assert "voice: 'nobody' is not allowed; allowed: aiden, chelsie, ethan" in refusal(omni, "omni", "Hi", voice="nobody")
    default, ethan, aiden = (
        ask(omni, "omni", "Hello", **{k: v for k, v in GREEDY.items() if k != "voice"}, **voice)
        for voice in ({}, {"voice": "ethan"}, {"voice": "aiden"})
    )
    np.testing.assert_array_equal(default.audio, ethan.audio)
    assert not np.array_equal(default.audio, aiden.audio)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}], "video is not supported"),
        ([{"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}], "input_audio"),
        ([{"type": "input_audio", "input_audio": {"data": "AAAAAA==", "format": "float32"}}], "sample_rate"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}], "image_url"),
        ([{"type": "image_url", "image_url": {"url": "http://example.org/a.png"}}], "the server fetches nothing"),
        ([{"type": "text", "text": "<|image_pad|>"}], "<|image_pad|>"),
    ],
)
def test_bad_media_are_refused_by_name(omni: Server, content: list[Any], named: str) -> None:
    found = refusal(omni, "omni", [{"role": "user", "content": content}])
    assert "INVALID_ARGUMENT" in found and named in found


def test_a_prompt_whose_audio_is_too_long_is_refused(omni: Server) -> None:
    found = refusal(omni, "omni", message([noise(16_000 * 90)]))
    assert "the prompt has" in found and "allowed: at most 1023" in found


def test_a_client_that_leaves_stops_the_speech(omni: Server) -> None:
    request = Request(omni, "omni", message(ASKED["audio"]), **(GREEDY | {"max_tokens": 400}))
    assert request.wait_for("text").kind == "text"
    request.cancel()


def test_many_at_once_and_alone_say_the_same(omni: Server) -> None:
    def one(answer: Answer) -> tuple[list[int], bytes]:
        answer.check_complete()
        return answer.tokens, answer.audio.tobytes()

    asked = [(message([f"{word}", *content]), GREEDY) for word in ("one", "two") for content in ASKED.values()]
    together = [one(answer) for answer in ask_together(omni, "omni", asked)]
    assert together == [one(ask(omni, "omni", content, **options)) for content, options in asked]


def test_equal_requests_sound_alike(omni: Server) -> None:
    """Five at once, and alone before and after another."""
    together = {answer.audio.tobytes() for answer in ask_together(omni, "omni", [("Hello", GREEDY)] * 5)}
    before, other, after = (ask(omni, "omni", said, **GREEDY).audio.tobytes() for said in ("Hello", "one two three", "Hello"))
    assert together == {before} == {after}
    assert other not in together
