"""Makes prefill and decode of a resolved deployment: loads weights and creates the pools in the run directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tritone.deployment import OWN_VOICE, Deployment, EngineStage
from tritone.integrity import Ledger, NoTracker, Tracker
from tritone.integrity.agreement import check_pools
from tritone.integrity.faults import Faults
from tritone.metrics import Metrics
from tritone.models.omni.families import FAMILIES
from tritone.pools import BlockPool, CancelBoard, Views
from tritone.pools.pool import torch_view
from tritone.progress import LoadProgress
from tritone.sizes import HIDDEN_ROWS, ITEM_SIZES, KV_DTYPES, model_type, page_count

if TYPE_CHECKING:
    from tritone.engine.engine import Engine
    from tritone.models.decoder import DecoderConfig
    from tritone.models.omni.heard import Hearing
    from tritone.models.omni.towers import Towers
    from tritone.stages.decode import DecodeStage
    from tritone.stages.hidden import AnswerRows
    from tritone.stages.prefill import PrefillStage

DECODE_CHUNK = 64
"""The most tokens of a prompt that decode computes in a step in which answers go on."""

SIZES = {"pool_tokens", "pool_bytes", "max_sequences", "max_batch_tokens", "max_queue"}
"""Fields of an engine that change none of its numbers."""


def build_prefill(deployment: Deployment, directory: Path, metrics: Metrics) -> PrefillStage:
    from tritone.stages.prefill import PrefillStage

    engine, pages, hidden = build_engine(deployment, deployment.prefill, directory, "prefill", handed=True)
    _warm_up(engine)
    return PrefillStage(
        engine,
        pages,
        hidden,
        CancelBoard(directory),
        metrics,
        max_queue=deployment.prefill.max_queue,
        max_wait_seconds=deployment.max_wait_seconds,
        lease_seconds=deployment.lease_seconds,
        checksum=deployment.integrity.checksum,
        faults=_faults(deployment, pages),
        rows=_rows(deployment, engine),
        hearing=_hearing(deployment),
        towers=_towers(deployment, directory),
    )


def build_decode(deployment: Deployment, directory: Path, metrics: Metrics) -> DecodeStage:
    from tritone.models.decoder import decoder_config, load_kv_scales
    from tritone.stages.decode import DecodeStage
    from tritone.text.tokenizer import load_tokenizer

    engine, pages, hidden = build_engine(deployment, deployment.decode, directory, "decode", max_chunk_tokens=DECODE_CHUNK)
    _warm_up(engine)
    scales = None
    if deployment.prefill.kv == "fp8":
        assert deployment.prefill.checkpoint is not None
        config = decoder_config(deployment.prefill.checkpoint)
        scales = load_kv_scales(deployment.prefill.checkpoint, config)
    return DecodeStage(
        engine,
        load_tokenizer(Path(deployment.checkpoint)),
        pages,
        hidden,
        Views(directory),
        CancelBoard(directory),
        metrics,
        max_queue=deployment.decode.max_queue,
        lease_seconds=deployment.lease_seconds,
        transfer_seconds=deployment.integrity.transfer_seconds,
        faults=_faults(deployment, pages),
        prefill_scales=scales,
        rows=_rows(deployment, engine),
    )


def build_engine(
    deployment: Deployment,
    part: EngineStage,
    directory: Path,
    name: str,
    *,
    max_chunk_tokens: int | None = None,
    handed: bool = False,
) -> tuple[Engine, BlockPool, BlockPool | None]:
    """An engine with its page pool and, where a voice is loaded, its hidden-state pool; files begin with ``name``.

    ``handed``: it keeps what the checkpoint's Talker gets of each token, if the voice is that Talker's."""
    import torch

    from tritone.engine.engine import Engine
    from tritone.engine.prefix_cache import PrefixCache
    from tritone.engine.scheduler import Scheduler
    from tritone.kernels import KV, QuantizedPages
    from tritone.models.decoder import key_offsets, load_decoder, load_kv_scales
    from tritone.text.tokenizer import load_tokenizer

    torch.set_num_threads(part.threads)
    assert part.checkpoint is not None
    model = load_decoder(
        part.checkpoint,
        dtype=getattr(torch, part.dtype),
        progress=LoadProgress(directory, name),
        max_positions=deployment.max_context,
        weights=part.weights,
        group=part.group,
    )
    config: DecoderConfig = model.config
    itemsize = ITEM_SIZES[part.dtype]
    pages, tracker = page_pool(deployment, part, directory, name, config, seal=deployment.integrity.checksum)
    shape, kv_dtype = pages.header.shape, pages.header.dtype
    check_pools(deployment, directory)
    hidden = None
    if deployment.voice:
        blocks = deployment.talker.hidden_blocks
        hidden = BlockPool(directory, f"{name}_hidden", blocks, (HIDDEN_ROWS, config.hidden_size), part.dtype, itemsize)
    numbers = [stage.model_dump(exclude=SIZES) for stage in (deployment.prefill, deployment.decode)]
    cache = PrefixCache(pages, deployment.page_size, mixed=numbers[0] != numbers[1]) if deployment.prefix_cache else None
    scheduler = Scheduler(
        pages,
        deployment.page_size,
        part.max_sequences,
        part.max_batch_tokens,
        cache=cache,
        tracker=tracker,
        max_chunk_tokens=max_chunk_tokens,
    )
    kv: KV = torch_view(pages.data, kv_dtype, shape)
    if part.kv == "fp8":
        # Prefill's codes are read by decode, whose weights would give other offsets; so e4m3 pages of prefill have none,
        # and decode's have none then either: codes are handed over as they are.
        scales, offsets = load_kv_scales(part.checkpoint, config), None
        if deployment.prefill.kv != "fp8":
            offsets = key_offsets(model, load_tokenizer(Path(deployment.checkpoint)), scales)
        kv = QuantizedPages(torch_view(pages.data, kv_dtype, shape), scales, offsets)
    rows = None
    if handed and deployment.voice == OWN_VOICE:
        held = (page_count(deployment, part), deployment.page_size, config.hidden_size)
        rows = torch.zeros(held, dtype=getattr(torch, part.dtype))
    return Engine(model, kv, scheduler, rows), pages, hidden


def page_pool(
    deployment: Deployment, part: EngineStage, directory: Path, name: str, config: DecoderConfig, *, seal: bool = False
) -> tuple[BlockPool, Tracker | NoTracker]:
    """The pool ``<name>_pages`` of an engine in the run directory, and what checks its pages, as ``integrity.mode`` says."""
    # Before the pool: whoever finds the pool's header finds the ledger of the same owner.
    ledger = None if deployment.integrity.mode == "off" else Ledger(directory, f"{name}_pages", owner=True)
    shape, dtype = config.page_shape(deployment.page_size), KV_DTYPES[part.kv]
    count, itemsize = page_count(deployment, part), ITEM_SIZES[dtype]
    pages = BlockPool(directory, f"{name}_pages", count, shape, dtype, itemsize, seal=seal)
    return pages, Tracker(pages, ledger, log_only=deployment.integrity.mode == "log") if ledger else NoTracker()


def _rows(deployment: Deployment, engine: Engine) -> AnswerRows | None:
    """What the Talker gets of an answer, if it is the checkpoint's own."""
    from tritone.models.decoder import Decoder
    from tritone.stages.hidden import answer_rows

    if deployment.voice != OWN_VOICE:
        return None
    assert isinstance(engine.model, Decoder)
    return answer_rows(engine.model)


