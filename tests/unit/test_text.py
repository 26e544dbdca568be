"""Tokens become text that may be shown: no cut characters, no U+FFFD, no stop string."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from helpers import byte_level_tokenizer, tokens_of_bytes
from tokenizers import Tokenizer, decoders, models

from tritone.text.detokenizer import Detokenizer
from tritone.text.stops import StopMatcher

REPLACEMENT = "\ufffd"

TEXTS = [
    "The quick brown fox.",
    " leading and  double  spaces \n\n and\ttabs ",
    "안녕하세요 세계, 값과 뷁",
    "👩‍👩‍👧‍👦👨🏽‍🚀🏳️‍🌈🇰🇷 after",
    "é decomposed: e\u0301, ß, ﷽, 𝒳, \u200b|\ufeff|",
    "日本語とالعربية עברית ไทย",
    "<|im_start|> written out",
]


def stream(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.push(token) for token in tokens]


def well_formed(data: bytes) -> str:
    """What the bytes say, less what is no UTF-8 in them."""
    return data.decode("utf-8", errors="replace").replace(REPLACEMENT, "")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("by_byte", [False, True])
def test_joined_pieces_are_the_text(text: str, by_byte: bool) -> None:
    tokenizer = byte_level_tokenizer()
    text = text.replace("<|im_start|>", "<im_start>")
    tokens = tokens_of_bytes(text.encode()) if by_byte else tokenizer.encode(text).ids
    pieces = stream(tokenizer, tokens)
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert "".join(pieces) == text == tokenizer.decode(tokens)


def test_characters_come_whole_and_at_once() -> None:
    tokenizer = byte_level_tokenizer()
    assert stream(tokenizer, tokens_of_bytes("a한b".encode())) == ["a", "", "", "한", "b"]
    assert stream(tokenizer, tokens_of_bytes("👩‍👧".encode())) == [
        "",
        "",
        "",
        "👩",
        "",
        "",
        "\u200d",
        "",
        "",
        "",
        "👧",
    ]


def test_text_is_not_held_back_without_need() -> None:
    tokenizer = byte_level_tokenizer()
    tokens = tokenizer.encode("The quick brown fox jumps").ids
    assert stream(tokenizer, tokens) == [tokenizer.decode([token]) for token in tokens]


@pytest.mark.parametrize(
    "data",
    [
        b"a\xff\xfeb",
        b"\x80.",
        b"\xe2\x82.",
        b"\xf0\x9f\x98x",
        b"\xc3\xc3\xa9.",
        b"\xed\xa0\x80.",
        b"\xf0\x9f\xf0\x9f\x98\x80.",
        b"\xff" * 20 + b".",
        b"ok \xe2\x28\xa1 ok",
        "\ufffd.".encode(),
    ],
)
def test_bytes_that_are_no_character_leave_no_trace(data: bytes) -> None:
    pieces = stream(byte_level_tokenizer(), tokens_of_bytes(data))
    assert "".join(pieces) == well_formed(data)


@pytest.mark.parametrize("seed", range(100))
def test_random_bytes(seed: int) -> None:
    chance = random.Random(seed)
    parts = [
        chance.choice([bytes([chance.randrange(256)]), "한".encode(), "👩".encode(), b"a", " é".encode()])
        for _ in range(chance.randint(1, 40))
    ]
    data = b"".join(parts) + b"."
    assert "".join(stream(byte_level_tokenizer(), tokens_of_bytes(data))) == well_formed(data)


def test_special_tokens_have_no_text() -> None:
    tokenizer = byte_level_tokenizer()
    end = tokenizer.token_to_id("<|im_end|>")
    tokens = [end, *tokens_of_bytes("한".encode()), end, *tokens_of_bytes(b"b")]
    assert "".join(stream(tokenizer, tokens)) == "한b"


def test_answers_do_not_share_state() -> None:
    tokenizer = byte_level_tokenizer()
    half, other = Detokenizer(tokenizer), Detokenizer(tokenizer)
    first, second, third = tokens_of_bytes("한".encode())
    assert [half.push(first), half.push(second)] == ["", ""]
    assert "".join(other.push(token) for token in tokens_of_bytes(b"xy")) == "xy"
    assert half.push(third) == "한"


def byte_fallback_tokenizer() -> Tokenizer:
    """As in Llama 2 and Mistral: rare bytes are tokens like <0x0A>, beside ordinary pieces."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256, "x": 257, "▁y": 258}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def test_byte_fallback_characters() -> None:
    tokens = [257, *"\n😀한".encode(), 258]
    assert "".join(stream(byte_fallback_tokenizer(), tokens)) == "x\n😀한 y"


