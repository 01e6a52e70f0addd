# SPDX-License-Identifier: Apache-2.0
"""Threads for kernels that release the GIL: they persist, and wait; a fork starts anew.

`count()` is how many a call uses: its argument, else what `set_threads` set, else the CPUs it may use.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread

from mla_oracle.errors import InputError

_MOST = 1024
_idle: list[SimpleQueue[_Call]] = []
_default: int | None = None


def _checked(threads: int) -> int:
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= _MOST:
        raise InputError(f"threads is {threads!r}, expected 1 to {_MOST}")
    return threads


def set_threads(threads: int | None) -> None:
    """How many threads a call uses if it does not say; None: the CPUs this process may use."""
    global _default
    _default = None if threads is None else _checked(threads)


def count(threads: int | None = None) -> int:
    """How many threads a call with this argument uses."""
    if threads is not None:
        return _checked(threads)
    if _default is not None:
        return _default
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(work: Callable[[], None], threads: int) -> None:
    """Call `work` on `threads` threads at once, the caller's included; it shares out its own parts.

    Returns when all calls have; raises the first error. A call that no thread has begun by the time the caller's own
    ends, or that no thread could be started for, is dropped: there is nothing left for it to do.
    """
    calls = [_Call(work) for _ in range(threads - 1)]
    try:
        for call in calls:
            if (worker := _worker()) is None:
                break
            worker.put(call)
        work()
    finally:
        begun = [call for call in calls if not call.taken.acquire(blocking=False)]
        for call in begun:
            call.done.acquire()
    for call in begun:
        if call.error is not None:
            raise call.error


class _Call:
    """A thread's share of a `run`: who takes it first does it, or, the caller, drops it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.taken, self.done = Lock(), Lock()
        self.done.acquire()
        self.error: BaseException | None = None


def _worker() -> SimpleQueue[_Call] | None:
    """Where an idle thread waits for its next call; a new thread if none is idle, None if it cannot be had."""
    try:
        return _idle.pop()
    except IndexError:
        calls: SimpleQueue[_Call] = SimpleQueue()
        try:
            Thread(target=_serve, args=(calls,), name="mla-oracle", daemon=True).start()
        except RuntimeError:
            return None
        return calls


def _serve(calls: SimpleQueue[_Call]) -> None:
    while True:
        call = calls.get()
        if call.taken.acquire(blocking=False):
            try:
                call.work()
            except BaseException as error:
                call.error = error
        _idle.append(calls)
        call.done.release()
        del call  # and with it the arrays it works on


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # the threads stayed in the parent
