from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tritone.cli import main


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
    LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2)).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


def test_writes_a_checkpoint_that_says_how_it_is_quantised(source: Path, tmp_path: Path) -> None:
    assert main(["quantize", str(source), str(tmp_path / "q"), "--weights", "int4", "--group", "32"]) == 0
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"], weights["symmetric"]) == (4, 32, True)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--weights", "int3"], "int3"), (["--weights", "int4", "--group", "48"], "48"),
     (["--weights", "int4", "--method", "awq"], "calibrate"), (["--weights", "fp8", "--kv", "fp8_e5m2"], "fp8_e5m2")],
)
def test_refusals_name_the_value(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert main(["quantize", str(source), str(tmp_path / "q"), *arguments]) == 1
    message = capsys.readouterr().err
    assert named in message and "allowed" in message and "Traceback" not in message
