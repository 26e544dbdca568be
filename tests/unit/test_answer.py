"""One answer: what is shown, when it ends and why, and what it reports."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers import byte_level_tokenizer, handoff, request, tokens_of_bytes

from tritone.messages import TokenInfo
from tritone.stages.answer import Answer

END = 2
PROMPT = {"prompt_tokens": 4, "prompt_audio_tokens": 0, "prompt_image_tokens": 0}


def answer(
    max_tokens: int = 100, stop_ids: tuple[int, ...] = (END,), cached: int = 0, **options: Any
) -> Answer:
    made = request(ids=(1, 2, 3, 4), stop_ids=stop_ids, max_tokens=max_tokens, **options)
    return Answer(made, handoff(cached_tokens=cached), byte_level_tokenizer(), now=50.0)


def feed(made: Answer, tokens: list[int]) -> list[str]:
    pieces = []
    for token in tokens:
        assert made.finish_reason is None
        pieces.append(made.accept(TokenInfo(token)))
    return pieces


def encode(text: str) -> list[int]:
    return list(byte_level_tokenizer().encode(text).ids)


def test_the_end_token_ends_the_answer() -> None:
    made = answer()
    tokens = [*encode("The dog sleeps."), END]
    assert "".join(feed(made, tokens)) == "The dog sleeps."
    assert made.finish_reason == "stop"
    assert made.usage() == {**PROMPT, "cached_tokens": 0, "completion_tokens": len(tokens)}


def test_any_of_several_end_tokens() -> None:
    made = answer(stop_ids=(0, END))
    feed(made, [*encode("dog"), 0])
    assert made.finish_reason == "stop"


def test_an_ignored_end_token_has_no_text() -> None:
    made = answer(stop_ids=())
    assert "".join(feed(made, [*encode("dog"), END, *encode(" fox")])) == "dog fox"
    assert made.finish_reason is None


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_the_length_limit_counts_tokens(limit: int) -> None:
    made = answer(max_tokens=limit)
    tokens = encode("The quick brown fox jumps")[:limit]
    assert "".join(feed(made, tokens)) == byte_level_tokenizer().decode(tokens)
    assert made.finish_reason == "length"
    assert made.tokens == limit


def test_an_end_token_as_the_last_allowed_one_is_a_stop() -> None:
    made = answer(max_tokens=2)
    feed(made, [encode("dog")[0], END])
    assert made.finish_reason == "stop"


def test_a_stop_string_over_several_tokens_is_not_shown() -> None:
    made = answer(stop=(" over the",))
    tokens = encode("The fox jumps over the lazy dog")
    pieces = []
    while made.finish_reason is None:
        pieces.append(made.accept(TokenInfo(tokens.pop(0))))
    assert "".join(pieces) == "The fox jumps"
    assert made.finish_reason == "stop"
    assert tokens


def test_a_stop_string_in_the_last_allowed_token_is_a_stop() -> None:
    tokens = tokens_of_bytes(b"abcX")
    made = answer(max_tokens=4, stop=("X",))
    assert feed(made, tokens) == ["a", "b", "c", ""]
    assert made.finish_reason == "stop"


@pytest.mark.parametrize("last", [END, None])
def test_the_beginning_of_a_stop_string_is_text_when_the_answer_ends(last: int | None) -> None:
    tokens = tokens_of_bytes(b"ab</e")
    made = answer(max_tokens=100 if last else 5, stop=("</end>",))
    assert feed(made, [*tokens, last] if last else tokens)[-1] == ("</e")
    assert made.finish_reason == ("stop" if last else "length")


@pytest.mark.parametrize("text", ["ab 👩‍👩‍👧‍👦 c", "안녕 세계"])
def test_an_answer_cut_at_any_token_shows_every_whole_character(text: str) -> None:
    tokens = tokens_of_bytes(text.encode())
    for limit in range(1, len(tokens) + 1):
        made = answer(max_tokens=limit)
        shown = "".join(feed(made, tokens[:limit]))
        assert shown == text.encode()[:limit].decode(errors="ignore")


@pytest.mark.parametrize("last", [END, None])
def test_an_answer_that_ends_in_half_a_character_shows_what_came_before_it(last: int | None) -> None:
    # The second token holds a whole character and the beginning of the next one, as real vocabularies do.
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {"a": 0, "bð": 1, "<end>": 2}  # "ð" stands for the byte F0
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    made = Answer(request(stop_ids=(END,), max_tokens=3 if last else 2), handoff(), tokenizer, now=0.0)
    shown = "".join(feed(made, [0, 1, last] if last else [0, 1]))
    assert made.finish_reason == ("stop" if last else "length")
    assert shown == "ab"


def test_no_logprobs_unless_asked() -> None:
    made = answer()
    feed(made, encode("dog"))
    assert made.take_logprobs() == {}


def test_logprobs_of_the_tokens_since_the_last_text() -> None:
    made = answer(logprobs=2)
    first, second = encode("The dog")[:2]
    made.accept(TokenInfo(first, -0.5, ((first, -0.5), (second, -2.0))))
    made.accept(TokenInfo(second, -1.5, ()))
    decode = byte_level_tokenizer().decode
    assert made.take_logprobs() == {
        "logprobs": [
            {
                "token_id": first,
                "token": decode([first]),
                "logprob": -0.5,
                "top": [
                    {"token_id": first, "token": decode([first]), "logprob": -0.5},
                    {"token_id": second, "token": decode([second]), "logprob": -2.0},
                ],
            },
            {"token_id": second, "token": decode([second]), "logprob": -1.5, "top": []},
        ]
    }
    assert made.take_logprobs() == {}
    made.accept(TokenInfo(END, -0.1))
    assert [entry["token"] for entry in made.take_logprobs()["logprobs"]] == ["<|im_end|>"]


def test_logprobs_of_half_a_character_show_no_replacement_character() -> None:
    made = answer(logprobs=1)
    token = tokens_of_bytes("한".encode())[0]
    made.accept(TokenInfo(token, -0.5, ((token, -0.5),)))
    assert "\ufffd" not in json.dumps(made.take_logprobs(), ensure_ascii=False)


def test_the_end_says_reason_usage_and_timings() -> None:
    made = answer(cached=3)
    feed(made, [*encode("dog"), END])
    info = made.end_info(now=52.5)
    assert info == {
        "finish_reason": "stop",
        "usage": {**PROMPT, "cached_tokens": 3, "completion_tokens": made.tokens},
        "timings": {"queue": 0.25, "prefill": 0.5, "decode": 2.5},
    }
    json.dumps(info)
