"""The options of a request: one table that checks them, fills defaults, and is the README's table.

Every option arrives as a Triton request parameter (bool, int, float or string). An option that is unknown, of the wrong
type or out of range is refused by name; none is dropped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from tritone.errors import InvalidArgument, bad

Role = Literal["chat", "omni", "speech"]

AUDIO_MODES = ("latency", "quality")

IGNORED = frozenset({"id", "triton_enable_empty_final_response"})
"""Parameters that Triton's own front ends add to a request; they carry nothing for the model."""

MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_SALT = 128


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Options:
    """Checked options of one request. ``max_tokens`` 0 means: as long as the context allows."""

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    speech: bool = False
    voice: str = ""
    speed: float = 1.0
    audio_format: str = "float32"
    audio_mode: str = "latency"
    stream: bool = True
    input_format: str = "chat"
    tools: tuple[Any, ...] = ()
    cache_salt: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Options:
        values = dict(data)
        values["sampling"] = Sampling(**values["sampling"])
        values["stop"] = tuple(values["stop"])
        values["tools"] = tuple(values["tools"])
        return cls(**values)


@dataclass(frozen=True)
class OptionSpec:
    """One row of the table: name, roles that take it, default as shown, allowed values as shown, meaning, checker."""

    name: str
    roles: tuple[Role, ...]
    default: str
    allowed: str
    meaning: str
    check: Callable[[str, Any, str], Any]


def _number(low: float, high: float, *, open_low: bool = False) -> Callable[[str, Any, str], float]:
    def check(name: str, value: Any, allowed: str) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise bad(name, value, allowed)
        try:
            number = float(value)
        except OverflowError:
            raise bad(name, value, allowed) from None
        if math.isnan(number) or not low <= number <= high or (open_low and number == low):
            raise bad(name, value, allowed)
        return number

    return check


def _integer(low: int, high: int) -> Callable[[str, Any, str], int]:
    def check(name: str, value: Any, allowed: str) -> int:
        # HTTP bodies may carry 64.0; a fraction is an error.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise bad(name, value, allowed)
        return value

    return check


def _boolean(name: str, value: Any, allowed: str) -> bool:
    if not isinstance(value, bool):
        raise bad(name, value, allowed)
    return value


def _one_of(*choices: str) -> Callable[[str, Any, str], str]:
    def check(name: str, value: Any, allowed: str) -> str:
        if value not in choices:
            raise bad(name, value, allowed)
        return str(value)

    return check


def _text(name: str, value: Any, allowed: str) -> str:
    if not isinstance(value, str) or not value:
        raise bad(name, value, allowed)
    return value


def _salt(name: str, value: Any, allowed: str) -> str:
    text = _text(name, value, allowed)
    if len(text) > MAX_SALT:
        raise bad(name, value, allowed)
    return text


def _stop(name: str, value: Any, allowed: str) -> tuple[str, ...]:
    stops: Any = value
    if isinstance(value, str):
        stops = [value]
        if value.startswith("["):
            try:
                parsed = json.loads(value)
            except RecursionError:
                raise bad(name, value, allowed) from None
            except ValueError:
                parsed = None
            if isinstance(parsed, list):
                stops = parsed
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise bad(name, value, allowed)
    return tuple(stops)


def _tools(name: str, value: Any, allowed: str) -> tuple[Any, ...]:
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise bad(name, value, allowed) from None
    if not isinstance(parsed, list) or not all(isinstance(tool, dict) for tool in parsed):
        raise bad(name, value, allowed)
    return tuple(parsed)


_TEXT: tuple[Role, ...] = ("chat", "omni")
_SPOKEN: tuple[Role, ...] = ("omni", "speech")
_ALL: tuple[Role, ...] = ("chat", "omni", "speech")

