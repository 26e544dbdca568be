"""`tritone quantize`: writes a quantised copy of a checkpoint in the compressed-tensors format, which other engines load."""

from __future__ import annotations

import argparse
from pathlib import Path

from tritone.cache import default_cache
from tritone.checkpoints import resolve_checkpoint
from tritone.commands.terminal import ProgressLine, console
from tritone.errors import InvalidArgument


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("quantize", help="write a quantised checkpoint", description=__doc__)
    parser.add_argument("source", help="a Hugging Face directory, a hub name, or demo:smollm2-135m-instruct")
    parser.add_argument("destination", type=Path, help="directory to write; an interrupted run is taken up again")
    parser.add_argument("--weights", required=True, help="int4, int8, fp8 or nvfp4")
    parser.add_argument("--group", type=int, default=64, help="INT4 weights with one scale; -1 is a whole row (%(default)s)")
    parser.add_argument("--asymmetric", action="store_true", help="INT4 with zero points")
    parser.add_argument("--method", default="rtn", help="rtn, awq or gptq (%(default)s)")
    parser.add_argument("--kv", help="fp8: also measure scales for an FP8 KV cache")
    parser.add_argument("--calibrate", type=Path, help="text, or JSON lines with text or messages; for awq, gptq and --kv")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    # torch is slow to import; the other commands do without it.
    from quantization.errors import QuantizationError
    from quantization.quantize import Settings, quantize_checkpoint

    with ProgressLine() as progress:
        source = resolve_checkpoint(arguments.source, default_cache(), progress)
        try:
            settings = Settings(
                weights=arguments.weights,
                group=arguments.group,
                symmetric=not arguments.asymmetric,
                method=arguments.method,
                kv=arguments.kv,
            )
            written = quantize_checkpoint(
                source,
                arguments.destination,
                settings,
                arguments.calibrate,
                lambda done, total, unit: progress("quantising layers", done, total),
            )
        except QuantizationError as error:
            raise InvalidArgument(str(error)) from None
    size = sum(path.stat().st_size for path in written.glob("*.safetensors"))
    console.print(f"{written}  {size / 2**20:.0f} MiB", soft_wrap=True)
    return 0
