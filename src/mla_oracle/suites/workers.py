# SPDX-License-Identifier: Apache-2.0
"""A pool of processes that run commands, and that end with the process that made it, however that ends.

A command runs in a session of its own, where no Ctrl-C reaches it, and the worker of a pool does not notice that its
parent is gone. So each worker has a thread that waits for SIGTERM or for the end of the parent, and then ends the
command and the worker.
"""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import wait

from .engines import abandon


def workers(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_watch)


def stop() -> None:
    """End the workers of every pool of this process, and what they run."""
    for child in active_children():
        child.terminate()
    for child in active_children():
        child.join()


def _watch() -> None:
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
