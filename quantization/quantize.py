"""From a floating-point checkpoint to a quantised one in the compressed-tensors format, layer by layer."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from quantization.calibration import LayerwiseModel, calibration_rows, check_model_type
from quantization.checkpoints import detect, quantization_config, read_linear, store_linear
from quantization.e4m3 import scales_from_amax
from quantization.errors import bad, one_of
from quantization.files import INDEX, TensorFiles, Unit, units, write_json, write_shard
from quantization.formats import NVFP4_BLOCK, Quantized
from quantization.methods import awq, gptq, rtn
from quantization.methods.settings import MethodSettings
from quantization.rounding import group_width

METHODS = {"int4": ("rtn", "awq", "gptq"), "int8": ("rtn", "gptq"), "fp8": ("rtn", "gptq"), "nvfp4": ("rtn", "gptq")}
KV_SHARING = ("tensor", "attn_head")
JOURNAL = "quantize.json"
Progress = Callable[[int, int, str], None]
_LINEAR = re.compile(r"((?:thinker\.)?model\.layers\.\d+\..*_proj)\.weight")
"""Of the decoder that answers; an omni checkpoint's towers, Talker and vocoder have such names too, and stay as they are."""
_WEIGHT_FILES = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".partial", INDEX)


@dataclass(frozen=True)
class Settings:
    """``weights``: fp8, int8, int4 or nvfp4. For int4: ``group``, ``symmetric``, ``method``; for fp8: ``block`` or per channel.

    ``kv``: None, or "fp8" for static scales of keys and values that share a scale as ``kv_sharing`` says. Calibration uses
    at most ``samples`` rows of ``length`` tokens.
    """

    weights: str
    group: int = 64
    symmetric: bool = True
    method: str = "rtn"
    block: tuple[int, int] | None = None
    kv: str | None = None
    kv_sharing: str = "attn_head"
    samples: int = 64
    length: int = 512

    def __post_init__(self) -> None:
        one_of("weights", self.weights, tuple(METHODS))
        one_of(f"method for {self.weights}", self.method, METHODS[self.weights])
        one_of("kv", self.kv, (None, "fp8"))
        one_of("kv_sharing", self.kv_sharing, KV_SHARING)
        if self.block is not None and (self.weights != "fp8" or self.method != "rtn"):
            raise bad("block", self.block, "none, but with fp8 weights and method rtn")
        if not self.symmetric and self.weights != "int4":
            raise bad(f"symmetric for {self.weights}", False, "True; only int4 has zero points")
        if self.samples <= 0 or self.length <= 1:
            raise bad("samples and length", (self.samples, self.length), "numbers above 0 and 1")

    @property
    def needs_text(self) -> bool:
        return self.method != "rtn" or self.kv is not None


