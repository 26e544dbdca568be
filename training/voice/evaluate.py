"""How well and how fast the trained voice speaks, through the whole server: sentences that it has not seen, rows of figures,
and answers of the demo's model with their hidden states: `python -m training.voice.evaluate`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil

from training.voice.heard import listen
from training.voice.unseen import DIGITS, SENTENCES
from tritone.cache import default_cache
from tritone.checkpoints import DEMO_TALKER
from tritone.client import Client, Stream
from tritone.deployment import Deployment
from tritone.models.voice.frames import Float32Array
from tritone.processes import read_records
from tritone.supervisor import Server, resolve_deployment
from tritone.supervisor.installation import PROJECT

SPEAKING = ("talker", "voicebox")

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about a dog.",
    "Say something kind to a friend.",
    "Name the seasons of the year.",
    "What color is the sky?",
    "What do bees make?",
    "Describe the moon in one sentence.",
    "Write one sentence about music.",
    "Why is sleep important?",
    "What is a good breakfast?",
    "Describe a forest in one sentence.",
    "How can I be a good neighbor?",
)


class Asked:
    """A server's clients, one request after the other."""

    def __init__(self, server: Server) -> None:
        self._client = Client(server.grpc_url)
        self._server = server

    def sentences(self, texts: Sequence[str]) -> Iterator[tuple[str, Float32Array]]:
        for text in texts:
            yield text, _taken(self._client.speak(text, seed=1))[1]

    def answers(self, questions: Sequence[str]) -> Iterator[tuple[str, Float32Array]]:
        """The text as it was shown."""
        for question in questions:
            yield _taken(self._client.chat(question, max_tokens=32, temperature=0.0, repetition_penalty=1.2, seed=1))

    def spent(self) -> float:
        """Processor seconds of Talker and VoiceBox so far."""
        total = 0.0
        for record in read_records(self._server.run_directory):
            if record.stage in SPEAKING:
                times = psutil.Process(record.pid).cpu_times()
                total += times.user + times.system
        return total


def _taken(stream: Stream) -> tuple[str, Float32Array]:
    text, chunks = "", [np.zeros(0, np.float32)]
    for event in stream:
        text += event.text if event.kind == "text" else ""
        if event.audio is not None:
            chunks.append(event.audio)
    return text, np.concatenate(chunks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("voice", nargs="?", default=DEMO_TALKER, help="a voice as in a deployment (%(default)s)")
    parser.add_argument("--every", type=int, default=1, help="take one text in so many")
    parser.add_argument("--deployment", type=Path, default=PROJECT / "deployments" / "demo-cpu.yaml")
    arguments = parser.parse_args()
    written = Deployment.load(arguments.deployment).model_dump()
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    deployment = Deployment.parse(written | {"voice": arguments.voice, "server": ports}, str(arguments.deployment))
    with Server(resolve_deployment(deployment, default_cache())) as server:
        asked, every = Asked(server), arguments.every
        for name, said in (
            ("sentences", asked.sentences(SENTENCES[::every])),
            ("figures", asked.sentences(DIGITS[::every])),
            ("answers", asked.answers(QUESTIONS[::every])),
        ):
            print(f"{name}: {listen(said, asked.spent)} for Talker and VoiceBox", flush=True)


if __name__ == "__main__":
    main()
