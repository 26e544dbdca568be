"""The cascade without overlap: the Talker waits for the whole answer, the VoiceBox for all codes.

Nothing else differs from the shipped stages: text reaches the client as it is made, and so does the sound of each chunk.
Nothing heavy is imported before a stage starts.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tritone.supervisor.installation import PROJECT

if TYPE_CHECKING:
    import torch

    from tritone.engine.talker import SpeechPrompt
    from tritone.messages import Event
    from tritone.stages.code_talker import StreamingScript
    from tritone.stages.sounds import Sound


def shipped(stage: str) -> Any:
    """The ``TritonPythonModel`` of ``backends/<stage>/model.py``."""
    spec = importlib.util.spec_from_file_location(f"shipped_{stage}", PROJECT / "backends" / stage / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TritonPythonModel


class WaitingScript:
    """A script that has nothing to say before the answer's end."""

    def __init__(self, script: StreamingScript) -> None:
        self._script = script
        self._ended = False

    def feed(self, text: str, rows: torch.Tensor | None) -> None:
        self._script.feed(text, rows)

    def finish(self) -> None:
        self._script.finish()
        self._ended = True

    @property
    def silent(self) -> bool:
        return self._script.silent

    @property
    def over(self) -> bool:
        return self._script.over

    @property
    def paused(self) -> bool:
        return self._script.paused

    def resume(self) -> bool:
        return self._script.resume()

    def prompt(self) -> SpeechPrompt | None:
        return self._script.prompt() if self._ended else None

    def next(self, token: int, frame: torch.Tensor | None) -> torch.Tensor | None:
        return self._script.next(token, frame)


def make_talker_wait() -> None:
    """Talkers that are built from now on in this process open waiting scripts."""
    from tritone.stages import build_talker

    plain = build_talker.opener

    def opener(model: Any) -> Callable[..., StreamingScript]:
        opened = plain(model)
        return lambda *session: WaitingScript(opened(*session))

    build_talker.opener = opener


@dataclass
class WaitingSound:
    sound: Sound
    held: list[Event] = field(default_factory=list)


def make_voicebox_wait() -> None:
    """VoiceBoxes that are built from now on in this process wait for the codes' end."""
    from tritone.stages import voicebox

    class Waiting(voicebox.VoiceBoxStage):
        def open(self, session: int, options: Any) -> Any:
            return WaitingSound(super().open(session, options))

        def work(self, state: Any, event: Event) -> Iterator[Event]:
            if event.kind == "codes":
                state.held.append(event)
                if event.info["last"]:
                    for one in state.held:
                        yield from super().work(state.sound, one)

    voicebox.VoiceBoxStage = Waiting  # type: ignore[misc]