def quantize_checkpoint(
    source: str | Path,
    destination: str | Path,
    settings: Settings,
    calibrate: str | Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Writes ``destination``: a compressed-tensors checkpoint, one safetensors file a layer, with all other files of
    ``source`` but weights. Gives ``destination``.

    Quantised are the ``*_proj`` matrices in the layers of the decoder that answers; the rest keeps its dtype.
    ``calibrate``: text or JSON lines (``calibration_rows``), needed by awq, gptq and ``kv``, which run Llama, Qwen2 and
    Qwen3 decoders only.
    ``progress`` gets (units done, units in all, name of the unit just done).
    In memory are one layer (in float32 while calibrating, with its inputs' Gram matrices) and the hidden states of the
    calibration text. A run that was ended may be started again with the same arguments: finished files are kept, and with
    the same number of threads the result is the same to the byte. ``config.json`` is written last.
    Raises ``QuantizationError`` naming the setting, layer or file, its value and what is allowed.
    """
    source, destination = Path(source), Path(destination)
    config = _config(source)
    if settings.needs_text and calibrate is None:
        raise bad("calibrate", None, f"a text file, for method {settings.method} and kv {settings.kv}")
    if settings.needs_text:
        check_model_type(config.get("model_type"))
    text = Path(calibrate) if calibrate is not None and settings.needs_text else None
    with TensorFiles.of(source) as files:
        linears = [name for name in files.shapes if _LINEAR.fullmatch(name) and len(files.shapes[name]) == 2]
        if not linears:
            raise bad("checkpoint", str(source), "one with matrices named model.layers.N..._proj.weight")
        _check_widths(linears, files, settings)
        plan = units(files)
        _start(destination, _journal(files, settings, text))
        if (destination / "config.json").exists():
            return destination
        scheme = quantization_config(
            settings.weights,
            settings.group,
            settings.symmetric,
            _ignored(files, linears),
            settings.kv_sharing if settings.kv else None,
            settings.block,
        )
        work = _Work(source, destination, files, settings, text, config | {"quantization_config": scheme}, progress)
        work.run(plan)
        _finish(source, destination, plan, config | {"quantization_config": scheme})
    return destination


class _Work:
    def __init__(
        self,
        source: Path,
        destination: Path,
        files: TensorFiles,
        settings: Settings,
        text: Path | None,
        config: Mapping[str, Any],
        progress: Progress | None,
    ) -> None:
        self._destination, self._files, self._settings, self._progress = destination, files, settings, progress
        self._scheme = detect(config)
        self._model: LayerwiseModel | None = None
        if text is not None:
            ids = calibration_rows(text, source, settings.samples, settings.length)
            self._model = LayerwiseModel(source, ids, files.read("model.embed_tokens.weight"))

    def run(self, plan: list[Unit]) -> None:
        last_layer = max((index for index, unit in enumerate(plan) if _layer_index(unit) is not None), default=-1)
        for index, unit in enumerate(plan):
            path = _shard(self._destination, index, len(plan))
            layer = _layer_index(unit) if self._model is not None else None
            if not path.exists():
                tensors = {name: self._files.read(name) for name in unit.tensors}
                write_shard(path, self._quantized(unit, layer, tensors))
            # Ranges of keys and values go to the layer's file, which is thus read and written once more.
            if layer is not None and (index < last_layer or self._settings.kv):
                self._advance(unit, layer, path)
            if self._progress is not None:
                self._progress(index + 1, len(plan), unit.name)

    def _quantized(self, unit: Unit, layer: int | None, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {match[1]: tensors[name] for name in unit.tensors if (match := _LINEAR.fullmatch(name))}
        done: Mapping[str, Quantized]
        if self._settings.method == "rtn" or not found or layer is None or self._model is None:
            done = rtn.quantize_linears(
                self._settings.weights, found, self._settings.group, self._settings.symmetric, self._settings.block
            )
        else:
            inside = {name.removeprefix(unit.name + "."): tensor for name, tensor in tensors.items()}
            form = MethodSettings(
                self._settings.weights,
                self._settings.group,
                self._settings.symmetric,
                next(iter(found.values())).dtype,
                self._model.head_dim,
            )
            method = awq if self._settings.method == "awq" else gptq
            result = method.quantize_layer(inside, self._model.statistics(layer, inside), form)
            done = {f"{unit.name}.{name}": weight for name, weight in result.linears.items()}
            tensors |= {f"{unit.name}.{name}": tensor for name, tensor in result.changed.items()}
        kept = {name: tensor for name, tensor in tensors.items() if name.removesuffix(".weight") not in done}
        for name, weight in done.items():
            kept |= store_linear(name, weight, found[name].dtype)
        return kept

    def _advance(self, unit: Unit, layer: int, path: Path) -> None:
        """Through the layer as it was stored, whether it was in this run or an earlier one."""
        assert self._model is not None
        from safetensors.torch import load_file

        stored = load_file(path)
        shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
        inside = {}
        for name in unit.tensors:
            if match := _LINEAR.fullmatch(name):
                weight = read_linear(match[1], stored.__getitem__, shapes, self._scheme)
                inside[name.removeprefix(unit.name + ".")] = weight if isinstance(weight, Tensor) else weight.dequantize()
            else:
                inside[name.removeprefix(unit.name + ".")] = stored[name]
        amax = self._model.advance(layer, inside)
        dtype = stored[f"{unit.name}.input_layernorm.weight"].dtype
        if self._settings.kv and f"{unit.name}.self_attn.k_scale" not in stored:
            for letter, largest in zip("kv", amax, strict=True):
                scales = scales_from_amax(largest, f"{unit.name} {letter} range").to(dtype)
                one = self._settings.kv_sharing == "tensor"
                stored[f"{unit.name}.self_attn.{letter}_scale"] = scales.amax()[None] if one else scales[:, None, None]
            write_shard(path, stored)


def _config(source: Path) -> dict[str, Any]:
    file = source / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise bad("config.json", str(file), f"a readable JSON file ({error})") from error
    if not isinstance(config, dict):
        raise bad("config.json", config, "a JSON object")
    if config.get("quantization_config"):
        raise bad("quantization_config", config["quantization_config"], "none: only floating-point weights are quantised")
    return config


def _check_widths(linears: list[str], files: TensorFiles, settings: Settings) -> None:
    for name in linears:
        if files.kinds[name] not in ("F32", "F16", "BF16"):
            raise bad(f"tensor {name}", files.kinds[name], "F32, F16, BF16")
        columns = files.shapes[name][1]
        if settings.weights == "int4":
            group_width(columns, settings.group, name.removesuffix(".weight"))
        if settings.block is not None and columns % settings.block[1]:
            raise bad(f"block of {name.removesuffix('.weight')}", settings.block, f"one that divides its width {columns}")
        if settings.weights == "nvfp4" and columns % NVFP4_BLOCK:
            raise bad(f"width of {name.removesuffix('.weight')}", columns, f"a multiple of {NVFP4_BLOCK}")


def _ignored(files: TensorFiles, linears: list[str]) -> list[str]:
    """Modules with a matrix that stays as it is; the head is one even where it is tied and has no tensor."""
    others = {name.removesuffix(".weight") for name, shape in files.shapes.items() if len(shape) == 2} - {
        name.removesuffix(".weight") for name in linears
    }
    return sorted({name for name in others if "embed" not in name} | {"lm_head"})


def _journal(files: TensorFiles, settings: Settings, text: Path | None) -> dict[str, Any]:
    sources = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files.paths}
    digest = None if text is None or not text.is_file() else hashlib.sha256(text.read_bytes()).hexdigest()
    journal = {"settings": asdict(settings), "source": sources, "calibration_sha256": digest}
    copied: dict[str, Any] = json.loads(json.dumps(journal))
    return copied


def _start(destination: Path, journal: dict[str, Any]) -> None:
    """A new folder, or one that an earlier run with the same arguments has begun."""
    file = destination / JOURNAL
    if not file.exists():
        if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
            raise bad("destination", str(destination), "a folder that is new, empty or from an earlier run")
        destination.mkdir(parents=True, exist_ok=True)
        write_json(file, journal)
    found = json.loads(file.read_text(encoding="utf-8"))
    if found != journal:
        changed = [key for key in journal if found.get(key) != journal[key]]
        raise bad(f"destination {destination}", f"begun with other {', '.join(changed)}", "the same arguments or a new folder")


def _finish(source: Path, destination: Path, plan: list[Unit], config: dict[str, Any]) -> None:
    where: dict[str, str] = {}
    size = 0
    for index in range(len(plan)):
        path = _shard(destination, index, len(plan))
        with TensorFiles([path]) as shard:
            where |= dict.fromkeys(sorted(shard.shapes), path.name)
            size += sum(shard.nbytes(name) for name in shard.shapes)
    write_json(destination / INDEX, {"metadata": {"total_size": size}, "weight_map": where})
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name != "config.json" and not path.name.endswith(_WEIGHT_FILES):
            shutil.copyfile(path, destination / path.name)
    write_json(destination / "config.json", config)


def _shard(destination: Path, index: int, count: int) -> Path:
    return destination / f"model-{index + 1:05}-of-{count:05}.safetensors"


def _layer_index(unit: Unit) -> int | None:
    match = re.fullmatch(r"model\.layers\.(\d+)", unit.name)
    return int(match[1]) if match else None
