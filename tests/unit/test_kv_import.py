"""FP8 pages from deployment to answer: sizes, scales from a checkpoint, the import from prefill's pages, NaN."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.unit.helpers import FakeReply, byte_level_tokenizer, handoff, request
from tritone.deployment import Deployment
from tritone.engine.engine import Engine, Output
from tritone.engine.scheduler import Scheduler
from tritone.engine.sequence import Sequence
from tritone.errors import InvalidArgument, TritoneError
from tritone.kernels import KV, QuantizedPages, default_kernels
from tritone.kernels.torch_kernels import mixed_keys
from tritone.messages import Prefilled
from tritone.metrics import Metrics
from tritone.models.decoder import Decoder, DecoderConfig, load_decoder, load_kv_scales
from tritone.options import Sampling
from tritone.pools import BlockPool, CancelBoard, Views
from tritone.pools.pool import torch_view
from tritone.sizes import ITEM_SIZES, KV_DTYPES, required_shared_memory, token_bytes
from tritone.stages.decode import DecodeStage
from tritone.supervisor import resolve_deployment

PAGE = 16
LAYERS, HEADS = 2, 2
GREEDY = Sampling(temperature=0.0)
KINDS = ("float32", "bf16", "fp8")
POISON = 119
"""A token whose embedding the poisoned model turns into NaN."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=400,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    byte_level_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Decoder:
    return load_decoder(checkpoint, torch.bfloat16)


def make_pool(directory: Path, name: str, kind: str, config: DecoderConfig, scales: torch.Tensor, pages: int = 24) -> Any:
    dtype = KV_DTYPES[kind]
    pool = BlockPool(directory, name, pages, config.page_shape(PAGE), dtype, ITEM_SIZES[dtype])
    kv: torch.Tensor = torch_view(pool.data, dtype, config.page_shape(PAGE))
    return pool, QuantizedPages(kv, scales) if kind == "fp8" else kv


def make_engine(model: Decoder, pool: BlockPool, kv: KV, budget: int = 64) -> Engine:
    return Engine(model, kv, Scheduler(pool, PAGE, 16, budget))


def sequence(session: int, tokens: list[int], **changes: Any) -> Sequence:
    return Sequence(session=session, tokens=list(tokens), prompt_length=len(tokens), sampling=GREEDY, max_tokens=64, **changes)


def run(engine: Engine, sequences: list[Sequence], answer: int) -> dict[int, list[int] | TritoneError]:
    """Compute all of them at once until each has ``answer`` tokens or an error."""
    ended: dict[int, list[int] | TritoneError] = {}
    for one in sequences:
        engine.scheduler.add(one)
    while len(engine.scheduler):
        outputs: list[Output] = engine.step()
        for output in outputs:
            if output.error is not None:
                ended[output.sequence.session] = output.error
            elif output.sequence.answer_length == answer:
                ended[output.sequence.session] = output.sequence.tokens[output.sequence.prompt_length :]
                engine.scheduler.remove(output.sequence)
    return ended


def prompt(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(1, 110, length)]


@pytest.mark.parametrize("name", ["fp8_e5m2", "fp8_e4m3", "int8", "float16", "FP8", "none"])
def test_another_kv_is_refused_with_the_list(name: str) -> None:
    for stage in ("prefill", "decode"):
        with pytest.raises(InvalidArgument) as caught:
            Deployment.parse({stage: {"kv": name}}, "t")
        message = caught.value.message
        assert f"{stage}.kv: {name!r}" in message
        assert all(f"'{allowed}'" in message for allowed in ("auto", "bf16", "float32", "fp8"))


def resolved(checkpoint: Path, tmp_path: Path, **decode: Any) -> Deployment:
    written = {"checkpoint": str(checkpoint), "voice": None, "page_size": PAGE, "max_context": 256, "decode": decode}
    return resolve_deployment(Deployment.parse(written, "t"), tmp_path)


