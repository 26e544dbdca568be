"""Faults that end a process: which they are, and what is left of it."""

from __future__ import annotations

import errno
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from tritone.fatal import EXIT_STATUS, is_out_of_memory
from tritone.processes import ProcessRecord, read_records
from tritone.supervisor.installation import PROJECT

HUGE = 1 << 60


def raised(call: object) -> BaseException:
    with pytest.raises(Exception) as caught:
        call()  # type: ignore[operator]
    return caught.value


def test_memory_that_cannot_be_had_is_recognised() -> None:
    assert is_out_of_memory(raised(lambda: bytearray(HUGE)))
    assert is_out_of_memory(raised(lambda: np.empty(HUGE, np.uint8)))
    assert is_out_of_memory(raised(lambda: torch.empty(HUGE, dtype=torch.uint8)))
    assert is_out_of_memory(OSError(errno.ENOMEM, "no memory"))


def test_other_faults_are_not() -> None:
    assert not is_out_of_memory(raised(lambda: torch.ones(2) @ torch.ones(3)))
    assert not is_out_of_memory(OSError(errno.ENOENT, "no file"))
    assert not is_out_of_memory(ValueError("Cannot allocate memory"))


@pytest.mark.parametrize("way", ["loop", "request"])
def test_a_process_that_runs_out_of_memory_says_so_and_ends(way: str, tmp_path: Path) -> None:
    """With a real limit on its address space; a thread that computes does not hold it up."""
    code = f"""
        import os, resource, threading, time
        from dataclasses import replace
        from pathlib import Path
        from tritone.fatal import before_end, end_if_out_of_memory
        from tritone.processes import ProcessRecord
        from tritone.stages.loop import EngineLoop

        record = ProcessRecord("decode", os.getpid())
        before_end.append(lambda reason: replace(record, reason=reason).write(Path({str(tmp_path)!r})))
        threading.Thread(target=time.sleep, args=(60,)).start()
        held = []
        class Driven:
            def step(self):
                held.append(bytearray(64 << 20))
                return True
            def tend(self, now):
                return True
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        if {way!r} == "loop":
            EngineLoop(Driven(), "decode")
            time.sleep(60)
        try:
            while True:
                Driven().step()
        except Exception as error:
            end_if_out_of_memory("talker", error)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    ended = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == EXIT_STATUS, ended.stderr
    where = {"loop": "decode: the engine's loop", "request": "talker"}[way]
    assert f"{where}: out of memory" in ended.stderr
    (left,) = read_records(tmp_path)
    assert left.reason.startswith(f"{where}: out of memory")
    assert isinstance(left, ProcessRecord)