TABLE: tuple[OptionSpec, ...] = (
    OptionSpec("max_tokens", _TEXT, "what the context holds", "integer 1 to the context length",
               "Longest answer, in tokens.", _integer(1, 2**31 - 1)),
    OptionSpec("temperature", _TEXT, "checkpoint's, else 1.0", "number 0 to 2", "0 is greedy.", _number(0, 2)),
    OptionSpec("top_p", _TEXT, "checkpoint's, else 1.0", "number above 0, up to 1",
               "Keep the likeliest tokens whose probabilities reach this sum.", _number(0, 1, open_low=True)),
    OptionSpec("top_k", _TEXT, "checkpoint's, else 0", "integer 0 to 1000000 (0 is off)",
               "Keep this many of the likeliest tokens.", _integer(0, 1_000_000)),
    OptionSpec("min_p", _TEXT, "0", "number 0 to 1",
               "Drop tokens less likely than this share of the likeliest.", _number(0, 1)),
    OptionSpec("repetition_penalty", _TEXT, "checkpoint's, else 1.0", "number 0.01 to 10",
               "Divides (or multiplies, below zero) the logits of tokens seen in prompt or answer.",
               _number(0.01, 10)),
    OptionSpec("presence_penalty", _TEXT, "0", "number -2 to 2",
               "Subtracted from the logits of tokens in the answer.", _number(-2, 2)),
    OptionSpec("frequency_penalty", _TEXT, "0", "number -2 to 2",
               "Subtracted once for each time a token is in the answer.", _number(-2, 2)),
    OptionSpec("seed", _ALL, "random", "integer 0 to 9223372036854775807",
               "Same seed, same tokens and same audio, alone or beside other requests.", _integer(0, 2**63 - 1)),
    OptionSpec("stop", _TEXT, "none", f"a non-empty string, or a JSON list of up to {MAX_STOPS} of them",
               "The answer ends before this text; it is neither shown nor spoken.", _stop),
    OptionSpec("ignore_eos", _TEXT, "false", "true or false", "Go on after the end-of-answer token.", _boolean),
    OptionSpec("logprobs", _TEXT, "none", f"integer 0 to {MAX_LOGPROBS}",
               "Log-probability of each token and of this many alternatives, in `info`.", _integer(0, MAX_LOGPROBS)),
    OptionSpec("n", _TEXT, "1", "1", "Answers per request.", _integer(1, 1)),
    OptionSpec("tools", _TEXT, "none", "a JSON list of tool objects", "Given to the chat template.", _tools),
    OptionSpec("input_format", _TEXT, "chat", "chat, text or token_ids",
               "`text`: no chat template; `token_ids`: a JSON list of ids.", _one_of("chat", "text", "token_ids")),
    OptionSpec("cache_salt", _TEXT, "none", f"a string of 1 to {MAX_SALT} characters",
               "Prompts share cached work only with prompts of the same salt; those without one among themselves.", _salt),
    OptionSpec("response", ("omni",), "text+audio", "text or text+audio", "What is answered.",
               _one_of("text", "text+audio")),
    OptionSpec("voice", _SPOKEN, "the voice's default", "a name of the voice list", "Who speaks.", _text),
    OptionSpec("speed", _SPOKEN, "1.0", "number 0.5 to 2", "Pace of the speech.", _number(0.5, 2)),
    OptionSpec("audio_format", _SPOKEN, "float32", "float32 or pcm16_base64",
               "`audio` as a float32 tensor, or `audio_base64` with 16-bit PCM for JSON clients.",
               _one_of("float32", "pcm16_base64")),
    OptionSpec("audio_mode", _SPOKEN, "latency", "latency or quality",
               "`latency`: the first piece of sound is small and comes soon; `quality`: all pieces are large.",
               _one_of(*AUDIO_MODES)),
    OptionSpec("stream", _ALL, "true", "true or false", "false: exactly one joined answer.", _boolean),
)

_BY_NAME = {spec.name: spec for spec in TABLE}


def parse_options(
    parameters: Mapping[str, Any],
    role: Role,
    *,
    voices: tuple[str, ...] = (),
    default_voice: str = "",
    sampling: Sampling | None = None,
    draw_seed: Callable[[], int],
) -> Options:
    """Check the request parameters of one request to the ensemble ``role``.

    ``sampling`` holds the checkpoint's defaults; ``draw_seed`` gives a seed where the request names none.
    Raises :class:`InvalidArgument` naming option, value and what is allowed.
    """
    given: dict[str, Any] = {}
    for name, value in parameters.items():
        if name in IGNORED:
            continue
        spec = _BY_NAME.get(name)
        if spec is None or role not in spec.roles:
            known = ", ".join(sorted(s.name for s in TABLE if role in s.roles))
            where = f" for '{role}'" if spec is not None else ""
            raise InvalidArgument(f"option {name!r} is unknown{where}; allowed: {known}")
        given[name] = spec.check(name, value, spec.allowed)

    given.pop("n", None)
    response = given.pop("response", "text+audio" if role == "omni" else "text")
    speech = role == "speech" or response == "text+audio"
    if role != "chat" and not voices:
        raise InvalidArgument("response: this server has no voice loaded; allowed: the ensemble 'chat'")
    named = "voice" in given
    voice = given.pop("voice", default_voice)
    if (speech or named) and voice not in voices:
        raise bad("voice", voice, ", ".join(voices))
    base = sampling or Sampling()
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    base = replace(base, **{name: given.pop(name) for name in names if name in given})
    base = replace(base, seed=given.pop("seed") if "seed" in given else draw_seed())
    return Options(sampling=base, speech=speech, voice=voice if speech else "", **given)


def markdown_table() -> str:
    """The table of options as Markdown, for the README (a test keeps the two equal)."""
    lines = ["| option | ensembles | default | allowed | meaning |", "|---|---|---|---|---|"]
    for spec in TABLE:
        roles = ", ".join(spec.roles)
        lines.append(f"| `{spec.name}` | {roles} | {spec.default} | {spec.allowed} | {spec.meaning} |")
    return "\n".join(lines)