def test_kv_is_of_the_compute_type_unless_named(checkpoint: Path, tmp_path: Path) -> None:
    for dtype, kv in (("float32", "float32"), ("bfloat16", "bf16")):
        assert resolved(checkpoint, tmp_path, dtype=dtype).decode.kv == kv
    for kv in KINDS:
        deployment = resolved(checkpoint, tmp_path, dtype="float32", kv=kv)
        assert (deployment.decode.kv, deployment.decode.dtype) == (kv, "float32")
    assert Deployment.parse(deployment.model_dump(), "again") == deployment


def test_the_same_bytes_hold_twice_the_tokens(checkpoint: Path, tmp_path: Path) -> None:
    budget = 1 << 20
    tokens = {kv: resolved(checkpoint, tmp_path, kv=kv, pool_bytes=budget).decode.pool_tokens for kv in KINDS}
    assert tokens["fp8"] == 2 * tokens["bf16"] == 4 * tokens["float32"]
    assert tokens["fp8"] * token_bytes(checkpoint, "fp8") == budget
    for kv in KINDS:
        part = resolved(checkpoint, tmp_path, kv=kv, pool_bytes=budget)
        prefill = part.prefill.pool_tokens * token_bytes(checkpoint, part.prefill.kv)
        assert required_shared_memory(part) == prefill + budget


def test_a_pool_too_small_in_bytes_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    page = PAGE * token_bytes(checkpoint, "fp8")
    with pytest.raises(InvalidArgument, match=f"pool_bytes.*at least {page}"):
        resolved(checkpoint, tmp_path, kv="fp8", pool_bytes=page - 1)
    with pytest.raises(InvalidArgument, match="max_context: 256 does not fit"):
        resolved(checkpoint, tmp_path, kv="fp8", pool_bytes=page)


def with_scales(checkpoint: Path, path: Path, changes: dict[str, Any], declared: bool = False) -> Path:
    """A copy of the checkpoint with scales of every layer, except where ``changes`` has another value or None."""
    path.mkdir()
    tensors = load_file(checkpoint / "model.safetensors")
    for layer in range(LAYERS):
        for letter in "kv":
            name = f"model.layers.{layer}.self_attn.{letter}_scale"
            value = changes.get(name, torch.tensor(0.25 + layer if letter == "k" else 0.5))
            if value is not None:
                tensors[name] = value
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    if declared:
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor"},
        }
    (path / "config.json").write_text(json.dumps(config))
    return path


WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "channel"}


def test_scales_come_from_the_checkpoint(checkpoint: Path, model: Decoder, tmp_path: Path) -> None:
    assert torch.equal(load_kv_scales(checkpoint, model.config), torch.ones(LAYERS, 2, HEADS))
    heads = torch.tensor([0.125, 3.0]).view(HEADS, 1, 1)
    path = with_scales(checkpoint, tmp_path / "c", {"model.layers.1.self_attn.v_scale": heads})
    scales = load_kv_scales(path, model.config)
    assert scales.dtype == torch.float32
    room = 4.0  # heads of 16 numbers: mixed keys may be four times as large
    assert scales.tolist() == [[[room * 0.25] * 2, [0.5, 0.5]], [[room * 1.25] * 2, [0.125, 3.0]]]
    load_decoder(path, torch.float32)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0.0"), (-1.0, "-1.0"), (float("nan"), "nan"), (float("inf"), "inf"), (None, "missing"), ([1.0, 1.0, 1.0], "[3]")],
)
@pytest.mark.parametrize("letter", ["k", "v"])
def test_a_wrong_scale_is_refused_by_layer_and_value(
    checkpoint: Path, model: Decoder, tmp_path: Path, value: Any, shown: str, letter: str
) -> None:
    name = f"model.layers.1.self_attn.{letter}_scale"
    wrong = None if value is None else torch.tensor(value)
    path = with_scales(checkpoint, tmp_path / "c", {name: wrong})
    with pytest.raises(InvalidArgument) as caught:
        load_kv_scales(path, model.config)
    assert name in caught.value.message and shown in caught.value.message


