"""Throw-away models in a real tritonserver, for tests of what the supervisor does about them."""

from __future__ import annotations

import textwrap
from pathlib import Path

from tritone.deployment import Deployment
from tritone.supervisor import Server

HEAD = """
import itertools, json, os, signal, time
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils

def response(**outputs):
    tensors = [pb_utils.Tensor(name, np.array([text.encode()], dtype=object)) for name, text in outputs.items()]
    return pb_utils.InferenceResponse(tensors)

class Streams:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "messages", "data_type": "TYPE_STRING", "dims": [1]})
        for name in ("event", "text", "info"):
            config.add_output({"name": name, "data_type": "TYPE_STRING", "dims": [1]})
        config.set_max_batch_size(0)
        config.set_model_transaction_policy({"decoupled": True})
        return config
"""
"""What ``code`` of ``write_model`` finds: a base class that takes ``messages`` and streams events, and how to make one."""


def write_model(folder: Path, name: str, code: str) -> None:
    (folder / "backends" / name).mkdir(parents=True)
    (folder / "backends" / name / "model.py").write_text(HEAD + textwrap.dedent(code))
    (folder / "repository" / name / "1").mkdir(parents=True)
    config = f'backend: "{name}"\ninstance_group [{{ kind: KIND_CPU }}]\n'
    (folder / "repository" / name / "config.pbtxt").write_text(config)


def make_server(folder: Path, model: str) -> Server:
    """Of one written model, not started yet."""
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "exit_timeout_seconds": 2}
    return Server(
        Deployment.parse({"name": "a-name", "server": ports}, "test"),
        models=[model],
        repositories=[folder / "repository"],
        backends=folder / "backends",
        cache=folder / "cache",
        logs=folder / "logs",
    )
