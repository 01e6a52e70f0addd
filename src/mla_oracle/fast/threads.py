# SPDX-License-Identifier: Apache-2.0
"""Threads for kernels that release the GIL: one persistent pool per process, remade after a fork.

`count()` is how many a call uses: its argument, else what `set_threads` set, else the CPUs it may use.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from mla_oracle.errors import InputError

_MOST = 1024
_lock = Lock()
_pool: ThreadPoolExecutor | None = None
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

    Returns when all calls have; raises the first error. A call that no thread has begun by the time the
    caller's own ends is dropped: there is nothing left for it to do.
    """
    if threads == 1:
        work()
        return
    futures = [_executor().submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        begun = [future for future in futures if not future.cancel()]
        for future in begun:
            future.exception()
    for future in begun:
        future.result()


def _executor() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(_MOST, thread_name_prefix="mla-oracle")
        return _pool


def _after_fork() -> None:
    # The threads stayed in the parent, and the lock may have been held there.
    global _pool, _lock
    _pool, _lock = None, Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
