"""Writes what was trained as the voice that ships: `python -m training.voice.export DIRECTORY`."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.numpy import load_file

from training.voice.train import CHECKPOINT
from tritone.cache import default_cache
from tritone.checkpoints import DEMO_VOICE, resolve_voice
from tritone.models.codec.codec import Codec
from tritone.models.talker.config import TalkerConfig
from tritone.models.talker.files import save_talker
from tritone.models.talker.model import TalkerModel
from tritone.models.voice.prepare import MODEL_SHA256

NOTICES = Path(__file__).parent / "NOTICE"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="an empty directory, or one that does not exist")
    parser.add_argument("--cache", type=Path, default=default_cache() / "train-voice", help="where the training was")
    arguments = parser.parse_args()
    export(arguments.cache, resolve_voice(DEMO_VOICE, default_cache()), arguments.directory)


def export(cache: Path, hibari: Path, directory: Path) -> None:
    """The averaged weights of ``cache``'s checkpoint; ``hibari`` is the voice it learned from, whose licence goes along."""
    state = torch.load(cache / CHECKPOINT)
    model = TalkerModel(TalkerConfig())
    model.load_state_dict(state["averaged"])
    codec = Codec(**load_file(cache / "codec.safetensors"))
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(hibari / "LICENSE", directory / "LICENSE")
    notice = NOTICES.read_text(encoding="utf-8") + "\n" + (hibari / "NOTICE").read_text(encoding="utf-8")
    (directory / "NOTICE").write_text(notice, encoding="utf-8")
    origin = {
        "program": "training/voice",
        "steps": str(state["step"]),
        "teacher": "hibari-tts, voice heart",
        "teacher_sha256": MODEL_SHA256,
    }
    save_talker(directory, model, codec, origin)


if __name__ == "__main__":
    main()
