"""A server's own copy of the model repositories: loading a stage again touches a file of it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from tritone.errors import TritoneError

_STEP = re.compile(r'model_name:\s*"([^"]+)"')


class Repositories:
    """Copies of ``sources`` under ``target``. They hold configurations only: what a stage serves is in the deployment."""

    def __init__(self, sources: Sequence[Path], target: Path) -> None:
        self.paths = tuple(target / str(number) for number in range(len(sources)))
        for source, path in zip(sources, self.paths, strict=True):
            shutil.copytree(source, path)

    def touch(self, model: str) -> None:
        """Makes Triton see a change of ``model``: without one, loading a loaded model does nothing."""
        for path in self.paths:
            for kept in path.glob(f"{model}/*/.keep"):
                kept.touch()

    def describe(self, model: str, parameters: Mapping[str, str]) -> None:
        """Adds parameters to the configuration of ``model``, where clients can read them."""
        lines = [
            f'parameters {{ key: {json.dumps(key)} value: {{ string_value: {json.dumps(value)} }} }}\n'
            for key, value in parameters.items()
        ]
        for path in self.paths:
            for config in path.glob(f"{model}/config.pbtxt"):
                with config.open("a") as file:
                    file.writelines(lines)

    def steps(self) -> dict[str, tuple[str, ...]]:
        """The models that each ensemble consists of."""
        found = {}
        for path in self.paths:
            for config in path.glob("*/config.pbtxt"):
                steps = tuple(_STEP.findall(config.read_text()))
                if steps:
                    found[config.parent.name] = steps
        return found


def check_repositories(sources: Sequence[Path]) -> None:
    for source in sources:
        if not source.is_dir():
            raise TritoneError(f"{source} is no directory: a Triton model repository is missing", "NOT_FOUND")
