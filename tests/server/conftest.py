"""One server for all tests of this folder: float32, so that its tokens equal a reference exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.helpers import nothing_left_behind
from tests.server.serving import make_deployment
from tritone.deployment import Deployment
from tritone.supervisor import Server


@pytest.fixture(scope="session")
def deployment() -> Deployment:
    return make_deployment()


@pytest.fixture(scope="session")
def server(deployment: Deployment) -> Iterator[Server]:
    with Server(deployment) as running:
        yield running


@pytest.fixture(scope="session")
def tokenizer(deployment: Deployment) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(deployment.checkpoint)


@pytest.fixture
def unharmed(server: Server) -> Iterator[None]:
    """Around a test: afterwards the server is ready, holds nothing, and has as many free blocks as before."""
    with nothing_left_behind(server):
        yield
