"""What the Thinker's hidden states do for the trained voice: the plain network, with and without them, on sentences that it
has not seen: `python -m training.voice.compare`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from training.voice.answers import clauses
from training.voice.contexts import Thinker
from training.voice.heard import listen
from training.voice.unseen import DIGITS, SENTENCES
from tritone.cache import default_cache
from tritone.checkpoints import DEMO_CHECKPOINT, DEMO_VOICE, resolve_checkpoint, resolve_voice
from tritone.models.codec.codec import Codec, Codes
from tritone.models.talker.config import HEART
from tritone.models.talker.context import TokenTrack
from tritone.models.talker.files import load_codec, load_network
from tritone.models.talker.generate import speak
from tritone.models.talker.model import TalkerModel
from tritone.models.talker.text import TextReader
from tritone.models.voice.frames import Float32Array
from tritone.models.voice.voicebox import VoiceBox


class Speaker:
    """Lets a network speak; with a ``thinker`` the network gets its hidden states."""

    def __init__(self, network: TalkerModel, codec: Codec, box: VoiceBox, thinker: Thinker | None) -> None:
        self._network, self._codec, self._box, self._thinker = network, codec, box, thinker
        self._reader = TextReader()

    def say(self, texts: Sequence[str]) -> Iterator[tuple[str, Float32Array]]:
        for text in texts:
            codes = self._speak(text)
            parts = [self._box.oneshot(self._codec.decode(part), 1, number) for number, part in enumerate(codes)]
            yield text, np.concatenate(parts)

    def _speak(self, text: str) -> list[Codes]:
        parts = [(clause, self._reader.read(clause)) for clause in clauses(text)]
        units = [unit for _, read in parts for unit in read]
        if self._thinker is None:
            return speak(self._network, units)
        pieces, hidden = self._thinker.read(text)
        states = torch.cat((hidden.float(), torch.zeros(1, hidden.shape[1])))  # the last row is that of -1
        track = TokenTrack()
        for piece in pieces:
            track.feed(piece, 1)
        tokens = [own for clause, read in parts for own in track.take(clause, read)]
        return speak(self._network, units, [states[torch.from_numpy(own)] for own in tokens])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=HEART, help="a voice that training.voice.export wrote")
    parser.add_argument("--every", type=int, default=1, help="take one text in so many")
    parser.add_argument("--no-contexts", action="store_true", help="leave out the Thinker's hidden states")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    box = VoiceBox(resolve_voice(DEMO_VOICE, default_cache()))
    network, codec = load_network(arguments.directory), load_codec(arguments.directory)
    thinkers = [None] if arguments.no_contexts else [None, Thinker(resolve_checkpoint(DEMO_CHECKPOINT, default_cache()))]
    for thinker in thinkers:
        speaker = Speaker(network, codec, box, thinker)
        for name, texts in (("sentences", SENTENCES), ("figures", DIGITS)):
            how = "with" if thinker else "without"
            heard = listen(speaker.say(texts[:: arguments.every]), time.process_time)
            print(f"{name}, {how} hidden states: {heard}", flush=True)


if __name__ == "__main__":
    main()
