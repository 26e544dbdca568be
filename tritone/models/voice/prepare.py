"""Writes a voice directory from the installed hibari-tts package. Needs the packages onnx and safetensors,
not torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from tritone.models.voice.config import CONFIG_FILE, DECODER_FILE, FRONT_FILE, VoiceConfig, VoiceSource

PACKAGE = "hibari-tts"
MODEL_SHA256 = "5f70741d4e900f4e85d0037498736cc1b3e1b9a63a13546a5da1e63abf4fccd8"
VOICE = "heart"
CHANGES = (
    "hibari.onnx was cut at the decoder's input: front.onnx is its first half, unchanged; "
    "decoder.safetensors holds the decoder's weights, the int8 ones dequantised to float32."
)


class VoicePackageError(RuntimeError):
    """The hibari-tts package is missing or is not the one this program knows."""


def prepare_voice(destination: Path, progress: Callable[[str], None] | None = None) -> Path:
    """Writes front.onnx, decoder.safetensors, voice.json, LICENSE and NOTICE into `destination` and returns
    it.

    Does nothing when `destination` already holds this voice, intact. The files are made in a neighbouring
    temporary directory that is renamed at the end, so a reader sees a whole voice or none; two callers at
    once are harmless. progress is called with a short line before each step.
    Raises VoicePackageError when hibari-tts is missing or another release, FileExistsError when `destination`
    holds something that is not a voice.
    """
    destination = Path(destination)
    report = progress or (lambda line: None)
    if is_prepared(destination):
        report(f"the voice in {destination} is complete")
        return destination
    if destination.exists() and not _may_replace(destination):
        raise FileExistsError(f"{destination} exists and holds no voice; name another directory or remove it")
    model_path = _find_model()
    destination.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        work.chmod(0o755)
        _write_voice(model_path, work, report)
        _put_in_place(work, destination)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    report(f"the voice is ready in {destination}")
    return destination


def is_prepared(directory: Path) -> bool:
    """True when the directory holds this program's voice with every file as it was written."""
    try:
        config = VoiceConfig.load(directory)
    except (OSError, ValueError):
        return False
    return config.source.sha256 == MODEL_SHA256 and all(
        (directory / name).is_file() and _sha256(directory / name) == digest for name, digest in config.files.items()
    )


def _find_model() -> Path:
    spec = importlib.util.find_spec("hibari")  # does not run the package
    if spec is None or not spec.submodule_search_locations:
        raise VoicePackageError(f"the package {PACKAGE} is not installed; install {PACKAGE}==0.2.1")
    path = Path(spec.submodule_search_locations[0]) / "assets" / "hibari.onnx"
    if not path.is_file():
        raise VoicePackageError(f"{path} is missing; install {PACKAGE}==0.2.1 again")
    digest = _sha256(path)
    if digest != MODEL_SHA256:
        raise VoicePackageError(f"{path} has sha256 {digest}, this program knows {MODEL_SHA256}; install {PACKAGE}==0.2.1")
    return path


def _write_voice(model_path: Path, work: Path, report: Callable[[str], None]) -> None:
    import onnx  # needed here alone, so that a served voice needs no onnx
    from safetensors.numpy import save_file

    from tritone.models.voice.surgery import HibariGraph

    report(f"reading {model_path}")
    graph = HibariGraph(onnx.load(str(model_path)))
    report(f"writing {FRONT_FILE}")
    onnx.save(graph.front(), str(work / FRONT_FILE))
    report(f"writing {DECODER_FILE}")
    save_file(graph.decoder(), str(work / DECODER_FILE))
    report("writing licences")
    for name in ("LICENSE", "NOTICE"):
        shutil.copyfile(_licence_file(name), work / name)
    kernel_reach = 3  # every convolution of the decoder has 7 taps
    VoiceConfig(
        name="hibari heart",
        voices=(VOICE,),
        default_voice=VOICE,
        sample_rate=24000,
        hop=300,
        n_fft=1200,
        frame_rate=80,
        feature_width=graph.feature_width(),
        max_phonemes=400,
        receptive_field=kernel_reach * (1 + graph.decoder_blocks()),
        layer_norm_epsilon=graph.layer_norm_epsilon(),
        source=VoiceSource(PACKAGE, importlib.metadata.version(PACKAGE), model_path.name, MODEL_SHA256, CHANGES),
        files={path.name: _sha256(path) for path in sorted(work.iterdir())},
    ).save(work)
    for path in work.iterdir():
        path.chmod(0o644)  # safetensors writes 0600, which a server under another user could not read


def _licence_file(name: str) -> Path:
    for file in importlib.metadata.files(PACKAGE) or []:
        if file.name == name and file.parent.name == "licenses":
            return Path(str(file.locate()))
    raise VoicePackageError(f"the installed {PACKAGE} has no {name} file, which must go with its weights; install it again")


def _may_replace(directory: Path) -> bool:
    return directory.is_dir() and ((directory / CONFIG_FILE).is_file() or not any(directory.iterdir()))


def _put_in_place(work: Path, destination: Path) -> None:
    try:
        work.rename(destination)  # also replaces an empty directory
        return
    except OSError:
        if is_prepared(destination):  # another caller was faster
            return
        if not _may_replace(destination):
            raise
    old = Path(tempfile.mkdtemp(prefix=f".{destination.name}.old.", dir=destination.parent))
    try:
        destination.rename(old / "voice")
        work.rename(destination)
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
