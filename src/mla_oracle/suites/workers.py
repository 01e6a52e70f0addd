# SPDX-License-Identifier: Apache-2.0
"""A pool of processes that run commands, and that end with the process that made it, however that ends.

A command runs in a session of its own, where no Ctrl-C reaches it, and the worker of a pool does not notice that its
parent is gone. So each worker has a thread that waits for SIGTERM or for the end of the parent, and then ends the
command and the worker. The workers share the cores: each one's BLAS has its part of them, the commands' as they like.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import wait

from .engines import abandon

THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


@contextlib.contextmanager
def workers(jobs: int) -> Iterator[Callable[[], ProcessPoolExecutor]]:
    """What makes pools of `jobs` workers; on an error they end, and what they run."""
    ours = {} if any(name in os.environ for name in THREADS) else dict.fromkeys(THREADS, str(max(1, _cores() // jobs)))
    os.environ.update(ours)  # read where numpy is loaded, so here by the workers alone
    try:
        yield partial(
            ProcessPoolExecutor,
            jobs,
            mp_context=get_context("spawn"),
            initializer=_begin,
            initargs=(tuple(ours),),
        )
    except BaseException:
        _stop()
        raise
    finally:
        for name in ours:
            del os.environ[name]


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _stop() -> None:
    for child in active_children():
        child.terminate()
    for child in active_children():
        child.join()


def _begin(ours: tuple[str, ...]) -> None:
    for name in ours:
        del os.environ[name]  # numpy has been loaded with the package
    asked, ask = os.pipe()
    os.set_blocking(ask, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to answer
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(ask)
    threading.Thread(target=_end, args=(asked,), daemon=True).start()


def _end(asked: int) -> None:
    parent = parent_process()
    wait([asked] if parent is None else [asked, parent.sentinel])
    abandon()
    os._exit(128 + signal.SIGTERM)
