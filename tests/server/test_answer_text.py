"""The text of an answer: whole characters, stop strings, ends, usage and log-probabilities."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from tests.server.helpers import Answer, ask, ask_together, generate, generate_stream
from tritone.supervisor import Server

COPY = {
    "emoji": "😀 😃 😄 😁 😀 😃 😄 😁 😀 😃",
    "animals": "🎉🚀🐍🎉🚀🐍🎉🚀🐍🎉🚀",
    "family": "👩‍👩‍👧 👩‍👩‍👧 👩‍👩‍👧 👩‍👩‍👧",
    "hangul": "한국어 한글 한국어 한글 한국어",
    "han": "日本語 中文 日本語 中文 日本語",
}
WEEK = "List the days of the week."
GREEDY = {"temperature": 0.0, "max_tokens": 40}


def expected_text(tokenizer: Any, answer: Answer) -> str:
    """What the whole answer decodes to, without bytes that never became a character."""
    return str(tokenizer.decode(answer.tokens, skip_special_tokens=True)).replace("\ufffd", "")


@pytest.mark.parametrize("text", COPY.values(), ids=COPY.keys())
def test_no_chunk_cuts_a_character(server: Server, tokenizer: Any, text: str) -> None:
    options = {"input_format": "text", "ignore_eos": True, "logprobs": 0, **GREEDY}
    answer = ask(server, "chat", text, **options)
    answer.check_complete()
    cut = [token for token in answer.tokens if "\ufffd" in tokenizer.decode([token])]
    assert cut, "no token cuts a character: a weak prompt"
    assert any(ord(character) > 0x2FF for character in answer.text)
    assert answer.text == expected_text(tokenizer, answer)
    assert ask(server, "chat", text, stream=False, **options).text == answer.text


def test_no_chunk_cuts_a_character_of_a_wild_answer(server: Server, tokenizer: Any) -> None:
    """At temperature 2 a model also says bytes that never become a character."""
    common = {"temperature": 2.0, "max_tokens": 30, "ignore_eos": True, "logprobs": 0, "input_format": "text"}
    asked = [(text, common | {"seed": seed}) for seed, text in enumerate(list(COPY.values()) * 3)]
    streamed = ask_together(server, "chat", asked)
    joined = ask_together(server, "chat", [(text, options | {"stream": False}) for text, options in asked])
    for answer, whole in zip(streamed, joined, strict=True):
        answer.check_complete()
        assert answer.text == whole.text == expected_text(tokenizer, answer)
    assert any("\ufffd" in tokenizer.decode(answer.tokens) for answer in streamed), (
        "no stray bytes were drawn: a weak test"
    )


@pytest.mark.parametrize("stop", ["Wednesday", "2. Tue", "y\n3", '["Wednesday", "Tuesday\\n"]'])
def test_stop_strings_are_not_shown(server: Server, stop: str) -> None:
    full = ask(server, "chat", WEEK, **GREEDY).text
    stops = json.loads(stop) if stop.startswith("[") else [stop]
    cut = min(full.find(text) for text in stops)
    assert cut > 0, full
    answer = ask(server, "chat", WEEK, stop=stop, **GREEDY)
    answer.check_complete()
    assert answer.text == full[:cut]
    assert answer.info["finish_reason"] == "stop"
    assert ask(server, "chat", WEEK, stop=stop, stream=False, **GREEDY).text == full[:cut]


def test_the_beginning_of_a_stop_string_is_text_after_all(server: Server) -> None:
    full = ask(server, "chat", WEEK, **GREEDY).text
    answer = ask(server, "chat", WEEK, stop="Monday\n2. Sunday", **GREEDY)
    assert answer.text == full
    held = ask(server, "chat", WEEK, stop=full[-6:] + "never said", **GREEDY)
    assert held.text == full
    assert held.info["finish_reason"] == "length"


def test_stop_strings_are_not_spoken(server: Server) -> None:
    """The audio is that of the text which was shown, and not of the one that was not."""
    stopped = ask(server, "omni", WEEK, stop="Wednesday", seed=1, **GREEDY)
    stopped.check_complete()
    assert "Wednesday" not in stopped.text
    spoken = ask(server, "speech", stopped.text, seed=1)
    assert np.array_equal(stopped.audio, spoken.audio)
    longer = ask(server, "speech", stopped.text + "Wednesday", seed=1)
    assert len(longer.audio) > len(stopped.audio) + 0.1 * 24000


@pytest.mark.parametrize("model", ["chat", "omni"])
def test_streamed_and_joined_answers_are_equal(server: Server, model: str) -> None:
    options = {"temperature": 0.9, "max_tokens": 24, "seed": 11}
    streamed = ask(server, model, "Describe a lighthouse.", **options)
    joined = ask(server, model, "Describe a lighthouse.", stream=False, **options)
    streamed.check_complete()
    joined.check_complete()
    assert joined.kinds == ["end"]
    assert joined.text == streamed.text
    assert joined.counted == streamed.counted
    assert joined.audio.shape == streamed.audio.shape
    assert (model == "omni") == (joined.audio.size > 0)
    assert abs(joined.audio - streamed.audio).max(initial=0) < 1e-4


def test_usage_is_exact(server: Server, tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2? 🎉"}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    answer = ask(server, "chat", messages, logprobs=0, **GREEDY)
    assert answer.usage["prompt_tokens"] == len(prompt)
    assert answer.usage["completion_tokens"] == len(answer.tokens)
    assert answer.text == expected_text(tokenizer, answer)


def test_an_answer_ends_by_itself_or_by_length(server: Server, tokenizer: Any) -> None:
    stopped = ask(server, "chat", "What is the capital of France?", logprobs=0, **GREEDY)
    assert stopped.info["finish_reason"] == "stop"
    assert stopped.tokens[-1] == tokenizer.eos_token_id
    assert "<|im_end|>" not in stopped.text
    on = ask(server, "chat", "What is the capital of France?", logprobs=0, ignore_eos=True, **GREEDY)
    assert on.info["finish_reason"] == "length"
    assert len(on.tokens) == on.usage["completion_tokens"] == 40
    assert on.tokens[: len(stopped.tokens)] == stopped.tokens


@pytest.mark.parametrize("count", [1, 2, 17])
def test_max_tokens_is_exact(server: Server, count: int) -> None:
    answer = ask(server, "chat", WEEK, max_tokens=count, temperature=0.0, logprobs=0)
    answer.check_complete()
    assert len(answer.tokens) == answer.usage["completion_tokens"] == count
    assert answer.info["finish_reason"] == "length"


def test_one_token_is_spoken(server: Server) -> None:
    answer = ask(server, "omni", WEEK, max_tokens=1, temperature=0.0)
    answer.check_complete()
    assert answer.text == "Here"
    assert len(answer.audio) > 2400


def test_logprobs_are_finite_and_agree(server: Server, tokenizer: Any) -> None:
    answer = ask(server, "chat", WEEK, logprobs=5, **GREEDY)
    for entry in answer.logprobs:
        top = entry["top"]
        assert math.isfinite(entry["logprob"]) and entry["logprob"] <= 0
        assert [value["logprob"] for value in top] == sorted(
            (value["logprob"] for value in top), reverse=True
        )
        assert (top[0]["token_id"], top[0]["logprob"]) == (
            entry["token_id"],
            pytest.approx(entry["logprob"], abs=1e-6),
        )
        assert sum(math.exp(value["logprob"]) for value in top) <= 1 + 1e-6
        assert entry["token"] == tokenizer.decode([entry["token_id"]]).replace("\ufffd", "")
    assert ask(server, "chat", WEEK, **GREEDY).logprobs == []


def test_options_that_meet_in_one_request(server: Server) -> None:
    """Streamed and joined, with a stop list and penalties at once."""
    options = {
        "stop": '["Friday", "12"]',
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.1,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.01,
        "temperature": 0.7,
        "seed": 3,
        "max_tokens": 40,
    }
    streamed = ask(server, "chat", WEEK, **options)
    assert streamed.text == ask(server, "chat", WEEK, stream=False, **options).text
    assert "Friday" not in streamed.text


def test_http_says_the_same_as_grpc(server: Server) -> None:
    body = {"messages": "Name three colours. 🎉", **GREEDY}
    expected = ask(server, "chat", "Name three colours. 🎉", **GREEDY)
    events = generate_stream(server, "chat", body)
    assert [event["index"] for event in events] == list(range(len(events)))
    assert "".join(event.get("text", "") for event in events) == expected.text
    assert [event["event"] for event in events] == expected.kinds
    status, whole = generate(server, "chat", body | {"stream": False})
    assert (status, whole["text"], whole["event"]) == (200, expected.text, "end")
    assert expected.counted.items() <= json.loads(whole["info"])["usage"].items()


def test_http_carries_audio_as_base64(server: Server) -> None:
    body = {"text": "Hello there.", "seed": 1, "audio_format": "pcm16_base64"}
    events = generate_stream(server, "speech", body)
    samples = sum(len(_pcm16(event)) for event in events)
    reference = ask(server, "speech", "Hello there.", seed=1).audio
    assert samples == len(reference)
    status, whole = generate(server, "speech", body | {"stream": False})
    assert status == 200
    assert max(abs(a / 32767 - b) for a, b in zip(_pcm16(whole), reference, strict=True)) < 1e-4


def _pcm16(event: dict[str, Any]) -> list[int]:
    import array
    import base64

    return array.array("h", base64.b64decode(event.get("audio_base64", ""))).tolist()


def test_http_generate_of_a_stream_names_the_way_out(server: Server) -> None:
    status, answer = generate(server, "chat", {"messages": "Hi", "max_tokens": 4})
    assert "generate" in answer["error"] and "response" in answer["error"], (status, answer)
