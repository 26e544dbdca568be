"""Messages with audio and images become a prompt with features, in every form that clients send, or a refusal by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import assert_fits, handoff
from media_files import base64_of, image_file, noise, pixels, sound_file

from perf.omni.tiny import make_qwen3_omni
from tritone.deployment import Deployment
from tritone.errors import InvalidArgument
from tritone.media import parts
from tritone.messages import GenerateRequest, Prefilled
from tritone.stages.answer import Answer
from tritone.stages.preprocess import PreprocessStage

CONTEXT = 400
SOUND, PICTURE = noise(16_000), pixels(64, 96)
WAV, PNG = sound_file(SOUND, subtype="FLOAT"), image_file(PICTURE)
AUDIO_TOKENS, IMAGE_TOKENS = 13, 6
"""One second of audio; 3 x 2 merged patches of 32 pixels."""
TEXT = {"type": "text", "text": "Describe this"}
AUDIO = {"type": "input_audio", "input_audio": {"data": base64_of(WAV), "format": "wav"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64_of(PNG)}}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> PreprocessStage:
    directory = tmp_path_factory.mktemp("omni")
    make_qwen3_omni(directory)
    return stage_of(directory)


def stage_of(directory: Path) -> PreprocessStage:
    return PreprocessStage(Deployment.parse({"checkpoint": str(directory), "voice": None, "max_context": CONTEXT}, "test"))


def ask(stage: PreprocessStage, *content: Any, role: str = "user", **parameters: Any) -> GenerateRequest:
    return stage.generate(json.dumps([{"role": role, "content": list(content)}]).encode(), parameters, "chat", 0.0)


def refusal(stage: PreprocessStage, *content: Any, **more: Any) -> str:
    with pytest.raises(InvalidArgument) as caught:
        ask(stage, *content, **more)
    caught.value.message.encode()
    assert len(caught.value.message) < 400
    return caught.value.message


def sound(**fields: Any) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": fields}


FORMS: list[tuple[dict[str, Any], str]] = [
    (AUDIO, "audio"),
    (sound(data=base64_of(sound_file(SOUND, subtype="FLOAT", container="WAVEX"))), "audio"),
    (sound(data=base64_of(SOUND.tobytes()), format="float32", sample_rate=16_000), "audio"),
    (sound(data=base64_of(np.repeat(SOUND, 2).tobytes()), format="float32", sample_rate=16_000, channels=2), "audio"),
    ({"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64," + base64_of(WAV)}}, "audio"),
    ({"type": "audio", "audio": base64_of(WAV)}, "audio"),
    (IMAGE, "image"),
    ({"type": "image_url", "image_url": "data:image/png;base64," + base64_of(PNG)}, "image"),
    ({"type": "image", "image": base64_of(image_file(PICTURE, "WEBP", lossless=True))}, "image"),
]


@pytest.mark.parametrize(("part", "kind"), FORMS)
def test_every_form_gives_the_same_prompt(part: dict[str, Any], kind: str, stage: PreprocessStage) -> None:
    made, usual = ask(stage, TEXT, part), ask(stage, TEXT, AUDIO if kind == "audio" else IMAGE)
    assert made.media is not None and usual.media is not None
    assert made.media.digest == usual.media.digest
    assert made.ids.tolist() == usual.ids.tolist()


def test_media_stand_where_their_parts_do_and_are_counted(stage: PreprocessStage) -> None:
    made = ask(stage, AUDIO, TEXT, IMAGE, AUDIO)
    text = stage.tokenizer.decode(made.ids)
    wanted = (
        "<|im_start|>user\n<|audio_start|>" + "<|audio_pad|>" * AUDIO_TOKENS + "<|audio_end|>Describe this"
        "<|vision_start|>" + "<|image_pad|>" * IMAGE_TOKENS + "<|vision_end|>"
        "<|audio_start|>" + "<|audio_pad|>" * AUDIO_TOKENS + "<|audio_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert text == wanted
    assert (made.audio_tokens, made.image_tokens) == (2 * AUDIO_TOKENS, IMAGE_TOKENS)
    answer = Answer(made, handoff(), stage.tokenizer.backend_tokenizer, now=0.0)
    assert answer.usage() == {
        "prompt_tokens": len(made.ids),
        "prompt_audio_tokens": 2 * AUDIO_TOKENS,
        "prompt_image_tokens": IMAGE_TOKENS,
        "cached_tokens": 0,
        "completion_tokens": 0,
    }


def test_text_alone_has_no_media(stage: PreprocessStage) -> None:
    made = ask(stage, TEXT, TEXT)
    assert (made.media, made.audio_tokens, made.image_tokens) == (None, 0, 0)
    assert made.ids.tolist() == stage.generate(b"Describe thisDescribe this", {}, "chat", 0.0).ids.tolist()
    assert made.media_tensor().shape == (0,)


def test_media_travel_to_prefill_and_no_further(stage: PreprocessStage) -> None:
    made = ask(stage, IMAGE, AUDIO, TEXT, IMAGE)
    tensors = made.to_tensors() | {"media": made.media_tensor()}
    assert_fits("prefill", tensors, output=False)
    arrived = GenerateRequest.from_tensors(tensors)
    assert arrived.media is not None and made.media is not None
    assert arrived.media.digest == made.media.digest
    assert [image.shape for image in arrived.media.images] == [(96, 64, 3), (96, 64, 3)]
    assert [mel.shape for mel in arrived.media.audio] == [(128, 100)]
    handed = Prefilled(arrived, arrived.session, handoff()).to_tensors()
    assert_fits("prefill", handed, output=True)
    later = Prefilled.from_tensors(handed).request
    assert later is not None and later.media is None
    assert (later.audio_tokens, later.image_tokens) == (made.audio_tokens, made.image_tokens)


def test_what_arrives_does_not_lie_in_the_memory_of_the_message(stage: PreprocessStage) -> None:
    made = ask(stage, AUDIO)
    tensors = made.to_tensors() | {"media": made.media_tensor()}
    arrived = GenerateRequest.from_tensors(tensors)
    tensors["media"][:] = 0
    assert arrived.media is not None and made.media is not None
    assert arrived.media.digest == made.media.digest


VIDEO = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
FLOATS = base64_of(SOUND.tobytes())
WRONG: list[tuple[Any, str]] = [
    (VIDEO, f"[0].type: 'video_url' is not allowed; allowed: {', '.join(parts.TYPES)} (video is not supported)"),
    ({"type": "video", "video": "AAAA"}, "[0].type: 'video' is not allowed"),
    ({"type": "file", "file": {}}, "[0].type: 'file' is not allowed; allowed: text, audio, input_audio"),
    ({"text": "x"}, "[0].type: None"),
    ({"type": ["audio"]}, "[0].type: ['audio']"),
    ({"type": "text", "text": 5}, "[0].text: 5 is not allowed; allowed: text"),
    ("bare", "[0]: 'bare' is not allowed; allowed: an object"),
    ({"type": "input_audio"}, "[0].input_audio: None"),
    (sound(), "[0].input_audio.data: None"),
    (sound(data=5), "[0].input_audio.data: 5"),
    (sound(data=base64_of(WAV), format="mp3"), "[0].input_audio.format: 'mp3' is not allowed; allowed: wav, flac, float32"),
    (sound(data="not base64!"), "[0].input_audio.data: 'not base64!' is not base64"),
    (sound(data=""), "[0].input_audio.data: '0 bytes'"),
    (sound(data=base64_of(WAV[:-1000])), "[0].input_audio.data: 'a WAV file with"),
    (sound(data=FLOATS, format="float32"), "[0].input_audio.sample_rate: None is not allowed; allowed: an integer"),
    (sound(data=FLOATS, format="float32", sample_rate=True), "[0].input_audio.sample_rate: True"),
    (sound(data=FLOATS, format="float32", sample_rate=1e4), "[0].input_audio.sample_rate: 10000.0"),
    (sound(data=FLOATS, format="float32", sample_rate=0), "[0].input_audio.data sample rate: 0"),
    (sound(data=FLOATS, format="float32", sample_rate=16_000, channels=0), "[0].input_audio.data channels: 0"),
    (sound(data=FLOATS, format="float32", sample_rate=16_000, channels=7), "[0].input_audio.data: '64000 bytes'"),
    (sound(data="", format="float32", sample_rate=16_000), "[0].input_audio.data: '0 samples (0.000 s)'"),
    (
        sound(data=base64_of(np.full(4000, np.nan, np.float32).tobytes()), format="float32", sample_rate=16_000),
        "[0].input_audio.data sample 0: nan",
    ),
    ({"type": "image_url", "image_url": {}}, "[0].image_url.url: None"),
    ({"type": "image_url", "image_url": {"url": "https://a.org/b.png"}}, "[0].image_url.url: 'https://a.org/b.png'"),
    ({"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}, "[0].image_url.url: 'file:///etc/hostname'"),
    ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "[0].image_url.url: 'data:image/png'"),
    ({"type": "image", "image": base64_of(WAV)}, "[0].image: b'RIFF"),
    ({"type": "audio", "audio": base64_of(PNG)}, "[0].audio: b'\\x89PNG"),
    ({"type": "image", "image": base64_of(image_file(np.zeros((300, 1, 3), np.uint8)))}, "[0].image: '1 x 300 pixels'"),
]


@pytest.mark.parametrize(("part", "reason"), WRONG, ids=lambda value: ascii(value)[:60])
def test_wrong_parts_are_named(part: Any, reason: str, stage: PreprocessStage) -> None:
    assert refusal(stage, part).startswith("messages[0].content" + reason)


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_only_a_users_message_has_media(role: str, stage: PreprocessStage) -> None:
    message = refusal(stage, TEXT, AUDIO, role=role)
    allowed = f"allowed: text in a message of role {role}; media in one of role user"
    assert message == f"messages[0].content[1].type: 'input_audio' is not allowed; {allowed}"


def test_a_prompt_of_one_token_too_many(stage: PreprocessStage, monkeypatch: pytest.MonkeyPatch) -> None:
    # A word of one token, so that the prompt can be made of any length.
    room = CONTEXT - 1 - len(ask(stage, AUDIO, {"type": "text", "text": "?"}).ids)
    fits = {"type": "text", "text": "?" + "user" * room}
    assert len(ask(stage, AUDIO, fits).ids) == CONTEXT - 1
    assert stage._omni is not None
    monkeypatch.setattr(stage._omni, "features", lambda media: pytest.fail("features of a prompt that is refused"))
    longer = {"type": "text", "text": fits["text"] + "user"}
    reason = f"messages: the prompt has {CONTEXT} tokens; allowed: at most {CONTEXT - 1}"
    assert refusal(stage, AUDIO, longer).startswith(reason)
    assert f"allowed: at most {CONTEXT - 1}" in refusal(stage, sound(data=base64_of(sound_file(noise(16_000 * 60)))))


def test_half_an_hour_in_all(stage: PreprocessStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MAX_SECONDS", 1.5)
    assert refusal(stage, AUDIO, AUDIO).startswith("messages[0].content[1].input_audio: '2.0 s of audio with those before'")
    monkeypatch.setattr(parts, "MAX_PIXELS_IN_ALL", 10_000)
    assert refusal(stage, IMAGE, IMAGE).startswith("messages[0].content[1].image_url.url: '12288 pixels with those before'")


@pytest.mark.parametrize(
    ("raw", "parameters"),
    [
        (b"say <|audio_pad|>", {}),
        (b"say <|video_pad|>", {"input_format": "text"}),
        (b'[{"role": "user", "content": [{"type": "text", "text": "<|vision_start|>"}]}]', {}),
    ],
)
def test_text_must_not_spell_media(raw: bytes, parameters: Any, stage: PreprocessStage) -> None:
    with pytest.raises(InvalidArgument, match=r"messages: the prompt holds <\|\w+\|> 1 times; allowed: 0 times"):
        stage.generate(raw, parameters, "chat", 0.0)
    token = stage.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    with pytest.raises(InvalidArgument, match=r"holds <\|image_pad\|> 1 times"):
        stage.generate(json.dumps([5, token]).encode(), {"input_format": "token_ids"}, "chat", 0.0)


def test_ids_end_with_the_thinkers_vocabulary(stage: PreprocessStage) -> None:
    with pytest.raises(InvalidArgument, match="allowed: a JSON list of integers 0 to 639"):
        stage.generate(b"[640]", {"input_format": "token_ids"}, "chat", 0.0)


def test_characters_of_media_messages_are_checked(stage: PreprocessStage) -> None:
    for text, reason in (("a\ud800", "holds the lone surrogate U+D800 at 1"), ("a\0", "holds a NUL character at 1")):
        assert refusal(stage, AUDIO, {"type": "text", "text": text}).startswith(f"messages[0].content: {reason}")


def test_the_longest_audio_fits_into_a_request(stage: PreprocessStage) -> None:
    samples = 1800 * 48_000 * 2
    assert stage.max_bytes > samples * 4 * 4 / 3
