# SPDX-License-Identifier: Apache-2.0
"""Work over an executor so that nothing is lost or done twice, whatever becomes of its workers.

    spread(work, [(a, b), ...], executor, finish)       # finish(i, what work(a, b) returns, or a Lost)

All of it is submitted together. What a dying worker takes with it is submitted again, one at a time: what is lost when
it is alone, ALONE times, ends its workers itself. An executor that breaks as a whole (a pool of processes does when one
of them dies) is replaced by a new one of its factory; where it was given as it is, by one process of our own.
"""

from __future__ import annotations

import pickle
import traceback
import uuid
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ..errors import InputError

ALONE = 2  # tries
SUSPECTS = 16  # of the work that a broken executor lost, the first so many may have broken it


@dataclass(frozen=True)
class Lost:
    """Work that has no answer, since it ended every worker it was given to."""

    reason: str


def spread(
    work: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    executor: Executor | Callable[[], Executor],
    finish: Callable[[int, Any], None],
) -> None:
    """Call `finish` once for every call, in the order in which they end.

    Raises what `work` raises, and InputError for work that cannot be sent to another process.
    """
    with _Place(executor) as place:
        together, alone = list(range(len(calls))), list[int]()
        while together:
            lost = _together(place, work, calls, together, finish)
            if place.broken:
                place.renew(len(lost))
                alone += lost[:SUSPECTS]
                together = lost[SUSPECTS:]
            else:
                alone += lost
                together = []
        for i in sorted(alone):
            finish(i, _alone(place, work, calls[i]))


def _together(
    place: _Place,
    work: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    wanted: list[int],
    finish: Callable[[int, Any], None],
) -> list[int]:
    """Those of `wanted` that were lost."""
    running: dict[Future[Any], int] = {}
    lost = []
    try:
        for i in wanted:
            try:
                running[place.submit(work, calls[i])] = i
            except Exception as error:
                if not running and not isinstance(error, BrokenExecutor):
                    raise
                place.broken = True
                lost.append(i)
        for future in as_completed(list(running)):
            i = running.pop(future)
            try:
                answer = future.result()
            except (Exception, CancelledError) as error:
                if _unsendable(error):
                    raise InputError(f"the engine cannot be sent to a worker: {_words(error)}") from error
                place.broken |= isinstance(error, BrokenExecutor)
                lost.append(i)
            else:
                finish(i, _opened(answer))
    except BaseException:
        for future in running:
            future.cancel()
        raise
    return sorted(lost)


def _alone(place: _Place, work: Callable[..., Any], call: tuple[Any, ...]) -> Any:
    reason = ""
    for _ in range(ALONE):
        try:
            future = place.submit(work, call)
        except Exception as error:
            reason = _words(error)
            place.renew(1)
            continue
        try:
            answer = future.result()
        except (Exception, CancelledError) as error:
            reason = _words(error)
            if isinstance(error, BrokenExecutor):
                place.renew(1)
        except BaseException:
            future.cancel()
            raise
        else:
            return _opened(answer)
    return Lost(f"its worker was lost each time: {reason}"[:400])


class _Place:
    """An executor, and what follows it when it breaks."""

    def __init__(self, executor: Executor | Callable[[], Executor]) -> None:
        self.given = hasattr(executor, "submit")
        self.make: Callable[[], Executor] = one_process if self.given else executor  # type: ignore[assignment]
        self.executor: Any = executor if self.given else self.make()
        self.broken = False

    def submit(self, work: Callable[..., Any], call: tuple[Any, ...]) -> Future[Any]:
        # Dask computes calls with equal arguments once, so none may equal another.
        future: Future[Any] = self.executor.submit(_closed, work, call, uuid.uuid4().hex)
        return future

    def renew(self, lost: int) -> None:
        if self.given:
            words = f"the executor broke; what it lost ({lost} of the cases) runs one at a time in a new process"
            warnings.warn(words, RuntimeWarning, stacklevel=4)
        else:
            self.executor.shutdown(wait=False, cancel_futures=True)
        self.executor, self.given, self.broken = self.make(), False, False

    def __enter__(self) -> _Place:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self.given:
            self.executor.shutdown(wait=kind is None, cancel_futures=True)


def one_process() -> Executor:
    from multiprocessing import get_context

    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def _closed(work: Callable[..., Any], call: tuple[Any, ...], key: str) -> tuple[Any, Exception | None]:
    """What `work` returns or raises, as a value: what the future raises is then the executor's."""
    try:
        return work(*call), None
    except Exception as error:
        error.add_note(f"in a worker:\n{traceback.format_exc()}")
        return None, error


def _opened(answer: tuple[Any, Exception | None]) -> Any:
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def _unsendable(error: BaseException) -> bool:
    if isinstance(error, pickle.PicklingError):
        return True
    return isinstance(error, (AttributeError, TypeError)) and any(w in str(error) for w in ("pickle", "local object"))


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
