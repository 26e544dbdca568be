"""`tritone chat`: asks a running server, once or in a conversation."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from tritone.client import Client, RequestError
from tritone.commands import ask
from tritone.commands.terminal import console, errors


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "chat", help="ask a running server; without a text, converse", description=__doc__ + " Without a text: a conversation."
    )
    parser.add_argument("text", nargs="?", help="the question; - reads it from standard input")
    parser.add_argument("--system", help="a system message before the conversation")
    parser.add_argument("--wav", type=Path, help="write the spoken answer to this file (each answer anew in a conversation)")
    ask.add_server_options(parser)
    ask.add_sampling_options(parser)
    ask.add_speech_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    with Client(arguments.url, arguments.timeout) as client:
        if arguments.text is not None:
            text = sys.stdin.read() if arguments.text == "-" else arguments.text
            _answer(client, arguments, [*system, {"role": "user", "content": text}])
            return 0
        return _converse(client, arguments, system)


def _answer(client: Client, arguments: argparse.Namespace, messages: list[dict[str, str]]) -> ask.Answer:
    # Speech costs time: it is made only when it is wanted.
    model = "omni" if arguments.wav else "chat"
    options = ask.request_options(arguments)
    if not arguments.wav:
        options.pop("voice", None)
        options.pop("speed", None)
    answer = ask.show(client.chat(messages, model=model, **options), arguments.wav)
    if arguments.wav:
        errors.print(f"{arguments.wav}: {answer.audio_seconds:.1f} s", style="dim")
    return answer


def _converse(client: Client, arguments: argparse.Namespace, messages: list[dict[str, str]]) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing and history for input()
    start = len(messages)
    interactive = sys.stdin.isatty()
    if interactive:
        console.print("[dim]/new starts again, /quit or Ctrl-D ends, Ctrl-C stops an answer[/]")
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            if interactive:
                print()
            return 0
        if line in ("/quit", "/exit"):
            return 0
        if line == "/new":
            del messages[start:]
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        try:
            messages.append({"role": "assistant", "content": _answer(client, arguments, messages).text})
        except KeyboardInterrupt:
            if not interactive:
                raise
            messages.pop()
            errors.print("\n(stopped)", style="dim")
        except RequestError as error:
            messages.pop()
            if not interactive or error.code == "UNAVAILABLE":
                raise
            errors.print(str(error), style="red", markup=False)
