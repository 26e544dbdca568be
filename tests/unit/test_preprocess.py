"""Messages and options become token ids, or a refusal that names what is wrong."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import byte_level_tokenizer

from tritone.deployment import Deployment
from tritone.errors import InvalidArgument
from tritone.options import Options, Sampling
from tritone.stages.preprocess import MAX_SPEECH_CHARACTERS, PreprocessStage, new_session
from tritone.text.chat import parse_messages

CONTEXT = 96
CREATED = 12.5
TEMPLATE = (
    "{% if messages[0].role == 'tool' %}{{ raise_exception('tool needs a call before it') }}{% endif %}"
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def checkpoint(
    directory: Path, template: str | None = TEMPLATE, generation: dict[str, Any] | None = None
) -> Path:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), eos_token="<|im_end|>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 330}))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def stage_of(directory: Path, voice: Path | None = None, **more: Any) -> PreprocessStage:
    data = {"checkpoint": str(directory), "voice": str(voice) if voice else None, "max_context": CONTEXT}
    return PreprocessStage(Deployment.parse(data | more, "test"))


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> PreprocessStage:
    directory = checkpoint(
        tmp_path_factory.mktemp("checkpoint"),
        generation={
            "eos_token_id": [2, 0],
            "temperature": 0.2,
            "top_k": 40,
            "top_p": None,
            "do_sample": True,
        },
    )
    voice = tmp_path_factory.mktemp("voice")
    (voice / "voice.json").write_text(json.dumps({"voices": ["anna", "berta"], "default_voice": "berta"}))
    return stage_of(directory, voice)


def encode(text: str) -> list[int]:
    return list(byte_level_tokenizer().encode(text).ids)


def chat(stage: PreprocessStage, messages: Any, role: Any = "chat", **parameters: Any) -> Any:
    raw = (
        messages
        if isinstance(messages, bytes)
        else (messages if isinstance(messages, str) else json.dumps(messages)).encode()
    )
    return stage.generate(raw, parameters, role, CREATED)


def refusal(stage: PreprocessStage, messages: Any, role: Any = "chat", **parameters: Any) -> str:
    with pytest.raises(InvalidArgument) as caught:
        chat(stage, messages, role, **parameters)
    caught.value.message.encode()  # the client must be able to read it
    return caught.value.message


USER = {"role": "user", "content": "The dog?"}


# The prompt


def test_messages_go_through_the_chat_template(stage: PreprocessStage) -> None:
    messages = [
        {"role": "system", "content": "Short."},
        USER,
        {"role": "assistant", "content": "안녕 👩‍👧"},
        USER,
    ]
    expected = (
        "<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\nThe dog?<|im_end|>\n"
        "<|im_start|>assistant\n안녕 👩‍👧<|im_end|>\n"
        "<|im_start|>user\nThe dog?<|im_end|>\n<|im_start|>assistant\n"
    )
    made = chat(stage, messages)
    assert made.ids.tolist() == encode(expected)
    assert made.ids.dtype == np.int32
    assert encode(expected)[0] == 1  # markup is one token each


@pytest.mark.parametrize(
    "text", ["The dog?", json.dumps([USER]), json.dumps(USER), "\n [" + json.dumps(USER) + "] "]
)
def test_plain_text_is_one_user_message(text: str, stage: PreprocessStage) -> None:
    assert chat(stage, text).ids.tolist() == encode(
        "<|im_start|>user\nThe dog?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_text_parts_are_joined(stage: PreprocessStage) -> None:
    parts = [{"type": "text", "text": "The "}, {"type": "text", "text": "dog?"}]
    assert chat(stage, [{"role": "user", "content": parts}]).ids.tolist() == chat(stage, [USER]).ids.tolist()


def test_tools_reach_the_template(stage: PreprocessStage) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    made = chat(stage, [USER], tools=json.dumps(tools))
    text = byte_level_tokenizer().decode(made.ids.tolist(), skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\n[{")
    assert json.loads(text.split("\n")[1].removesuffix("<|im_end|>")) == tools


def test_what_the_template_refuses_is_a_refusal(stage: PreprocessStage, tmp_path: Path) -> None:
    message = refusal(stage, [{"role": "tool", "content": "42"}])
    assert message.startswith("messages: refused by the checkpoint's chat template")
    assert "tool needs a call before it" in message
    assert "chat template" in refusal(stage_of(checkpoint(tmp_path, template=None)), [USER])


def test_text_format_has_no_template(stage: PreprocessStage) -> None:
    for text in ("The dog?", '[{"role": "user"}]', "{", " "):
        assert chat(stage, text, input_format="text").ids.tolist() == encode(text)


def test_tools_need_the_template(stage: PreprocessStage) -> None:
    assert refusal(stage, "The dog?", input_format="text", tools='[{"a": 1}]').startswith(
        "tools: not allowed"
    )


def test_token_ids_are_taken_as_they_are(stage: PreprocessStage) -> None:
    assert chat(stage, [0, 329, 5, 5], input_format="token_ids").ids.tolist() == [0, 329, 5, 5]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "{}",
        "nonsense",
        "[1, 2",
        "[330]",
        "[-1]",
        "[1.0]",
        "[true]",
        '["1"]',
        "[null]",
        "[[1]]",
        "[1e3]",
        "null",
        "[" + "9" * 5000 + "]",
    ],
)
def test_token_ids_that_are_none(text: str, stage: PreprocessStage) -> None:
    message = refusal(stage, text, input_format="token_ids")
    assert message.startswith("messages: ")
    assert message.endswith("allowed: a JSON list of integers 0 to 329")
    assert len(message) < 250


# Limits


def ids(count: int) -> list[int]:
    return [5] * count


def test_the_longest_prompt_leaves_one_token_for_the_answer(stage: PreprocessStage) -> None:
    made = chat(stage, ids(CONTEXT - 1), input_format="token_ids")
    assert (len(made.ids), made.options.max_tokens) == (CONTEXT - 1, 1)


@pytest.mark.parametrize("count", [CONTEXT, CONTEXT + 1, 5000])
def test_one_token_more_is_refused_with_the_limit(count: int, stage: PreprocessStage) -> None:
    message = refusal(stage, ids(count), input_format="token_ids")
    assert f"the prompt has {count} tokens; allowed: at most {CONTEXT - 1}" in message
    assert f"the context of {CONTEXT} tokens" in message


@pytest.mark.parametrize(("text", "form"), [("[]", "token_ids"), ("", "text")])
def test_an_empty_prompt_is_refused(text: str, form: str, stage: PreprocessStage) -> None:
    assert refusal(stage, text, input_format=form) == "messages: the prompt has 0 tokens; allowed: at least 1"


def test_max_tokens_is_what_the_context_still_holds(stage: PreprocessStage) -> None:
    def wanted(**parameters: Any) -> int:
        return int(chat(stage, ids(90), input_format="token_ids", **parameters).options.max_tokens)

    assert wanted() == 6
    assert [wanted(max_tokens=count) for count in (1, 6, 7, CONTEXT)] == [1, 6, 6, 6]
    message = refusal(stage, ids(90), input_format="token_ids", max_tokens=CONTEXT + 1)
    assert (
        message
        == f"max_tokens: {CONTEXT + 1} is not allowed; allowed: integer 1 to {CONTEXT} (the context length)"
    )
    for count in (0, -1):
        assert refusal(stage, [USER], max_tokens=count).startswith(f"max_tokens: {count} is not allowed")


def test_the_deployments_answer_length_is_the_default(stage: PreprocessStage, tmp_path: Path) -> None:
    short = stage_of(checkpoint(tmp_path), default_max_tokens=4)
    assert chat(short, ids(5), input_format="token_ids").options.max_tokens == 4
    assert chat(short, ids(5), input_format="token_ids", max_tokens=9).options.max_tokens == 9
    assert chat(short, ids(94), input_format="token_ids").options.max_tokens == 2


# What the checkpoint says


def test_end_tokens_and_sampling_come_from_the_checkpoint(stage: PreprocessStage) -> None:
    made = chat(stage, [USER], seed=4)
    assert made.stop_ids == (2, 0)
    assert made.options.sampling == Sampling(temperature=0.2, top_k=40, seed=4)
    assert chat(stage, [USER], temperature=0, seed=4).options.sampling == Sampling(
        temperature=0.0, top_k=40, seed=4
    )


def test_an_ignored_end_has_no_end_tokens(stage: PreprocessStage) -> None:
    assert chat(stage, [USER], ignore_eos=True).stop_ids == ()


@pytest.mark.parametrize(
    ("generation", "stop_ids"),
    [
        (None, (2,)),
        ({}, (2,)),
        ({"eos_token_id": 2}, (2,)),
        ({"eos_token_id": 0}, (0, 2)),
        ({"eos_token_id": [0, 2]}, (0, 2)),
    ],
)
def test_the_tokenizers_end_token_always_ends(generation: Any, stop_ids: Any, tmp_path: Path) -> None:
    made = chat(stage_of(checkpoint(tmp_path, generation=generation)), [USER], seed=1)
    assert made.stop_ids == stop_ids
    assert made.options.sampling == Sampling(seed=1)


def test_each_request_has_its_own_session_and_seed(stage: PreprocessStage) -> None:
    made = [chat(stage, [USER]) for _ in range(20)]
    assert len({request.session for request in made}) == 20
    assert len({request.options.sampling.seed for request in made}) == 20
    assert all(0 < request.session < 2**63 for request in made)
    assert all(request.created == CREATED for request in made)
    assert 0 not in {new_session() for _ in range(1000)}


# Refusals


WRONG: list[tuple[Any, str]] = [
    ("", "messages: '' is not allowed; allowed: a question as text"),
    (" \n\t", "messages: "),
    ("[]", "messages: [] is not allowed; allowed: at least one message"),
    ("{}", "messages[0].role: None is not allowed; allowed: system, user, assistant, tool"),
    ("[", "messages: starts with '[' but is not JSON"),
    ('{"role": "user"', "messages: starts with '{' but is not JSON"),
    ("[hello]", "messages: starts with '[' but is not JSON"),
    ("[1]", "messages[0]: 1 is not allowed; allowed: an object"),
    ('["text"]', "messages[0]: 'text' is not allowed"),
    ("[null]", "messages[0]: None"),
    (
        [USER, {"role": "robot", "content": "x"}],
        "messages[1].role: 'robot' is not allowed; allowed: system, user",
    ),
    ([{"role": "User", "content": "x"}], "messages[0].role: 'User'"),
    ([{"role": ["user"], "content": "x"}], "messages[0].role: ['user']"),
    ([{"role": "\ud800", "content": "x"}], "messages[0].role: '\\ud800'"),
    ([{"content": "x"}], "messages[0].role: None"),
    ([{"role": "user"}], "messages[0].content: None"),
    (
        [{"role": "user", "content": ""}],
        "messages[0].content: '' is not allowed; allowed: text that is not empty",
    ),
    ([{"role": "user", "content": " \n"}], "messages[0].content: "),
    ([{"role": "user", "content": 5}], "messages[0].content: 5"),
    ([{"role": "user", "content": {"text": "x"}}], "messages[0].content: {"),
    ([{"role": "user", "content": []}], "messages[0].content: ''"),
    ([{"role": "user", "content": [5]}], "messages[0].content: 5"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content: 'text'"),
    ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content: 'text'"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        "messages[0].content: 'image_url'",
    ),
    ([USER, {"role": "assistant", "content": "x"}], "messages[1].role: 'assistant'"),
    ([{"role": "assistant", "content": None}], "messages[0].content: None"),
    ([USER, {"role": "user", "content": "a\0b"}], "messages[1].content: holds a NUL character at 1"),
    ("a\0b", "messages: holds a NUL character at 1"),
    ([{"role": "user", "content": "ab\ud83d"}], "messages[0].content: holds the lone surrogate U+D83D at 2"),
    (
        [{"role": "user", "content": "\udc00\ud83d"}],
        "messages[0].content: holds the lone surrogate U+DC00 at 0",
    ),
    (
        [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}],
        "messages[0].content: holds the lone surrogate",
    ),
    (b"\xff", "messages: not UTF-8 at byte 0"),
    (b"abc\xed\xa0\x80", "messages: not UTF-8 at byte 3"),
    (b"\xc3", "messages: not UTF-8 at byte 0"),
]


@pytest.mark.parametrize(("messages", "reason"), WRONG, ids=lambda value: ascii(value)[:40])
def test_wrong_messages_are_named(messages: Any, reason: str, stage: PreprocessStage) -> None:
    message = refusal(stage, messages)
    assert message.startswith(reason)
    assert len(message) < 400


def test_whole_surrogate_pairs_are_characters(stage: PreprocessStage) -> None:
    raw = b'[{"role": "user", "content": "\\ud83d\\ude00"}]'
    assert chat(stage, raw).ids.tolist() == chat(stage, "😀").ids.tolist()


def test_lone_surrogates_in_tools_are_refused(stage: PreprocessStage) -> None:
    refusal(stage, [USER], tools='[{"name": "\\ud800"}]')


def test_a_call_of_a_tool_needs_no_content() -> None:
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "42"},
    ]
    assert parse_messages(json.dumps(messages)) == messages


@pytest.mark.parametrize("parameters", [{}, {"input_format": "token_ids"}])
def test_deeply_nested_json_is_refused_like_any_other(parameters: Any, stage: PreprocessStage) -> None:
    for text in ("[" * 200_000, "[" * 200_000 + "]" * 200_000, '{"a":' * 100_000):
        assert refusal(stage, text, **parameters).startswith("messages: ")


def test_options_are_checked_with_the_ensembles_own_table(stage: PreprocessStage) -> None:
    assert "option 'voice' is unknown for 'chat'" in refusal(stage, [USER], voice="anna")
    assert "option 'bogus' is unknown" in refusal(stage, [USER], bogus=1)
    assert refusal(stage, [USER], "omni", voice="carla").endswith("allowed: anna, berta")
    assert refusal(stage, [USER], temperature=float("nan")).startswith("temperature: nan is not allowed")
    made = chat(stage, [USER], "omni")
    assert (made.options.speech, made.options.voice) == (True, "berta")
    assert chat(stage, [USER], "omni", voice="anna").options.voice == "anna"


def test_a_server_without_voice_still_chats(tmp_path: Path) -> None:
    mute = stage_of(checkpoint(tmp_path))
    assert chat(mute, [USER]).options.speech is False
    assert "no voice" in refusal(mute, [USER], "omni")


def test_malformed_requests_are_refusals_never_crashes(stage: PreprocessStage) -> None:
    chance = random.Random(4)
    seeds = [
        json.dumps([USER, USER]).encode(),
        b"[1, 2, 3]",
        "안녕 👩‍👧".encode(),
        b'{"role": "user", "content": [{"type": "text"}]}',
    ]
    values: list[Any] = [0, -1, 1.5, float("nan"), True, "", "x", "[]", "[1]", "{", None, 2**70]
    names = [
        "temperature",
        "stop",
        "tools",
        "seed",
        "n",
        "input_format",
        "logprobs",
        "max_tokens",
        "nonsense",
    ]
    for _ in range(1000):
        raw = bytearray(chance.choice(seeds))
        for _ in range(chance.randint(0, 4)):
            place = chance.randrange(len(raw))
            raw[place : place + chance.randint(0, 3)] = bytes(
                chance.choices(b'[]{}":,\\u0x\xff\x00 ', k=chance.randint(0, 3))
            )
            raw = raw or bytearray(b" ")
        parameters = {chance.choice(names): chance.choice(values) for _ in range(chance.randint(0, 2))}
        try:
            stage.generate(bytes(raw), parameters, chance.choice(["chat", "omni"]), 0.0)
        except InvalidArgument as error:
            error.message.encode()


# Text to speak


def test_text_to_speak(stage: PreprocessStage) -> None:
    event = stage.speech("안녕 👋".encode(), {"voice": "anna", "speed": 1.5, "seed": 3}, 2.5)
    assert (event.kind, event.text) == ("speak", "안녕 👋")
    options = Options.from_json(event.info["options"])
    assert (options.speech, options.voice, options.speed, options.sampling.seed) == (True, "anna", 1.5, 3)
    assert event.info["created"] == 2.5


def test_text_to_speak_is_not_read_as_json(stage: PreprocessStage) -> None:
    assert stage.speech(b"[1]", {}, 0.0).text == "[1]"


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "text: ''"),
        (b" \n ", "text: "),
        (b"a\0", "text: holds a NUL character at 1"),
        (b"\xff", "text: not UTF-8 at byte 0"),
        (
            b"x" * (MAX_SPEECH_CHARACTERS + 1),
            f"text: {MAX_SPEECH_CHARACTERS + 1} characters; allowed: at most {MAX_SPEECH_CHARACTERS}",
        ),
    ],
)
def test_text_that_cannot_be_spoken(raw: bytes, reason: str, stage: PreprocessStage) -> None:
    with pytest.raises(InvalidArgument) as caught:
        stage.speech(raw, {}, 0.0)
    assert caught.value.message.startswith(reason)


def test_speech_takes_the_longest_text_in_characters(stage: PreprocessStage) -> None:
    assert len(stage.speech(("한" * MAX_SPEECH_CHARACTERS).encode(), {}, 0.0).text) == MAX_SPEECH_CHARACTERS


def test_speech_has_no_options_of_text(stage: PreprocessStage) -> None:
    with pytest.raises(InvalidArgument, match="option 'temperature' is unknown for 'speech'"):
        stage.speech(b"hi", {"temperature": 1.0}, 0.0)
