"""The deployment files for published omni checkpoints, with tiny checkpoints of their layout: only the path and the sizes are
others."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers

from perf.omni.tiny import make_qwen3_omni, make_qwen25_omni
from tests.omni_cascade import inputs, message
from tests.omni_processor import reference_processor
from tests.published import publish
from tests.server.helpers import Answer, Request, ask, ask_together, http_get, nothing_left_behind, stage_processes, wait_until
from tests.unit.media_files import noise, pixels
from tritone.cache import default_cache
from tritone.deployment import Deployment
from tritone.supervisor import Server, resolve_deployment

DEPLOYMENTS = Path(__file__).parents[2] / "deployments"
ASKED: dict[str, list[Any]] = {
    "text": ["Hello, how are you today?"],
    "both": [pixels(100, 64), "Describe this sound in one sentence please.", noise(16_000)],
}
OPTIONS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "seed": 3, "logprobs": 0}


@dataclass(frozen=True)
class Shipped:
    """``media`` are the tokens that stand for a piece of audio and of an image; ``dies`` is the stage that is killed.
    ``batch``: sessions in a batch of the VoiceBox. On a CPU each of them costs as much as one alone, at the warm-up too.
    """

    file: str
    make: Callable[[Path], Any]
    processor: Any
    voices: str
    media: tuple[str, str]
    dies: str
    batch: int


SHIPPED = {
    "qwen3": Shipped(
        "qwen3-omni-30b.yaml",
        make_qwen3_omni,
        transformers.Qwen3OmniMoeProcessor,
        "aiden, chelsie, ethan",
        ("<|audio_pad|>", "<|image_pad|>"),
        "talker",
        2,
    ),
    "qwen25": Shipped(
        "qwen2.5-omni-7b.yaml",
        make_qwen25_omni,
        transformers.Qwen2_5OmniProcessor,
        "Chelsie, Ethan",
        ("<|AUDIO|>", "<|IMAGE|>"),
        "voicebox",
        1,
    ),
}


@dataclass(frozen=True)
class Running:
    """``directory``: the checkpoint as transformers wrote it, before it became one of the published layout."""

    server: Server
    shipped: Shipped
    directory: Path

    def tokens(self, content: list[Any]) -> tuple[int, int, int]:
        """How many tokens, audio tokens and image tokens transformers' processor makes of a message."""
        ids = inputs(reference_processor(self.shipped.processor, self.directory), content)["input_ids"][0].tolist()
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.directory)
        audio, image = (ids.count(tokenizer.convert_tokens_to_ids(name)) for name in self.shipped.media)
        return len(ids), audio, image


@pytest.fixture(scope="module", params=SHIPPED)
def running(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    shipped: Shipped = SHIPPED[request.param]
    directory = tmp_path_factory.mktemp(request.param) / "written"
    shipped.make(directory)
    published = directory.with_name("published")
    shutil.copytree(directory, published)
    publish(published)
    data = Deployment.load(DEPLOYMENTS / shipped.file).model_dump(exclude_unset=True)
    sizes = {"pool_tokens": 2048, "max_sequences": 4, "max_batch_tokens": 64}
    data |= {
        "checkpoint": str(published),
        "max_context": 1024,
        "default_max_tokens": 64,
        **{name: data[name] | sizes for name in ("prefill", "decode")},
        "talker": data["talker"] | {"pool_tokens": 4096, "hidden_blocks": 256},
        "voicebox": data["voicebox"] | {"batch": shipped.batch},
        "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0},
    }
    with Server(resolve_deployment(Deployment.parse(data, shipped.file), default_cache())) as server:
        yield Running(server, shipped, directory)


def test_it_speaks_of_what_it_reads_hears_and_sees(running: Running) -> None:
    with nothing_left_behind(running.server):
        asked = [(message(content), OPTIONS) for content in ASKED.values()]
        together = ask_together(running.server, "omni", asked)
        for answer, content in zip(together, ASKED.values(), strict=True):
            answer.check_complete()
            usage = answer.usage
            counted = (usage["prompt_tokens"], usage["prompt_audio_tokens"], usage["prompt_image_tokens"])
            assert counted == running.tokens(content)
            assert len(answer.tokens) == 8 and usage["audio_seconds"] == len(answer.audio) / 24_000 > 0

        def same(one: Answer, other: Answer) -> bool:
            return one.tokens == other.tokens and one.audio.tobytes() == other.audio.tobytes()

        alone = [ask(running.server, "omni", content, **options) for content, options in asked]
        assert all(same(one, other) for one, other in zip(together, alone, strict=True))
    found = http_get(running.server, "/v2/models/omni/config")["parameters"]
    assert found["voices"]["string_value"] == running.shipped.voices


def test_a_stage_of_the_voice_dies_alone(running: Running) -> None:
    """Text goes on; the stage is served again, with the same sound. One stage a family: both have both from one class."""
    server, stage = running.server, running.shipped.dies
    before = ask(server, "omni", "Hello", **OPTIONS)
    request = Request(server, "omni", "Hello", **(OPTIONS | {"max_tokens": 300}))
    request.wait_for("text" if stage == "talker" else "audio")
    stage_processes(server)[stage].kill()
    answer = request.finish()
    answer.check_complete()
    assert len(answer.tokens) == 300 and "audio_lost" in answer.kinds
    assert len(ask(server, "chat", "Hello", **OPTIONS).tokens) == 8
    wait_until(server.is_ready, f"{stage} again", 20)
    after = ask(server, "omni", "Hello", **OPTIONS)
    assert after.tokens == before.tokens and after.audio.tobytes() == before.audio.tobytes()