def _hearing(deployment: Deployment) -> Hearing | None:
    from tritone.models.omni.talker_config import hearer_of

    return hearer_of(deployment.checkpoint) if deployment.voice == OWN_VOICE else None


def _towers(deployment: Deployment, directory: Path) -> Towers | None:
    """What computes audio and images, for a checkpoint that takes them."""
    import torch

    from tritone.models.omni.towers import Towers

    part = deployment.prefill
    assert part.checkpoint is not None
    if model_type(Path(part.checkpoint)) not in FAMILIES:
        return None
    return Towers(deployment.checkpoint, getattr(torch, part.dtype), progress=LoadProgress(directory, "prefill_towers"))


def _faults(deployment: Deployment, pages: BlockPool) -> Faults:
    return Faults(deployment.integrity.faults, pages, deployment.integrity.transfer_seconds)


def _warm_up(engine: Engine) -> None:
    """Run a prompt and a few tokens through the engine, so that the first request finds everything made."""
    from tritone.engine.sequence import Sequence
    from tritone.options import Sampling

    greedy = Sampling(temperature=0.0)
    for length in (1, 2, 48):
        sequence = Sequence(session=0, tokens=[1] * length, prompt_length=length, sampling=greedy, max_tokens=4)
        engine.scheduler.add(sequence)
        for _ in range(3):
            engine.step()
        engine.scheduler.remove(sequence)
    if engine.scheduler.cache is not None:
        engine.scheduler.cache.clear()
