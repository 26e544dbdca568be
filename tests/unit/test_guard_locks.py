"""Locks in shared memory whose holder died: the guard takes them over, for a whole server would end with one stage."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from tritone.supervisor.guard import build_guard

# A child process ends with the mutex in its hands; what each call that takes the mutex then gives, and the next lock.
SCRIPT = """
import ctypes, mmap, os, sys, time

libc = ctypes.CDLL(None)
memory = mmap.mmap(-1, 4096)
mutex, condition, attributes, until = (ctypes.byref(ctypes.c_char.from_buffer(memory, at)) for at in (0, 512, 1024, 1536))
libc.pthread_mutexattr_init(attributes)
libc.pthread_mutexattr_setpshared(attributes, 1)
libc.pthread_mutexattr_setrobust(attributes, 1)
libc.pthread_mutex_init(mutex, attributes)
libc.pthread_condattr_init(attributes)
libc.pthread_condattr_setpshared(attributes, 1)
libc.pthread_cond_init(condition, attributes)
(ctypes.c_long * 2).from_buffer(memory, 1536)[:] = (int(time.time()) + 30, 0)

call = sys.argv[1]
waits = "cond" in call
if waits:
    libc.pthread_mutex_lock(mutex)
child = os.fork()
if child == 0:
    libc.pthread_mutex_lock(mutex)
    libc.pthread_cond_signal(condition)
    os._exit(0)
if not waits:
    os.waitpid(child, 0)
arguments = ([condition] if waits else []) + [mutex] + ([until] if "timed" in call else [])
result = getattr(libc, call)(*arguments)
print(result, libc.pthread_mutex_unlock(mutex), libc.pthread_mutex_trylock(mutex))
"""


def results(call: str, preload: str) -> list[int]:
    run = [sys.executable, "-c", SCRIPT, call]
    done = subprocess.run(run, env=os.environ | {"LD_PRELOAD": preload}, capture_output=True, text=True, timeout=60, check=True)
    return [int(word) for word in done.stdout.split()]


@pytest.mark.parametrize(
    "call",
    ["pthread_mutex_lock", "pthread_mutex_trylock", "pthread_mutex_timedlock", "pthread_cond_wait", "pthread_cond_timedwait"],
)
def test_a_lock_whose_holder_died_is_taken_over(call: str) -> None:
    # Without the guard it is as POSIX says: the first is told, and a mutex given back as it is stays unusable.
    assert results(call, "") == [errno.EOWNERDEAD, 0, errno.ENOTRECOVERABLE]
    assert results(call, str(build_guard())) == [0, 0, 0]
