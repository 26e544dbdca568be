"""Reads fields of a ``config.json`` and names the one that is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tritone.errors import bad


class Section:
    """One object of the file. ``defaults`` stand for what the file leaves out; what neither has is refused."""

    def __init__(self, values: Any, path: str = "", defaults: Mapping[str, Any] | None = None) -> None:
        self._path = path
        if not isinstance(values, Mapping):
            raise bad(f"config.json: {path or 'content'}", values, "a JSON object")
        self._values = {**(defaults or {}), **{name: value for name, value in values.items() if value is not None}}

    @classmethod
    def read(cls, directory: Path) -> Section:
        """The whole file of a checkpoint directory; InvalidArgument where there is none."""
        file = directory / "config.json"
        try:
            return cls(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise bad("config.json", str(file), f"a readable JSON file ({error})") from None

    def section(self, name: str, defaults: Mapping[str, Any] | None = None) -> Section:
        return Section(self._values.get(name), self._name(name), defaults)

    def has(self, name: str) -> bool:
        return name in self._values

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number above 0."""
        return self._checked(name, self._values.get(name, default))

    def numbers(self, name: str, default: tuple[int, ...] | None = None, least: int = 1) -> tuple[int, ...]:
        """A list of whole numbers, each at least ``least``."""
        value = self._values.get(name, default)
        if not isinstance(value, list | tuple):
            raise bad(f"config.json: {self._name(name)}", value, "a list of whole numbers")
        return tuple(self._checked(name, item, least) for item in value)

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self._values.get(name, default))

    def text(self, name: str, default: str = "") -> str:
        return str(self._values.get(name, default))

    @property
    def values(self) -> Mapping[str, Any]:
        return self._values

    def _checked(self, name: str, value: Any, least: int = 1) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise bad(f"config.json: {self._name(name)}", value, f"a whole number of at least {least}")
        return value

    def _name(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name