def test_byte_fallback_with_a_broken_character_after_a_newline() -> None:
    # A sampled answer may hold it, and one answer must never stop the others: no exception, the text goes on.
    tokens = [257, 0x0A, 0xF0, 0x9F, 257, 258, 257]
    joined = "".join(stream(byte_fallback_tokenizer(), tokens))
    assert REPLACEMENT not in joined
    assert joined.replace("\n", "") == "xx yx"


# Stop strings


def pieces_of(text: str, chance: random.Random) -> Iterator[str]:
    while text:
        size = chance.randint(1, 4)
        yield text[:size]
        text = text[size:]


def run(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(piece) for piece in pieces) + matcher.flush()
    return shown, matcher.matched


def oracle(stop: str, text: str) -> tuple[str, str | None]:
    return (text[: text.index(stop)], stop) if stop in text else (text, None)


@pytest.mark.parametrize("seed", range(400))
def test_one_stop_string_against_the_oracle(seed: int) -> None:
    chance = random.Random(seed)
    text = "".join(chance.choice("ab🙂") for _ in range(chance.randint(0, 25)))
    stop = "".join(chance.choice("ab🙂") for _ in range(chance.randint(1, 5)))
    assert run((stop,), list(pieces_of(text, chance))) == oracle(stop, text)


@pytest.mark.parametrize("seed", range(400))
def test_nothing_is_held_back_that_cannot_begin_a_stop_string(seed: int) -> None:
    chance = random.Random(seed)
    stops = tuple("".join(chance.choice("ab") for _ in range(chance.randint(1, 5))) for _ in range(3))
    matcher, given, shown = StopMatcher(stops), "", ""
    for _ in range(20):
        piece = "".join(chance.choice("abc") for _ in range(chance.randint(0, 3)))
        given += piece
        shown += matcher.push(piece)
        assert given.startswith(shown)
        assert not any(stop in shown for stop in stops)
        if matcher.matched is not None:
            assert given.startswith(shown + matcher.matched)
            assert matcher.push("more") == ""
            break
        held = given[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
    assert shown + ("" if matcher.matched else matcher.flush()) in (given, shown)


def test_several_stop_strings_do_not_depend_on_how_the_text_is_cut() -> None:
    for seed in range(1000):
        chance = random.Random(seed)
        text = "".join(chance.choice("abc") for _ in range(chance.randint(0, 12)))
        stops = tuple("".join(chance.choice("abc") for _ in range(chance.randint(1, 4))) for _ in range(2))
        whole = run(stops, [text])
        for _ in range(3):
            pieces = list(pieces_of(text, chance))
            assert run(stops, pieces)[0] == whole[0], (stops, pieces)


def test_of_stop_strings_that_do_not_overlap_the_first_wins() -> None:
    assert run(("two", "one"), ["on", "e tw", "o"]) == ("", "one")
    assert run(("two", "one"), ["zero tw", "o one"]) == ("zero ", "two")


def test_an_almost_stop_is_text_after_all() -> None:
    matcher = StopMatcher(("</end>",))
    assert [matcher.push(piece) for piece in ("a<", "/e", "nx", "</")] == ["a", "", "</enx", ""]
    assert matcher.flush() == "</"
    assert matcher.flush() == ""


def test_without_stop_strings_everything_passes() -> None:
    matcher = StopMatcher(())
    assert [matcher.push("a"), matcher.push(""), matcher.push("b"), matcher.flush()] == ["a", "", "b", ""]
    assert matcher.matched is None
