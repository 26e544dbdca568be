"""`tritone evaluate`: what precisions cost, against the same checkpoint in float32, on real text and tasks."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from tritone.cache import default_cache
from tritone.checkpoints import DEMO_CHECKPOINT, resolve_checkpoint
from tritone.commands.terminal import ProgressLine, console
from tritone.errors import bad


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("evaluate", help="compare precisions on text and tasks", description=__doc__)
    checkpoint = f"a Hugging Face directory, a hub name, or {DEMO_CHECKPOINT}"
    parser.add_argument("checkpoint", nargs="?", default=DEMO_CHECKPOINT, help=f"{checkpoint} (%(default)s)")
    parser.add_argument("--reference", help="what it is compared to, in float32 (the checkpoint itself)")
    parser.add_argument(
        "--precisions",
        help="WEIGHTS[-gGROUP][-METHOD][+wide][+kv-fp8] or directories, with commas: int4-g64-awq, fp8, bf16+kv-fp8; "
        "default, quick and all stand for lists",
    )
    parser.add_argument("--tasks", default="text,gsm8k,choice,greedy,tools", help="(%(default)s)")
    parser.add_argument("--tokens", type=int, help="running text, in tokens")
    parser.add_argument("--limit", type=int, help="items of each other task, as far as there are so many")
    parser.add_argument("--text", type=Path, help="your own running text: a text file, or JSON lines with a text")
    parser.add_argument("--calibrate", type=Path, help="your own text for awq and gptq; not the text of the evaluation")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of text and of the intervals (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/evaluation"), help="directory to write (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="few precisions and little text: ends within a minute")
    parser.add_argument("--fresh", action="store_true", help="measure again what an earlier run has kept")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    # Before torch is loaded: idle compute threads must not spin for long where the cores are few.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # torch is slow to import; the other commands do without it.
    from quantization.files import write_json
    from tritone.evaluation.build import DEFAULT, QUICK, TASKS
    from tritone.evaluation.candidates import is_quantized
    from tritone.evaluation.evaluate import Settings, evaluate
    from tritone.evaluation.plot import check_matplotlib, draw
    from tritone.evaluation.precisions import parse_precisions
    from tritone.evaluation.report import to_json, to_markdown

    tasks = [task.strip() for task in arguments.tasks.split(",")]
    for task in tasks:
        if task not in TASKS:
            raise bad("tasks", task, ", ".join(TASKS))
    for name, least in (("tokens", 2), ("limit", 1), ("seed", 0)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise bad(name, value, f"an integer from {least}")
    precisions = parse_precisions(arguments.precisions or ("quick" if arguments.quick else "default"))
    check_matplotlib()
    sizes = (QUICK if arguments.quick else DEFAULT).changed(arguments.tokens, arguments.limit)
    with ProgressLine() as progress:
        checkpoint = resolve_checkpoint(arguments.checkpoint, default_cache(), progress)
        named = arguments.reference or arguments.checkpoint
        reference = resolve_checkpoint(named, default_cache(), progress)
        if arguments.reference is None and is_quantized(checkpoint):
            raise bad("reference", None, "the checkpoint that this quantised one was made of")
        evaluation = evaluate(
            Settings(
                checkpoint=checkpoint,
                reference=reference,
                precisions=precisions,
                tasks=list(dict.fromkeys(tasks)),
                sizes=sizes,
                work=arguments.out / "work",
                seed=arguments.seed,
                text=arguments.text,
                calibrate=arguments.calibrate,
                fresh=arguments.fresh,
            ),
            progress,
        )
    content = to_json(evaluation, _title(named), _title(arguments.checkpoint))
    markdown = to_markdown(content)
    write_json(arguments.out / "evaluation.json", content)
    (arguments.out / "evaluation.md").write_text(markdown, encoding="utf-8")
    drawn = draw(content, arguments.out / "evaluation.png")
    for bar in content["bars"]:
        verdict = "[green]met[/]    " if bar["met"] else "[red]not met[/]"
        unit = f" {bar['unit']}" if bar["unit"] else ""
        console.print(f"{verdict}  {bar['precision']}: {bar['name']} {bar['value']:.4g}{unit} (at most {bar['at_most']:g})")
    written = ["evaluation.json", "evaluation.md", *(["evaluation.png"] if drawn else [])]
    console.print(f"{arguments.out}: {', '.join(written)}", soft_wrap=True)
    return 0


def _title(name: str) -> str:
    """A directory's own name; where it lies is nobody else's concern."""
    return Path(name).name if Path(name).is_dir() else name
