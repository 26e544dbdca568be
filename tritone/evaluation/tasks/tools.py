"""Tool calls: whether a greedy answer is a call of a known function with the arguments that it requires."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tritone.evaluation.bootstrap import Figure, Values, estimate
from tritone.evaluation.reference import Reference
from tritone.evaluation.runner import Runner
from tritone.evaluation.tasks.task import Raw, Report

LENGTH = 64
_KINDS: dict[str, type | tuple[type, ...]] = {"string": str, "number": (int, float), "integer": int}


def _function(name: str, description: str, **arguments: str) -> dict[str, Any]:
    properties = {argument: {"type": kind} for argument, kind in arguments.items()}
    return {"name": name, "description": description, "parameters": {"properties": properties, "required": list(arguments)}}


FUNCTIONS = (
    _function("get_weather", "The weather in a city on a day", city="string", day="string"),
    _function("convert_currency", "An amount of money in another currency", amount="number", source="string", target="string"),
    _function("set_alarm", "Rings at a time of day", hour="integer", minute="integer"),
    _function("send_message", "Sends a text to a person", person="string", text="string"),
)
EXAMPLES = (
    ("Will it rain in Lisbon on Sunday?", {"name": "get_weather", "arguments": {"city": "Lisbon", "day": "Sunday"}}),
    ("Wake me at quarter to six.", {"name": "set_alarm", "arguments": {"hour": 5, "minute": 45}}),
    (
        "How many euros are 25 pounds?",
        {"name": "convert_currency", "arguments": {"amount": 25, "source": "GBP", "target": "EUR"}},
    ),
    ("Tell Maria that I am late.", {"name": "send_message", "arguments": {"person": "Maria", "text": "I am late."}}),
)
REQUESTS = (
    "What is the weather in Oslo tomorrow?",
    "Wake me at half past seven.",
    "How much is 40 dollars in yen?",
    "Write to Tom that the train is on time.",
    "Is it sunny in Cairo today?",
    "Set an alarm for 22:15.",
    "Convert 300 Swiss francs to euros.",
    "Let Anna know that dinner is ready.",
    "Do I need an umbrella in London on Friday?",
    "Please ring at ten past nine.",
    "I have 12.5 euros. What is that in pounds?",
    "Text my brother that I found the keys.",
    "How warm will it be in Nairobi on Monday?",
    "I must get up at five o'clock.",
    "What are 1000 rupees in dollars?",
    "Ask Peter whether he is coming.",
    "Will there be snow in Helsinki on Saturday?",
    "An alarm at 6:20, please.",
    "Change 75 dollars to Canadian dollars.",
    "Send Julia my thanks for the book.",
    "What will the weather be like in Lima on Wednesday?",
    "Remind me at a quarter past three in the afternoon.",
    "How many pounds do I get for 60 euros?",
    "Tell the team that the meeting is moved to noon.",
)


class Tools:
    name = "tools"
    by_token = False
    source = f"{len(REQUESTS)} requests and four functions written for this evaluation, after four worked examples"

    def __init__(
        self, chat: Callable[[list[dict[str, str]]], list[int]], decode: Callable[[list[int]], str], stop: list[int], items: int
    ) -> None:
        """``chat`` makes token ids of messages, ``decode`` text of token ids."""
        self._decode, self._stop = decode, stop
        self._prompts = [chat(messages(request)) for request in REQUESTS[:items]]

    @property
    def items(self) -> Any:
        return [self._prompts, self._stop]

    @property
    def longest(self) -> int:
        return max(map(len, self._prompts)) + LENGTH

    def run(self, runner: Runner, reference: Reference, is_reference: bool, progress: Report) -> Raw:
        count = len(self._prompts)
        answers = runner.greedy(self._prompts, LENGTH, self._stop, lambda done: progress(done, count))
        return {"answers": [self._decode(answer) for answer in answers]}

    def figures(self, raw: Raw, reference: Raw, seed: int) -> dict[str, Figure]:
        ours, theirs = ([call_of(answer) for answer in one["answers"]] for one in (raw, reference))
        valid = [float(call is not None) for call in ours]
        before = [float(call is not None) for call in theirs]
        same = [float(a == b) for a, b in zip(ours, theirs, strict=True)]

        def mean(values: Values) -> Values:
            shares: Values = values.mean(-1)
            return shares

        return {
            "valid": estimate(mean, valid, seed=seed, name=self.name),
            "valid_change": estimate(lambda a, b: mean(a - b), valid, before, seed=seed, name=self.name),
            "same_call": estimate(mean, same, seed=seed, name=self.name),
        }


def messages(request: str) -> list[dict[str, str]]:
    """The functions as the system's message, worked examples, and the request."""
    functions = "\n".join(json.dumps(function) for function in FUNCTIONS)
    system = f'Answer with a call of one of these functions, as JSON with "name" and "arguments".\n{functions}'
    talk = [{"role": "system", "content": system}]
    for question, call in EXAMPLES:
        talk += [{"role": "user", "content": question}, {"role": "assistant", "content": json.dumps(call)}]
    return [*talk, {"role": "user", "content": request}]


def call_of(answer: str) -> dict[str, Any] | None:
    """The call that an answer is: the JSON object at its first brace, if it names a known function and has exactly its
    arguments, all of the type that the function wants; else None."""
    start = answer.find("{")
    if start < 0:
        return None
    try:
        call, _ = json.JSONDecoder().raw_decode(answer, start)
    except (ValueError, RecursionError):
        return None
    function = next((function for function in FUNCTIONS if function["name"] == call.get("name")), None)
    arguments = call.get("arguments")
    if function is None or not isinstance(arguments, dict):
        return None
    wanted = function["parameters"]["properties"]
    if set(arguments) != set(wanted):
        return None
    for name, kind in wanted.items():
        if isinstance(arguments[name], bool) or not isinstance(arguments[name], _KINDS[kind["type"]]):
            return None
    return {"name": call["name"], "arguments": arguments}
