"""The option table: every option at its borders, just outside them, and of the wrong type."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tritone.errors import InvalidArgument, TritoneError, bad
from tritone.options import TABLE, Options, Sampling, markdown_table, parse_options

NAN, INF = float("nan"), float("inf")
VOICES = ("anna", "berta")

# fmt: off
# Written by hand, so that a change of the table shows: (ensembles, accepted (given, read back), refused).
CASES: dict[str, tuple[str, list[tuple[Any, Any]], list[Any]]] = {
    "max_tokens": ("chat omni", [(1, 1), (64, 64), (64.0, 64), (2**31 - 1, 2**31 - 1)],
                   [0, -1, 2**31, 1.5, NAN, INF, True, "10", None, [1]]),
    "temperature": ("chat omni", [(0, 0.0), (0.0, 0.0), (1, 1.0), (0.7, 0.7), (2, 2.0)],
                    [-1e-9, 2.0000001, NAN, INF, -INF, True, "1", None, 10**400]),
    "top_p": ("chat omni", [(1e-9, 1e-9), (0.5, 0.5), (1, 1.0)],
              [0, 0.0, -0.0, -0.1, 1.0000001, NAN, "1", False]),
    "top_k": ("chat omni", [(0, 0), (1, 1), (40.0, 40), (1_000_000, 1_000_000)],
              [-1, 1_000_001, 0.5, NAN, True, "5"]),
    "min_p": ("chat omni", [(0, 0.0), (0.05, 0.05), (1, 1.0)], [-0.01, 1.01, NAN, "0", True]),
    "repetition_penalty": ("chat omni", [(0.01, 0.01), (1, 1.0), (10, 10.0)],
                           [0, -1, 10.01, NAN, INF, "1", True]),
    "presence_penalty": ("chat omni", [(-2, -2.0), (0, 0.0), (2, 2.0)], [-2.01, 2.01, NAN, "0", False]),
    "frequency_penalty": ("chat omni", [(-2, -2.0), (0, 0.0), (2, 2.0)], [-2.01, 2.01, NAN, "0", False]),
    "seed": ("chat omni speech", [(0, 0), (5.0, 5), (2**63 - 1, 2**63 - 1)],
             [-1, 2**63, 1e300, 0.5, NAN, True, "7"]),
    "stop": ("chat omni",
             [("END", ("END",)), ("[END]", ("[END]",)), ("[", ("[",)), ('["a", "b"]', ("a", "b")),
              ('["\\u00e9"]', ("é",)), (json.dumps(["x"] * 16), ("x",) * 16), (" ", (" ",))],
             ["", '["a", ""]', "[1]", '["a", 2]', '["a", null]', json.dumps(["x"] * 17), 5, True, None]),
    "ignore_eos": ("chat omni", [(True, True), (False, False)], [0, 1, "true", None, 1.0]),
    "logprobs": ("chat omni", [(0, 0), (20, 20), (3.0, 3)], [-1, 21, 0.5, NAN, True, "1"]),
    "n": ("chat omni", [(1, None), (1.0, None)], [0, 2, True, "1"]),
    "tools": ("chat omni", [("[]", ()), ('[{"type": "function"}]', ({"type": "function"},))],
              ["{}", "[1]", "[[]]", "nonsense", "", 3, True, "null"]),
    "input_format": ("chat omni", [("chat", "chat"), ("text", "text"), ("token_ids", "token_ids")],
                     ["", "Text", "json", 1, True, None]),
    "cache_salt": ("chat omni", [("a", "a"), (" ", " "), ("é" * 128, "é" * 128)], ["", "x" * 129, 1, True, None, ["a"]]),
    "response": ("omni", [("text", None), ("text+audio", None)], ["audio", "", "text + audio", 1, None]),
    "voice": ("omni speech", [("anna", "anna"), ("berta", "berta")], ["", "carla", "Anna", 1, True, None]),
    "speed": ("omni speech", [(0.5, 0.5), (1, 1.0), (2, 2.0)], [0.49, 2.01, NAN, 0, "1", True]),
    "audio_format": ("omni speech", [("float32", "float32"), ("pcm16_base64", "pcm16_base64")],
                     ["wav", "", 16, None]),
    "audio_mode": ("omni speech", [("latency", "latency"), ("quality", "quality")], ["fast", "", "Quality", 1, None]),
    "stream": ("chat omni speech", [(True, True), (False, False)], [0, 1, "false", None]),
}
# fmt: on
SAMPLING = {
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
}

ACCEPTED = [(name, given, want) for name, (_, accepted, _) in CASES.items() for given, want in accepted]
REFUSED = [(name, given) for name, (_, _, refused) in CASES.items() for given in refused]


def parse(parameters: dict[str, Any], role: Any = "omni", **more: Any) -> Options:
    values: dict[str, Any] = {"voices": VOICES, "default_voice": "anna", "draw_seed": lambda: 99}
    return parse_options(parameters, role, **(values | more))


def test_the_cases_above_cover_the_whole_table() -> None:
    assert {spec.name: " ".join(spec.roles) for spec in TABLE} == {
        name: roles for name, (roles, _, _) in CASES.items()
    }


@pytest.mark.parametrize(("name", "given", "want"), ACCEPTED)
def test_accepted(name: str, given: Any, want: Any) -> None:
    for role in CASES[name][0].split():
        options = parse({name: given}, role)
        if want is not None:
            found = getattr(options.sampling if name in SAMPLING else options, name)
            assert found == want
            assert type(found) is type(want)


@pytest.mark.parametrize(("name", "given"), REFUSED, ids=lambda value: repr(value)[:30])
def test_refused_by_name_value_and_what_is_allowed(name: str, given: Any) -> None:
    for role in CASES[name][0].split():
        with pytest.raises(InvalidArgument) as caught:
            parse({name: given}, role)
        assert caught.value.code == "INVALID_ARGUMENT"
        assert caught.value.message.startswith(f"{name}: ")
        assert "; allowed: " in caught.value.message
        assert str(caught.value) == f"INVALID_ARGUMENT: {caught.value.message}"


@pytest.mark.parametrize("name", ["stop", "tools"])
def test_deeply_nested_json_is_refused_like_any_other_wrong_value(name: str) -> None:
    with pytest.raises(InvalidArgument):
        parse({name: "[" * 200_000 + "]" * 200_000})


def test_an_unknown_voice_is_answered_with_the_list() -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse({"voice": "carla"})
    assert caught.value.message == "voice: 'carla' is not allowed; allowed: anna, berta"


def test_an_unknown_voice_is_refused_even_where_nothing_is_spoken() -> None:
    with pytest.raises(InvalidArgument, match="voice: 'carla'"):
        parse({"voice": "carla", "response": "text"})


@pytest.mark.parametrize("name", ["temprature", "", "Temperature", "max_new_tokens", "best_of", "\ud800"])
def test_an_unknown_option_is_refused_by_name(name: str) -> None:
    for role in ("chat", "omni", "speech"):
        with pytest.raises(InvalidArgument) as caught:
            parse({name: 1}, role)
        assert caught.value.message.startswith(f"option {name!r} is unknown; allowed: ")
        caught.value.message.encode()


def test_options_of_another_ensemble_are_refused() -> None:
    for name, (roles, accepted, _) in CASES.items():
        for role in {"chat", "omni", "speech"} - set(roles.split()):
            with pytest.raises(InvalidArgument) as caught:
                parse({name: accepted[0][0]}, role)
            listed = caught.value.message.removeprefix(f"option {name!r} is unknown for '{role}'; allowed: ")
            assert listed.split(", ") == sorted(
                other for other, case in CASES.items() if role in case[0].split()
            )


def test_what_tritons_front_ends_add_is_not_an_option() -> None:
    assert parse({"id": "42", "triton_enable_empty_final_response": True}) == parse({})


def test_defaults() -> None:
    chat = parse({}, "chat")
    assert chat == Options(sampling=Sampling(seed=99))
    assert (chat.max_tokens, chat.stop, chat.logprobs, chat.ignore_eos, chat.tools) == (
        0,
        (),
        None,
        False,
        (),
    )
    assert (chat.speech, chat.voice, chat.stream, chat.input_format) == (False, "", True, "chat")
    assert chat.sampling == Sampling(1.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0, 99)
    assert parse({}, "omni") == Options(sampling=Sampling(seed=99), speech=True, voice="anna")
    assert parse({}, "speech") == Options(sampling=Sampling(seed=99), speech=True, voice="anna")


def test_text_only_omni_speaks_with_nobody() -> None:
    options = parse({"response": "text"})
    assert (options.speech, options.voice) == (False, "")
    options = parse({"response": "text+audio", "voice": "berta"})
    assert (options.speech, options.voice) == (True, "berta")


def test_the_checkpoints_sampling_is_the_default_of_each_value_not_given() -> None:
    checkpoint = Sampling(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.1)
    assert parse({"top_p": 0.5, "seed": 3}, "chat", sampling=checkpoint).sampling == Sampling(
        temperature=0.6, top_p=0.5, top_k=20, repetition_penalty=1.1, seed=3
    )


def test_a_seed_is_drawn_only_where_none_is_given() -> None:
    draws = iter([5, 6])
    assert parse({}, draw_seed=lambda: next(draws)).sampling.seed == 5
    assert parse({"seed": 0}, draw_seed=lambda: next(draws)).sampling.seed == 0
    assert parse({}, draw_seed=lambda: next(draws)).sampling.seed == 6


@pytest.mark.parametrize("role", ["omni", "speech"])
def test_a_server_without_voice_says_so(role: str) -> None:
    with pytest.raises(InvalidArgument, match="no voice"):
        parse({}, role, voices=())
    assert parse({}, "chat", voices=()).speech is False


def test_options_survive_json() -> None:
    options = parse(
        {
            "stop": '["\\ud83d\\ude00", "ß"]',
            "tools": '[{"a": [1, {"b": null}]}]',
            "logprobs": 0,
            "seed": 2**63 - 1,
            "temperature": 0.1,
            "stream": False,
            "voice": "berta",
            "speed": 0.75,
            "max_tokens": 9,
        }
    )
    assert Options.from_json(json.loads(json.dumps(options.to_json()))) == options
    assert options.stop == ("😀", "ß")


def test_the_markdown_table_has_a_row_for_each_option() -> None:
    rows = markdown_table().splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == [f"`{spec.name}`" for spec in TABLE]
    assert all(row.count("|") == 6 for row in rows)


def test_a_refusal_shortens_long_values() -> None:
    error = bad("stop", "x" * 10_000, "less")
    assert len(error.message) < 200
    assert error.message.endswith("... is not allowed; allowed: less")


def test_error_codes() -> None:
    assert str(TritoneError("no", "NOT_FOUND")) == "NOT_FOUND: no"
    assert str(TritoneError("no")) == "INTERNAL: no"
    with pytest.raises(ValueError, match="'NONSENSE'"):
        TritoneError("no", "NONSENSE")


def test_light_modules_need_neither_torch_nor_triton() -> None:
    modules = (
        "options",
        "messages",
        "pools",
        "engine.scheduler",
        "engine.sequence",
        "deployment",
        "text.stops",
        "errors",
        "metrics",
        "backend",
        "stages.reply",
        "stages.fair",
        "stages.loop",
        "stages.postprocess",
    )
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module('tritone.' + name)\n"
        "heavy = {'torch', 'transformers', 'tritonclient', 'triton_python_backend_utils'}\n"
        "heavy &= set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
