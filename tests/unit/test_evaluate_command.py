"""The whole command on a tiny checkpoint: what it writes, what it keeps, what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.unit import test_quantization_models as tiny
from tests.unit.helpers import CORPUS
from tritone.cli import main
from tritone.evaluation.corpora import gsm8k, own_text, reference_text, write_calibration
from tritone.evaluation.grid import grid_of

PRECISIONS = "float32,bf16+kv-fp8,int8,int8+wide,int4-g32-gptq,nvfp4"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("tiny") / "tiny", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "own.txt"
    path.write_text("\n---\n".join(CORPUS), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def out(checkpoint: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out")
    arguments = ["--precisions", PRECISIONS, "--limit", "2", "--tokens", "120", "--text", str(text)]
    calibration = tiny.write_text(out / "calibration.jsonl")
    assert main(["evaluate", str(checkpoint), *arguments, "--calibrate", str(calibration), "--out", str(out)]) == 0
    return out


def content(out: Path) -> Any:
    return json.loads((out / "evaluation.json").read_text())


def rows(out: Path) -> dict[str, Any]:
    return {row["precision"]: row["figures"] for row in content(out)["rows"]}


def test_rows_and_tasks(out: Path) -> None:
    found = rows(out)
    assert list(found) == ["reference", *PRECISIONS.split(",")]
    assert all(set(figures) == {"text", "gsm8k", "choice", "greedy", "tools"} for figures in found.values())
    assert content(out)["reference"]["grid_group"] is None
    for row in found.values():
        for task in row.values():
            assert all(figure["low"] <= figure["value"] <= figure["high"] for figure in task.values())


def test_the_reference_is_the_model_in_float32(out: Path, checkpoint: Path, text: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    total, count = 0.0, 0
    for problem in gsm8k()[:2]:
        prompt, answer = (tokenizer(part)["input_ids"] for part in (problem.prompt, problem.answer))
        with torch.no_grad():
            likely = model(torch.tensor([prompt + answer])).logits[0].double().log_softmax(-1)
        total += float(likely[len(prompt) - 1 : -1].gather(1, torch.tensor(answer)[:, None]).sum())
        count += len(answer)
    assert content(out)["tasks"]["gsm8k"]["scored_tokens"] == count
    assert rows(out)["reference"]["gsm8k"]["log_likelihood"]["value"] == pytest.approx(total / count, rel=1e-5)


def test_float32_is_the_reference_and_others_are_as_coarse_as_their_numbers(out: Path) -> None:
    found = {name: figures["text"]["kl"]["value"] for name, figures in rows(out).items()}
    assert found["float32"] == found["reference"] == 0
    assert 0 < found["int8+wide"] < found["int8"] < found["int4-g32-gptq"] and found["int4-g32-gptq"] > 10 * found["int8"]
    assert found["nvfp4"] > found["int8"] and found["bf16+kv-fp8"] > 0
    same = rows(out)["float32"]
    assert (same["greedy"]["same_answer"]["value"], same["choice"]["same_choice"]["value"]) == (1, 1)


def test_what_is_written(out: Path) -> None:
    markdown = (out / "evaluation.md").read_text()
    for part in ("in float32", "bf16+kv-fp8", "at most", "GSM8K", "95 %", "own.txt"):
        assert part in markdown
    assert str(out) not in markdown + (out / "evaluation.json").read_text()
    assert (out / "evaluation.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    bars = {(bar["precision"], bar["unit"]): bar["met"] for bar in content(out)["bars"]}
    assert set(bars) == {("bf16+kv-fp8", "nats"), ("bf16+kv-fp8", "%")}


def test_a_second_run_measures_only_what_is_new(
    out: Path, checkpoint: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = tmp_path / "again"
    shutil.copytree(out, again)
    loaded: list[Any] = []
    from tritone.evaluation import candidates, evaluate

    for module in (candidates, evaluate):
        load = module.load_decoder

        def noted(*arguments: Any, load: Any = load, **options: Any) -> Any:
            loaded.append(options["weights"])
            return load(*arguments, **options)

        monkeypatch.setattr(module, "load_decoder", noted)
    common = ["evaluate", str(checkpoint), "--limit", "2", "--tokens", "120", "--text", str(text), "--out", str(again)]
    assert main([*common, "--precisions", "bf16+kv-fp8,int8,bf16"]) == 0
    assert loaded == ["bf16"]
    assert rows(again)["int8"] == rows(out)["int8"]
    assert main([*common, "--precisions", "int8", "--limit", "1", "--tasks", "choice"]) == 0
    assert loaded == ["bf16", "float32", "int8"]


def test_a_quantised_checkpoint_against_its_origin(checkpoint: Path, text: Path, out: Path, tmp_path: Path) -> None:
    assert main(["quantize", str(checkpoint), str(tmp_path / "q"), "--weights", "int8"]) == 0
    common = ["--tasks", "text", "--tokens", "120", "--text", str(text)]
    one = ["evaluate", str(tmp_path / "q"), "--reference", str(checkpoint), "--precisions", "stored"]
    assert main([*one, *common, "--out", str(tmp_path / "a")]) == 0
    assert main(["evaluate", str(checkpoint), "--precisions", str(tmp_path / "q"), *common, "--out", str(tmp_path / "b")]) == 0
    a, b = rows(tmp_path / "a"), rows(tmp_path / "b")
    assert a["stored"]["text"] == b["q"]["text"]
    # The scales in the file are bfloat16, those of rounding while loading float32.
    assert a["stored"]["text"]["kl"]["value"] == pytest.approx(rows(out)["int8"]["text"]["kl"]["value"], rel=0.3)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--precisions", "int3"], "int3"),
        (["--precisions", "fp8-awq"], "fp8-awq"),
        (["--precisions", "fp8-g64"], "fp8-g64"),
        (["--precisions", "bf16+wide"], "bf16+wide"),
        (["--precisions", "bf16+kv-fp8_e5m2"], "kv-fp8_e5m2"),
        (["--precisions", "int8,,fp8"], "int8,,fp8"),
        (["--precisions", "no/such/directory"], "no/such/directory"),
        (["--precisions", str(Path(__file__).parent)], "config.json"),
        (["--tasks", "text,mmlu"], "mmlu"),
        (["--tokens", "1"], "tokens: 1"),
        (["--limit", "0"], "limit: 0"),
        (["--text", "no-such-file"], "no-such-file"),
    ],
)
def test_refusals_name_the_value(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert main(["evaluate", str(checkpoint), "--out", str(tmp_path), "--quick", *arguments]) == 1
    message = capsys.readouterr().err
    assert named in message and "allowed" in message and "Traceback" not in message


def test_a_quantised_checkpoint_needs_a_reference(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", str(checkpoint), str(tmp_path / "q"), "--weights", "fp8"]) == 0
    for more in ([], ["--reference", str(tmp_path / "q")]):
        assert main(["evaluate", str(tmp_path / "q"), "--precisions", "stored", *more, "--out", str(tmp_path / "o")]) == 1
        assert "reference" in capsys.readouterr().err


def test_int4_on_the_grid_of_the_reference_is_no_result(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights on 16 levels in groups of 32, as a dequantised Q4_1 model has them."""
    path = tmp_path / "grid"
    shutil.copytree(checkpoint, path)
    weights = load_file(path / "model.safetensors")
    draw = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            groups = weight.numel() // 32
            codes = torch.randint(0, 16, (groups, 32), generator=draw)
            codes[:, 0], codes[:, 1] = 0, 15
            scale, low = torch.rand(groups, 1, generator=draw) + 0.5, torch.randn(groups, 1, generator=draw)
            weights[name] = (codes * scale - 8 * scale + low).to(torch.bfloat16).reshape(weight.shape)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    assert (grid_of(path), grid_of(checkpoint)) == (32, None)
    assert main(["quantize", str(path), str(tmp_path / "q"), "--weights", "int4", "--group", "32"]) == 0
    for precision in ("int4-g32", "int4-g16-gptq", str(tmp_path / "q")):
        assert main(["evaluate", str(path), "--precisions", precision, "--out", str(tmp_path / "o")]) == 1
        message = capsys.readouterr().err
        assert "grid of groups of 32" in message and precision in message
    assert not (tmp_path / "o").exists()


def test_calibration_shares_no_text_with_the_evaluation(tmp_path: Path) -> None:
    evaluated = "\n\n".join(reference_text().documents)
    paragraphs = [part for document in reference_text(calibration=True).documents for part in document.split("\n\n")]
    assert len(paragraphs) > 300
    assert not {" ".join(p.split()) for p in paragraphs} & {" ".join(p.split()) for p in evaluated.split("\n\n")}
    questions = {problem.question for problem in gsm8k()}
    assert len(questions) > 900 and not questions & {problem.question for problem in gsm8k(calibration=True)}
    calibration = write_calibration(tmp_path / "calibration.jsonl").read_text()
    assert not any(json.dumps(question)[1:-1] in calibration for question in sorted(questions)[:50])


def test_a_problem_is_as_its_authors_wrote_it_without_calculator_marks() -> None:
    first = gsm8k()[0]
    assert first.question.startswith("Janet’s ducks lay 16 eggs per day.")
    assert first.answer == (
        " Janet sells 16 - 3 - 4 = 9 duck eggs a day.\nShe makes 9 * 2 = $18 every day at the farmer’s market.\n#### 18"
    )


def test_own_text_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "two"}\n', encoding="utf-8")
    assert own_text(path).documents == ("one", "two")
