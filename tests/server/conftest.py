"""One server for all tests of this folder: float32, so that its tokens can be compared with a reference exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import Scrape, wait_idle

from tritone.checkpoints import default_cache
from tritone.deployment import Deployment
from tritone.supervisor import Server, resolve_deployment

PROJECT = Path(__file__).resolve().parents[2]
MAX_CONTEXT = 2048
PAGE_SIZE = 32
CHUNK = 256


def make_deployment(**changes: object) -> Deployment:
    """The demo's deployment with a short context, small pools, one thread a stage and free ports."""
    engine = {"dtype": "float32", "threads": 1, "pool_tokens": 16384, "max_batch_tokens": CHUNK}
    written = Deployment.load(PROJECT / "deployments" / "demo-cpu.yaml").model_dump()
    changed = {
        "page_size": PAGE_SIZE,
        "max_context": MAX_CONTEXT,
        "prefill": engine,
        "decode": engine,
        "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0},
    }
    return resolve_deployment(Deployment.parse(written | changed | changes, "tests/server"), default_cache())


@pytest.fixture(scope="session")
def deployment() -> Deployment:
    return make_deployment()


@pytest.fixture(scope="session")
def server(deployment: Deployment) -> Iterator[Server]:
    with Server(deployment) as running:
        yield running


@pytest.fixture(scope="session")
def tokenizer(deployment: Deployment):  # noqa: ANN201 - transformers gives no useful type
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(deployment.checkpoint)


@pytest.fixture
def unharmed(server: Server) -> Iterator[None]:
    """Around a test: afterwards the server is ready, holds nothing, and has as many free blocks as before."""
    wait_idle(server)
    before = Scrape(server).gauges()
    yield
    assert server.is_ready()
    wait_idle(server)
    after = Scrape(server).gauges()
    assert {key: after[key] for key in before} == before