def test_declared_scales_must_be_there(checkpoint: Path, model: Decoder, tmp_path: Path) -> None:
    missing = dict.fromkeys(f"model.layers.{n}.self_attn.{letter}_scale" for n in range(LAYERS) for letter in "kv")
    with pytest.raises(InvalidArgument, match=r"model\.layers\.0\.self_attn\.k_scale.*missing"):
        load_kv_scales(with_scales(checkpoint, tmp_path / "none", missing, declared=True), model.config)
    some = {name: None for name in missing if ".1." in name}
    with pytest.raises(InvalidArgument, match=r"model\.layers\.1\.self_attn\.k_scale.*missing"):
        load_kv_scales(with_scales(checkpoint, tmp_path / "some", some), model.config)
    whole = load_kv_scales(with_scales(checkpoint, tmp_path / "whole", {}, declared=True), model.config)
    assert whole[1].tolist() == [[5.0, 5.0], [0.5, 0.5]]


class Stages:
    """Prefill's pages, made by an engine, and a decode stage that takes them over."""

    def __init__(self, model: Decoder, directory: Path, source: str, target: str, ratio: float = 1.0) -> None:
        """``ratio``: how much larger decode's scales are than prefill's."""
        torch.manual_seed(3)
        scales = torch.rand(LAYERS, 2, HEADS) * 0.01 + 0.001
        self.prefill_pool, self.prefill_kv = make_pool(directory, "prefill_pages", source, model.config, scales)
        self.pool, self.kv = make_pool(directory, "decode_pages", target, model.config, scales * ratio)
        self.prefill = make_engine(model, self.prefill_pool, self.prefill_kv)
        self.engine = make_engine(model, self.pool, self.kv)
        self.stage = DecodeStage(
            self.engine,
            byte_level_tokenizer(),
            self.pool,
            None,
            Views(directory),
            CancelBoard(directory),
            Metrics("decode"),
            max_queue=8,
            lease_seconds=60,
            prefill_scales=scales if source == "fp8" else None,
        )
        self.stage._loop.stop()  # the test calls what the loop would call

    def hand_over(self, session: int, tokens: list[int]) -> tuple[Sequence, FakeReply, list[int]]:
        """Prefill ``tokens`` and submit them to decode; gives decode's sequence and prefill's pages."""
        one = sequence(session, tokens)
        self.prefill.scheduler.add(one)
        outputs: list[Output] = []
        while not outputs:
            outputs = self.prefill.step()
        info = outputs[0].info
        assert info is not None
        self.prefill.scheduler.remove(one, keep_pages=True)
        blocks = one.pages[: -(-len(tokens) // PAGE)]
        given = handoff(pages=self.prefill_pool.lend(blocks, 60), first=info.token)
        reply = FakeReply()
        asked = request(session, tuple(tokens), sampling=GREEDY, max_tokens=6)
        self.stage.submit(Prefilled(asked, session, given, None), reply)
        while self.stage._loop._commands:
            self.stage._loop._commands.popleft()()
        return self.stage._running[session][1], reply, blocks


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_imported_pages_equal_those_quantised_locally(model: Decoder, tmp_path: Path, source: str, target: str) -> None:
    stages = Stages(model, tmp_path, source, target)
    for session, length in ((1, 1), (2, PAGE), (3, 45)):
        ours, _, blocks = stages.hand_over(session, prompt(session, length))
        stages.engine._import(stages.engine.scheduler.schedule())
        pages, local = ours.pages[: len(blocks)], torch.zeros(len(blocks), *model.config.page_shape(PAGE))
        rows = [min(PAGE, length - PAGE * number) for number in range(len(blocks))]
        default_kernels().convert_pages(stages.prefill_kv, blocks, local, range(len(blocks)), length)
        for number, (page, count) in enumerate(zip(pages, rows, strict=True)):
            held, expected = stages.kv, local[number, ..., :count, :]
            if isinstance(held, QuantizedPages):
                scales = held.scales[..., None, None]
                expected = torch.stack((mixed_keys(expected[:, 0]), expected[:, 1]), dim=1)
                codes = (expected / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
                assert torch.equal(held.codes[page, ..., :count, :].view(torch.uint8), codes.view(torch.uint8))
            else:
                assert torch.equal(held[page, ..., :count, :], expected.to(held.dtype))
        stages.engine.scheduler.remove(ours)
        assert stages.prefill_pool.collect() == 0 and stages.prefill_pool.leased == 0


def test_pages_of_other_scales_are_converted_not_copied(model: Decoder, tmp_path: Path) -> None:
    """Two checkpoints of one model may bring scales of their own. Those twice as large give
    half the codes."""
    stages = Stages(model, tmp_path, "fp8", "fp8", ratio=2.0)
    ours, _, blocks = stages.hand_over(1, prompt(1, 2 * PAGE))
    stages.engine._import(stages.engine.scheduler.schedule())
    read, held = stages.prefill_kv, stages.kv
    assert isinstance(read, QuantizedPages) and isinstance(held, QuantizedPages)
    before = read.codes[blocks].float()
    after = held.codes[ours.pages[: len(blocks)]].float()
    assert not torch.equal(before, after)
    exact = before.abs() >= 2.0**-5  # halving a smaller one may round: e4m3 has no smaller exponents
    assert torch.equal(after[exact], before[exact] / 2)
    assert float((after - before / 2).abs().max()) <= 2.0**-10


def test_a_nan_in_prefills_pages_ends_that_request_alone(model: Decoder, tmp_path: Path) -> None:
    stages = Stages(model, tmp_path, "bf16", "fp8")
    first, *_ = stages.hand_over(1, prompt(1, 20))
    _, reply, blocks = stages.hand_over(2, prompt(2, 40))
    third, *_ = stages.hand_over(3, prompt(3, 33))
    stages.prefill_kv[blocks[1], 1, 0, 1, 3, 5] = float("nan")
    for _ in range(8):
        stages.stage.step()
    stages.stage._outbox.stop()
    end = reply.wait()[-1]
    assert end.kind == "error" and "page 1" in end.info["message"] and "NaN" in end.info["message"]
    assert first.answer_length == third.answer_length == 6
    assert stages.pool.available == stages.pool.total


def poisoned(model: Decoder) -> Decoder:
    embedding = model.embedding.clone()
    embedding[POISON] = float("nan")
    return Decoder(model.config, embedding, model.layers, model.final_norm, model.head, model.rope, model.kernels)


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_made_here_ends_that_request_alone(model: Decoder, tmp_path: Path, kind: str) -> None:
    bad = poisoned(model)
    prompts = {n: prompt(n, 10 + 9 * n) for n in range(1, 5)}
    pool, kv = make_pool(tmp_path, "pages", kind, model.config, torch.full((LAYERS, 2, HEADS), 0.01))
    clean = run(make_engine(bad, pool, kv), [sequence(n, tokens) for n, tokens in prompts.items()], 20)
    prompts |= {5: [*prompt(5, 30), POISON, *prompt(6, 40)], 6: [POISON]}
    found = run(make_engine(bad, pool, kv), [sequence(n, tokens) for n, tokens in prompts.items()], 20)
    assert {n: found[n] for n in clean} == clean
    assert all(isinstance(found[n], TritoneError) and "not finite" in str(found[n]) for n in (5, 6))
    again = run(make_engine(bad, pool, kv), [sequence(n, prompts[n]) for n in (3, 4)], 20)
    assert again == {n: clean[n] for n in (3, 4)}, "pages that held NaN are as good as new"
    assert pool.available == pool.total


@pytest.mark.parametrize("threads", [1, 2])
def test_the_first_answer_equals_the_hundredth(model: Decoder, tmp_path: Path, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        pool, kv = make_pool(tmp_path, "pages", "fp8", model.config, torch.full((LAYERS, 2, HEADS), 0.01))
        engine = make_engine(model, pool, kv)
        first = run(engine, [sequence(0, prompt(9, 37))], 12)[0]
        began = time.monotonic()
        for number in range(1, 100):
            neighbours = [sequence(1000 + number, prompt(number, 5 + number % 40))] if number % 2 else []
            assert run(engine, [sequence(number, prompt(9, 37)), *neighbours], 12)[number] == first
        assert time.monotonic() - began < 120
    finally:
        torch.set_num_threads(before)
