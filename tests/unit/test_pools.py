"""Tagged block pools: owner, readers, leases, and what a reader finds when its reference does not hold."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tritone.errors import TritoneError
from tritone.messages import BlockRefs
from tritone.pools import BlockPool, CancelBoard, FreeList, PoolExhausted, PoolView, StaleBlocks, Views
from tritone.pools.board import WORDS

SHAPE = (2, 3)
BYTES = 24  # 2 x 3 float32


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(directory: Path, blocks: int = 4, clock: Any = None, name: str = "pages") -> BlockPool:
    return BlockPool(directory, name, blocks, SHAPE, "float32", 4, clock=clock or Clock())


# The free list


def test_free_list_hands_out_each_block_once() -> None:
    free = FreeList(5)
    blocks = free.allocate(2) + free.allocate(3)
    assert sorted(blocks) == [0, 1, 2, 3, 4]
    assert free.available == 0


def test_free_list_gives_all_or_nothing() -> None:
    free = FreeList(3)
    free.allocate(1)
    with pytest.raises(PoolExhausted, match="3 blocks asked for, 2 of 3 free"):
        free.allocate(3)
    assert free.available == 2
    assert len(free.allocate(2)) == 2


def test_free_list_reuses_the_least_recently_freed_block_first() -> None:
    free = FreeList(4)
    free.allocate(4)
    for block in (2, 0, 3):
        free.free([block])
    assert free.allocate(3) == [2, 0, 3]


@pytest.mark.parametrize("block", [-1, 1, 3, 100])
def test_free_list_takes_back_only_what_is_held(block: int) -> None:
    free = FreeList(3)
    free.allocate(1)
    with pytest.raises(ValueError, match=f"block {block} is not allocated"):
        free.free([block])
    assert free.available == 2


def test_free_list_refuses_a_block_freed_twice() -> None:
    free = FreeList(3)
    held = free.allocate(2)
    with pytest.raises(ValueError, match="not allocated"):
        free.free([held[0], held[0], held[1]])
    assert free.available == 2
    free.free([held[1]])
    assert sorted(free.allocate(3)) == [0, 1, 2]


def test_free_list_against_a_set() -> None:
    chance = random.Random(1)
    free, held = FreeList(17), set[int]()
    for _ in range(5000):
        count = chance.randint(0, 5)
        if chance.random() < 0.5:
            if count > 17 - len(held):
                with pytest.raises(PoolExhausted):
                    free.allocate(count)
                continue
            got = free.allocate(count)
            assert len(got) == count
            assert held.isdisjoint(got)
            held |= set(got)
        else:
            back = chance.sample(sorted(held), min(count, len(held)))
            free.free(back)
            held -= set(back)
        assert free.available == 17 - len(held)


# Kept blocks


def test_a_kept_block_is_cached_when_nobody_holds_it() -> None:
    free = FreeList(3)
    block = free.allocate(1)[0]
    free.keep(block)
    free.share([block])
    free.free([block])
    assert (free.holders(block), free.cached, free.available) == (1, 0, 2)
    free.free([block])
    assert (free.holders(block), free.cached, free.available) == (0, 1, 3)
    free.share([block])
    assert (free.holders(block), free.cached, free.available) == (1, 0, 2)


def test_a_block_has_one_holder_unless_it_is_kept() -> None:
    free = FreeList(2)
    with pytest.raises(ValueError, match="block 0 is not kept"):
        free.share(free.allocate(1))
    with pytest.raises(ValueError, match="block 1 is not allocated"):
        free.keep(1)


def test_cached_blocks_go_last_and_the_least_recently_used_first() -> None:
    free, evicted = FreeList(6), list[int]()
    free.on_evict = evicted.append
    first, second = free.allocate(2), free.allocate(2)
    for block in (*first, *second):
        free.keep(block)
    free.free(first)
    free.free(second)
    free.share([first[0]])
    free.free([first[0]])
    assert free.allocate(2) == [4, 5]
    assert evicted == []
    # Of blocks freed together the last one goes first: a prefix is worth more than what follows it.
    assert free.allocate(4) == evicted == [first[1], second[1], second[0], first[0]]
    assert free.available == 0
    free.free(evicted)
    assert (free.cached, free.available) == (0, 4)


def test_all_cached_blocks_can_be_made_free() -> None:
    free, evicted = FreeList(3), list[int]()
    free.on_evict = evicted.append
    held = free.allocate(2)
    for block in held:
        free.keep(block)
    free.free([held[1]])
    free.evict_all()
    assert (evicted, free.cached, free.available) == ([held[1]], 0, 2)
    assert free.is_kept(held[0])


# The owner


def test_a_tag_changes_at_each_allocation_and_never_comes_back(tmp_path: Path) -> None:
    pool, chance = make(tmp_path), random.Random(2)
    seen: set[int] = {0}
    for _ in range(300):
        blocks = pool.allocate(chance.randint(1, 4))
        for block in blocks:
            tag = int(pool.tags[block])
            assert tag not in seen
            seen.add(tag)
        pool.free(blocks)


def test_an_allocation_that_fails_changes_nothing(tmp_path: Path) -> None:
    pool = make(tmp_path)
    pool.allocate(2)
    tags = pool.tags.copy()
    with pytest.raises(PoolExhausted):
        pool.allocate(3)
    np.testing.assert_array_equal(pool.tags, tags)
    assert pool.gauges() == {"free": 2, "cached": 0, "leased": 0, "used": 2}


def test_blocks_lie_side_by_side(tmp_path: Path) -> None:
    pool = make(tmp_path)
    assert pool.data.size == 4 * BYTES
    for block in range(4):
        assert pool.block(block).size == BYTES
        pool.block(block)[:] = block + 1
    np.testing.assert_array_equal(pool.data, np.repeat([1, 2, 3, 4], BYTES))


def test_a_released_lease_is_collected(tmp_path: Path) -> None:
    pool = make(tmp_path)
    blocks = pool.allocate(3)
    refs = pool.lend(blocks, 30)
    assert pool.gauges() == {"free": 1, "cached": 0, "leased": 3, "used": 0}
    tags = pool.tags.copy()
    assert pool.collect() == 0
    assert pool.leased == 3
    PoolView(tmp_path, "pages").release(refs)
    assert pool.collect() == 0
    assert pool.gauges() == {"free": 4, "cached": 0, "leased": 0, "used": 0}
    # A free block is nobody's: whoever still refers to it finds out before it is allocated again.
    assert (pool.tags[list(refs.blocks)] > tags.max()).all()


def test_an_overdue_lease_is_taken_back_and_its_reader_finds_out(tmp_path: Path) -> None:
    clock = Clock()
    pool = make(tmp_path, clock=clock)
    refs = pool.lend(pool.allocate(2), 30)
    view = PoolView(tmp_path, "pages")
    clock.now += 29.999
    assert pool.collect() == 0
    view.check(refs)
    clock.now += 0.001
    assert pool.collect() == 1
    assert pool.available == 4
    with pytest.raises(StaleBlocks, match="tag"):
        view.check(refs)
    assert pool.collect() == 0


def test_a_late_release_does_not_end_the_next_lease_of_the_same_block(tmp_path: Path) -> None:
    clock = Clock()
    pool = make(tmp_path, blocks=1, clock=clock)
    late = pool.lend(pool.allocate(1), 30)
    clock.now += 30
    assert pool.collect() == 1
    fresh = pool.lend(pool.allocate(1), 30)
    assert fresh.slot == late.slot
    view = PoolView(tmp_path, "pages")
    view.release(late)
    assert pool.collect() == 0
    assert pool.leased == 1
    view.check(fresh)
    view.release(fresh)
    pool.collect()
    assert pool.leased == 0


def test_releasing_twice_is_harmless(tmp_path: Path) -> None:
    pool = make(tmp_path)
    refs = pool.lend(pool.allocate(1), 30)
    view = PoolView(tmp_path, "pages")
    view.release(refs)
    view.release(refs)
    pool.collect()
    assert pool.available == 4


def test_two_leases_of_the_same_kept_blocks(tmp_path: Path) -> None:
    clock = Clock()
    pool = make(tmp_path, clock=clock)
    shared = pool.allocate(2)
    for block in shared:
        pool.keep(block)
    pool.share(shared)
    first = pool.lend([*shared, *pool.allocate(1)], 30)
    clock.now += 1
    second = pool.lend([*shared, *pool.allocate(1)], 30)
    assert pool.gauges() == {"free": 0, "cached": 0, "leased": 4, "used": 0}
    view = PoolView(tmp_path, "pages")
    clock.now += 29
    assert pool.collect() == 1
    # What the second reader is still lent keeps its tags.
    view.check(second)
    with pytest.raises(StaleBlocks, match="tag"):
        view.check(first)
    assert pool.gauges() == {"free": 1, "cached": 0, "leased": 3, "used": 0}
    pool.share(shared)
    assert pool.gauges() == {"free": 1, "cached": 0, "leased": 1, "used": 2}
    view.release(first)
    view.release(second)
    assert pool.collect() == 0
    pool.free(shared)
    assert pool.gauges() == {"free": 2, "cached": 2, "leased": 0, "used": 0}
    tags = pool.tags[shared].copy()
    pool.allocate(4)
    assert not np.isin(pool.tags[shared], tags).any()


def test_a_block_ends_one_lease_only(tmp_path: Path) -> None:
    pool = make(tmp_path)
    blocks = pool.allocate(2)
    for block in blocks:
        pool.keep(block)
    pool.share(blocks)
    pool.lend(blocks, 30)
    with pytest.raises(ValueError, match="block 1 already ends a lease"):
        pool.lend(blocks, 30)


def test_leases_end_one_by_one(tmp_path: Path) -> None:
    pool = make(tmp_path)
    first, second = pool.lend(pool.allocate(1), 30), pool.lend(pool.allocate(2), 30)
    PoolView(tmp_path, "pages").release(first)
    pool.collect()
    assert pool.gauges() == {"free": 2, "cached": 0, "leased": 2, "used": 0}
    PoolView(tmp_path, "pages").check(second)


# Readers


def test_a_reader_sees_the_data_and_cannot_write_it(tmp_path: Path) -> None:
    pool = make(tmp_path)
    block = pool.allocate(1)[0]
    view = PoolView(tmp_path, "pages")
    pool.block(block)[:] = np.arange(BYTES)
    np.testing.assert_array_equal(view.block(block), np.arange(BYTES))
    for array in (view.data, view.tags, view.block(block)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.setflags(write=True)


def test_a_reference_is_checked_in_every_part(tmp_path: Path) -> None:
    pool = make(tmp_path)
    refs = pool.lend(pool.allocate(3), 30)
    view = PoolView(tmp_path, "pages")
    view.check(refs)
    wrong: list[tuple[str, BlockRefs]] = [
        ("epoch", replace(refs, epoch=refs.epoch ^ 1)),
        ("blocks of float32 \\[6\\]", replace(refs, shape=(6,))),
        ("blocks of bfloat16 \\[2, 3\\]", replace(refs, dtype="bfloat16")),
        ("3 blocks with 2 tags", replace(refs, tags=refs.tags[:2])),
        ("block 4 is outside 0..3", replace(refs, blocks=(0, 4, 2))),
        ("block -1 is outside 0..3", replace(refs, blocks=(0, 1, -1))),
        ("block 1 carries tag 2, the reference says 9 \\(1 of 3", replace(refs, tags=(1, 9, 3))),
        ("2 of 3 blocks differ", replace(refs, tags=(3, 2, 1))),
        ("3 of 3 blocks differ", replace(refs, tags=(2**63, 2**64 - 1, 0))),
    ]
    for reason, changed in wrong:
        with pytest.raises(StaleBlocks, match=reason) as caught:
            view.check(changed)
        assert caught.value.code == "INTERNAL"
        assert caught.value.message.startswith("pages: ")
    view.check(refs)


@pytest.mark.parametrize("slot", [4, -1, 2**40])
def test_a_release_outside_the_pool_does_nothing(slot: int, tmp_path: Path) -> None:
    pool = make(tmp_path)
    refs = pool.lend([pool.allocate(4)[3]], 30)
    PoolView(tmp_path, "pages").release(replace(refs, slot=slot))
    pool.collect()
    assert pool.leased == 1


def test_a_block_allocated_anew_is_not_the_block_referred_to(tmp_path: Path) -> None:
    pool = make(tmp_path, blocks=1)
    refs = pool.lend(pool.allocate(1), 30)
    view = PoolView(tmp_path, "pages")
    view.release(refs)
    pool.collect()
    with pytest.raises(StaleBlocks, match="carries tag 2, the reference says 1"):
        view.check(refs)
    pool.allocate(1)
    with pytest.raises(StaleBlocks, match="carries tag 3, the reference says 1"):
        view.check(refs)


def test_views_map_a_pool_once_and_anew_when_its_owner_restarted(tmp_path: Path) -> None:
    views = Views(tmp_path)
    before = make(tmp_path).lend([0], 30)
    view = views.of(before)
    assert views.of(before) is view
    pool = make(tmp_path)
    after = pool.lend(pool.allocate(1), 30)
    assert after.epoch != before.epoch
    fresh = views.of(after)
    assert fresh is not view
    fresh.check(after)
    with pytest.raises(StaleBlocks, match=f"epoch {before.epoch} is over"):
        views.of(before).check(before)
    # Mapping the old reference again must not cost the fresh ones their view.
    views.of(after).check(after)


def test_an_owner_that_restarts_never_pulls_memory_from_under_a_reader(tmp_path: Path) -> None:
    pool = make(tmp_path, blocks=4)
    pool.data[:] = 7
    view = PoolView(tmp_path, "pages")
    make(tmp_path, blocks=1)
    assert view.data.size == 4 * BYTES
    assert int(view.data.sum()) == 7 * 4 * BYTES


@pytest.mark.parametrize("name", ["nothing_here", "../pages", "", "a/b", "."])
def test_an_unknown_pool_is_stale_not_a_crash(name: str, tmp_path: Path) -> None:
    refs = replace(make(tmp_path).lend([0], 30), pool=name)
    with pytest.raises(StaleBlocks, match="pool"):
        Views(tmp_path).of(refs)
    Views(tmp_path).release(refs, None)


def test_views_release_many(tmp_path: Path) -> None:
    pool, other = make(tmp_path), make(tmp_path, name="hidden")
    Views(tmp_path).release(pool.lend(pool.allocate(2), 30), None, other.lend(other.allocate(1), 30))
    assert (pool.collect(), other.collect()) == (0, 0)
    assert (pool.available, other.available) == (4, 4)


def test_copying_rows_releases_and_checks(tmp_path: Path) -> None:
    pool, views = make(tmp_path), Views(tmp_path)
    values = np.arange(6, dtype=np.float32).reshape(SHAPE)
    block = pool.allocate(1)
    pool.block(block[0])[:] = values.view(np.uint8).reshape(-1)
    refs = pool.lend(block, 30)
    rows = views.copy_rows(refs, 1)
    pool.data[:] = 0
    np.testing.assert_array_equal(rows.numpy(), values[:1])
    pool.collect()
    assert pool.available == 4
    pool.allocate(4)
    with pytest.raises(StaleBlocks):
        views.copy_rows(refs, 1)


def test_copying_rows_of_several_blocks(tmp_path: Path) -> None:
    """In the order of the reference, the last block in part."""
    pool, views = make(tmp_path), Views(tmp_path)
    blocks = pool.allocate(3)[::-1]
    values = np.arange(18, dtype=np.float32).reshape(3, *SHAPE)
    for block, value in zip(blocks, values, strict=True):
        pool.block(block)[:] = value.view(np.uint8).reshape(-1)
    rows = views.copy_rows(pool.lend(blocks, 30), 5)
    np.testing.assert_array_equal(rows.numpy(), values.reshape(6, 3)[:5])
    pool.collect()
    assert pool.available == 4


def test_torch_sees_the_same_memory(tmp_path: Path) -> None:
    from tritone.pools.pool import torch_view

    pool = make(tmp_path)
    tensor = torch_view(pool.data, "float32", SHAPE)
    assert tuple(tensor.shape) == (4, 2, 3)
    tensor[2] = 1.5
    np.testing.assert_array_equal(pool.block(2).view(np.float32), np.full(6, 1.5, np.float32))
    assert int(pool.data[: 2 * BYTES].sum()) == 0


# Files


def test_memory_is_reserved_when_the_pool_is_made(tmp_path: Path) -> None:
    make(tmp_path, blocks=1000)
    assert os.stat(tmp_path / "pages.data").st_blocks * 512 >= 1000 * BYTES
    assert {path.name for path in tmp_path.iterdir()} == {
        "pages.json",
        "pages.data",
        "pages.tags",
        "pages.leases",
        "pages.seals",
        "pages.condemned",
        "pages.owner",
    }
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.glob("pages.[dtl]*"))


def test_full_shared_memory_is_said_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TritoneError, match="no room for 1 MiB of shared memory") as caught:
        BlockPool(tmp_path, "pages", 2**20 // BYTES, SHAPE, "float32", 4)
    assert caught.value.code == "RESOURCE_EXHAUSTED"
    assert "--shm-size" in caught.value.message
    assert str(tmp_path) in caught.value.message
    with pytest.raises(FileNotFoundError):
        PoolView(tmp_path, "pages")


def test_other_file_errors_keep_their_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "posix_fallocate", broken)
    with pytest.raises(OSError, match="Input/output error"):
        make(tmp_path)


def test_a_board_that_finds_no_room_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TritoneError, match="no room"):
        CancelBoard(tmp_path)
    assert list(tmp_path.iterdir()) == []


# The cancel board


def test_the_board_is_one_for_all_stages(tmp_path: Path) -> None:
    first, second = CancelBoard(tmp_path), CancelBoard(tmp_path)
    assert not first.is_cancelled(2**63 - 1)
    second.post(2**63 - 1)
    assert first.is_cancelled(2**63 - 1)
    assert not first.is_cancelled(2**63 - 3)
    assert [path.name for path in tmp_path.iterdir()] == ["cancelled.board"]


def test_sessions_that_share_a_word_do_not_cancel_each_other(tmp_path: Path) -> None:
    board = CancelBoard(tmp_path)
    board.post(5)
    assert not board.is_cancelled(5 + WORDS)
    board.post(5 + WORDS)
    assert board.is_cancelled(5 + WORDS)
    assert not board.is_cancelled(5)
    board.post(5)
    assert board.is_cancelled(5)


def test_many_sessions(tmp_path: Path) -> None:
    board, chance = CancelBoard(tmp_path), random.Random(3)
    sessions = [chance.getrandbits(63) | 1 for _ in range(200)]
    for session in sessions[::2]:
        board.post(session)
    taken = {session % WORDS: session for session in sessions[::2]}
    assert [board.is_cancelled(session) for session in sessions] == [
        taken.get(session % WORDS) == session for session in sessions
    ]


# Two processes


def _reader(directory: str, requests: Any, answers: Any) -> None:
    views, board = Views(Path(directory)), CancelBoard(Path(directory))
    while (refs := requests.get(timeout=30)) is not None:
        try:
            view = views.of(refs)
            view.check(refs)
            content = [view.block(block).tobytes() for block in refs.blocks]
            view.check(refs)
            view.release(refs)
            board.post(refs.nonce)
            answers.put(content)
        except StaleBlocks as error:
            answers.put(error.message)


def test_two_processes_share_a_pool(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    requests, answers = context.Queue(), context.Queue()
    reader = context.Process(target=_reader, args=(str(tmp_path), requests, answers))
    reader.start()
    try:
        board = CancelBoard(tmp_path)
        for generation in (1, 2):  # the second owner is a restarted one
            pool = make(tmp_path)
            for number in range(3):
                blocks = pool.allocate(3)
                for block in blocks:
                    pool.block(block)[:] = 16 * generation + 4 * number + block
                refs = pool.lend(blocks, 30)
                requests.put(refs)
                content = answers.get(timeout=30)
                assert content == [bytes([16 * generation + 4 * number + block]) * BYTES for block in blocks]
                assert board.is_cancelled(refs.nonce)
                assert pool.collect() == 0
                assert pool.available == 4
            pool.allocate(4)
            requests.put(refs)
            assert "carries tag" in answers.get(timeout=30)
    finally:
        requests.put(None)
        reader.join(30)
        exit_code = reader.exitcode
        if reader.is_alive():
            reader.kill()
    assert exit_code == 0
    # The reader's exit took nothing away.
    made = {".json", ".data", ".tags", ".leases", ".seals", ".condemned", ".owner", ".board"}
    assert {path.suffix for path in tmp_path.iterdir()} == made
