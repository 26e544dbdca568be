"""The timing of pairings of precisions, and the choice between them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from perf.precision.gguf_copy import write_q4_0
from perf.precision.random_checkpoint import Shape, make, parameters
from tritone.checkpoints.progress import silent
from tritone.cli import main
from tritone.commands import measuring
from tritone.deployment import Deployment
from tritone.errors import InvalidArgument, TritoneError
from tritone.evaluation.bootstrap import Figure
from tritone.evaluation.runner import Runner
from tritone.measure.accuracy import PairRunner
from tritone.measure.choice import Judge, choose
from tritone.measure.measure import Measured, chosen_deployment, measure
from tritone.measure.pairings import Load, Pairing, Timed, time_pairings
from tritone.measure.timing import prompt_of, request_time, step_seconds, tokens_needed
from tritone.measure.workbench import Workbench

SHAPE = Shape("tiny", hidden=64, inner=128, layers=5, heads=2, kv_heads=1, vocabulary=256)
PAGE = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(SHAPE, tmp_path_factory.mktemp("measure"), silent)


@pytest.fixture(scope="module")
def bench(checkpoint: Path) -> Iterator[Workbench]:
    with Workbench(checkpoint, torch.bfloat16, PAGE) as bench:
        for weights in ("bf16", "int4"):
            bench.load(weights, 256, 32, lambda done, total: None)
        yield bench


def timed(prefill: str, decode: str, kv: str, seconds: float) -> Timed:
    return Timed(Pairing(prefill, decode, kv), seconds, seconds / 2, 0.0, seconds / 2)


def judged(percents: dict[str, float], asked: list[Pairing], by: str = "decode") -> Judge:
    def judge(pairing: Pairing) -> Figure:
        asked.append(pairing)
        value = percents[getattr(pairing, by)]
        return Figure(value, value, value)

    return judge


def test_the_fastest_that_is_accurate_enough_is_chosen_and_no_slower_one_is_looked_at() -> None:
    rows = [
        timed("int4", "int4", "bf16", 1.0),
        timed("int8", "int8", "bf16", 2.0),
        timed("bf16", "int8", "bf16", 2.5),
        timed("bf16", "bf16", "bf16", 3.0),
    ]
    asked: list[Pairing] = []
    choice = choose(rows, 1.0, judged({"int4": 5.0, "int8": 1.0, "bf16": 0.0}, asked))
    assert choice.chosen == rows[1]
    assert asked == [rows[0].pairing, rows[1].pairing]
    assert choice.increases[rows[0].pairing].value == 5.0


def test_fp8_keys_and_values_are_taken_where_they_cost_no_more_than_2_percent_of_time() -> None:
    plain = timed("bf16", "int8", "bf16", 1.0)
    for seconds, expected in ((1.02, "fp8"), (1.021, "bf16")):
        choice = choose([plain, timed("bf16", "int8", "fp8", seconds)], 1.0, judged({"int8": 0.5}, []))
        assert choice.chosen.pairing.kv == expected
    # Not where they are not accurate enough.
    rows = [plain, timed("bf16", "int8", "fp8", 1.0)]
    assert choose(rows, 1.0, judged({"bf16": 0.5, "fp8": 1.5}, [], by="kv")).chosen == plain


def test_nothing_accurate_enough_names_the_closest() -> None:
    rows = [timed("int4", "int4", "bf16", 1.0), timed("bf16", "int8", "bf16", 2.0)]
    with pytest.raises(TritoneError, match=r"within 0.5 %; the closest is prefill bf16, decode int8, kv bf16 with 0.75 %"):
        choose(rows, 0.5, judged({"int4": 5.0, "int8": 0.75}, []))


def test_all_pairings_are_timed_fastest_first_and_their_phases_add_up(bench: Workbench) -> None:
    calls: list[tuple[int, int]] = []
    rows = time_pairings(
        bench, bench.decoders, bench.decoders, "bf16", ("bf16", "fp8"), Load(20, 5, 2), (1, 1), 2, lambda *d: calls.append(d)
    )
    assert len({row.pairing for row in rows}) == 2 * 2 * 2
    assert [row.seconds for row in rows] == sorted(row.seconds for row in rows)
    for row in rows:
        assert row.seconds == pytest.approx(row.prefill + row.hand_over + row.decode)
        assert min(row.prefill, row.hand_over, row.decode) > 0
    assert calls[-1] == (3, 3)
    # A phase does not depend on the others' precisions, so both rows hold the same measurement of it.
    by = {row.pairing: row for row in rows}
    assert by[Pairing("bf16", "bf16", "fp8")].prefill == by[Pairing("bf16", "int4", "bf16")].prefill


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_a_timed_request_is_served_whole(kv: str, bench: Workbench) -> None:
    source, target = bench.pages("bf16", 64), bench.pages(kv, 64)
    prefill, decode = bench.engine(bench.decoders["bf16"], source), bench.engine(bench.decoders["int4"], target)
    taken = request_time(prefill, source, decode, target, prompt_of(20, 256), 6)
    assert taken.total == taken.prefill + taken.hand_over + taken.decode and min(vars(taken).values()) > 0
    assert source.pool.available == source.pool.total and target.pool.available == target.pool.total


def test_hand_over_copies_the_prompt(bench: Workbench) -> None:
    """Decode goes on from what prefill computed, not from what its own pages held."""
    source, target = bench.pages("bf16", 64), bench.pages("bf16", 64)
    prefill, decode = (bench.engine(bench.decoders["bf16"], pages) for pages in (source, target))
    request_time(prefill, source, decode, target, prompt_of(20, 256), 2)
    assert isinstance(source.kv, torch.Tensor) and isinstance(target.kv, torch.Tensor)
    assert torch.equal(source.kv[0], target.kv[0])
    assert torch.equal(source.kv[1][..., : 20 - PAGE, :], target.kv[1][..., : 20 - PAGE, :])


def test_steps_are_of_the_whole_batch_or_refused(bench: Workbench) -> None:
    pages = bench.pages("bf16", tokens_needed(3, 30, 4, PAGE))
    assert len(step_seconds(bench.engine(bench.decoders["bf16"], pages), 3, 30, 4, 256)) == 4
    with pytest.raises(TritoneError, match="of 4 sequences"):
        step_seconds(bench.engine(bench.decoders["bf16"], bench.pages("bf16", 3 * 48)), 4, 30, 4, 256)


def test_a_pair_of_one_decoder_is_that_decoder(bench: Workbench) -> None:
    decoder, other = bench.decoders["bf16"], bench.decoders["int4"]
    ids = prompt_of(50, 256)
    alone = Runner(decoder, torch.bfloat16).hidden(ids, 20)
    assert torch.equal(PairRunner(decoder, decoder, torch.bfloat16).hidden(ids, 20), alone)
    mixed = PairRunner(other, decoder, torch.bfloat16).hidden(ids, 20)
    assert mixed.shape == alone.shape
    # Row 0 comes from the prompt's decoder itself, the others from its keys and values.
    assert torch.equal(mixed[0], Runner(other, torch.bfloat16).hidden(ids, 20)[0])
    assert not torch.equal(mixed[1:], alone[1:]) and not torch.equal(mixed, Runner(other, torch.bfloat16).hidden(ids, 20))


def test_random_checkpoints_have_the_parameters_they_say_and_come_again(checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    def tensors(directory: Path) -> dict[str, torch.Tensor]:
        files = sorted(directory.glob("*.safetensors"))
        assert len(files) == 2
        return {name: tensor for file in files for name, tensor in load_file(file).items()}

    first, second = tensors(checkpoint), tensors(make(SHAPE, tmp_path, silent))
    assert sum(tensor.numel() for tensor in first.values()) == parameters(SHAPE)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["model.layers.4.mlp.down_proj.weight"].float().std() == pytest.approx(128**-0.5, rel=0.05)


def test_the_gguf_copy_holds_the_same_weights(tmp_path: Path) -> None:
    import gguf

    shape = Shape("copied", hidden=64, inner=128, layers=1, heads=2, kv_heads=1, vocabulary=256)
    directory = make(shape, tmp_path, silent)
    reader = gguf.GGUFReader(write_q4_0(directory, silent))
    from safetensors.torch import load_file

    weights = load_file(next(directory.glob("*.safetensors")))
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert len(found) == len(weights)
    tensor = found["blk.0.ffn_down.weight"]
    values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
    expected = weights["model.layers.0.mlp.down_proj.weight"].float()
    # Q4_0: 16 levels over the largest of 32 numbers and its opposite.
    groups = expected.view(64, -1, 32)
    assert ((values.view_as(groups) - groups).abs() <= groups.abs().amax(-1, keepdim=True) / 8 * 1.01).all()


def test_measuring_needs_room_and_stages_of_one_type(checkpoint: Path) -> None:
    base = Deployment(checkpoint=str(checkpoint), voice=None, max_context=600)
    with pytest.raises(InvalidArgument, match="--prompt and --answer: 700 is not allowed; allowed: at most 600"):
        measure(base, Load(600, 100, 1), silent)
    other = base.model_copy(update={"decode": base.decode.model_copy(update={"dtype": "float32"})})
    with pytest.raises(InvalidArgument, match=r"prefill\.dtype"):
        measure(other, Load(100, 100, 1), silent)


def test_a_stage_keeps_its_own_checkpoint_only_where_that_was_chosen() -> None:
    stage = {"checkpoint": "a-copy", "weights": "auto", "group": 128}
    deployment = Deployment.parse({"prefill": stage, "decode": stage}, "test")
    chosen = chosen_deployment(deployment, Pairing("int8", "copy", "fp8"))
    assert (chosen.prefill.weights, chosen.prefill.checkpoint) == ("int8", None)
    assert (chosen.decode.weights, chosen.decode.checkpoint, chosen.decode.kv) == ("auto", "a-copy", "fp8")


def test_the_deployment_that_is_written_is_the_choice() -> None:
    rows = [timed("int8", "int4", "fp8", 1.5), timed("bf16", "bf16", "bf16", 3.0)]
    choice = choose(rows, 1.0, judged({"int4": 0.25, "bf16": 0.0}, []))
    measured = Measured(rows, choice, rows[1], "a text")
    deployment = Deployment.parse({"name": "mine", "voice": None, "decode": {"pool_tokens": 4096}}, "test")
    text = measuring._as_yaml(chosen_deployment(deployment, choice.chosen.pairing), measured, Load(100, 20, 1))
    written = Deployment.parse(yaml.safe_load(text), "written")
    assert (written.prefill.weights, written.decode.weights, written.decode.kv) == ("int8", "int4", "fp8")
    assert (written.name, written.voice, written.decode.pool_tokens) == ("mine", None, 4096)
    comment = [line for line in text.splitlines() if line.startswith("#")]
    assert "1.50 s (3.00 s with bf16 throughout)" in " ".join(comment) and "0.25 %" in " ".join(comment)
    report = json.loads(json.dumps(measuring._as_json(measured, Load(100, 20, 1))))
    assert report["chosen"] == {"prefill": "int8", "decode": "int4", "kv": "fp8"}
    assert report["pairings"][0]["perplexity_increase_percent"]["value"] == 0.25


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--prompt", "0"], "--prompt: 0 is not allowed; allowed: at least 1"),
        (["--answer", "1"], "--answer: 1 is not allowed; allowed: at least 2"),
        (["--write", "/no/such/folder/x.yaml"], "--write: '/no/such/folder/x.yaml'"),
    ],
)
def test_wrong_options_are_told_before_anything_is_measured(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--measure", *arguments]) == 1
    assert told in capsys.readouterr().err


def test_what_a_killed_measurement_left_is_removed_by_the_next(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"""
        import os, signal
        from pathlib import Path
        import torch
        from tritone.measure.workbench import Workbench
        bench = Workbench(Path({str(checkpoint)!r}), torch.bfloat16, {PAGE})
        bench.pages("bf16", 64)
        print(bench.directory, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = Path(killed.stdout.strip())
    assert left.is_dir() and any(left.iterdir())
    # The next one, as far as that: it asks for more than fits.
    monkeypatch.setattr(os, "environ", os.environ.copy())  # the command sets some
    assert main(["doctor", "--measure", "--checkpoint", str(checkpoint), "--prompt", "100000"]) == 1
    assert not left.exists()
