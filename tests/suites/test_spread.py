# SPDX-License-Identifier: Apache-2.0
"""Nothing is lost or done twice on an executor, whatever becomes of its workers."""

import os
import signal
import threading
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context

import pytest

from mla_oracle.errors import InputError
from mla_oracle.suites.spread import Lost, spread


def pool(workers=2):
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"))


def square(n):
    return n * n


def refuse(n):
    raise InputError(f"n is {n}, expected another")


def kill_on(fatal, folder, once, n):
    """n squared; on a number of `fatal` the worker is killed, at the first try only or at every one."""
    if n in fatal:
        try:
            open(os.path.join(folder, str(n)), "x").close()
        except FileExistsError:
            if once:
                return n * n
        os.kill(os.getpid(), signal.SIGKILL)
    return n * n


def all_of(work, count, executor):
    found = []
    spread(work, [(n,) for n in range(count)], executor, lambda i, answer: found.append((i, answer)))
    assert sorted(i for i, _ in found) == list(range(count))  # each once
    return dict(found)


@pytest.mark.parametrize("make", (lambda: ThreadPoolExecutor(3), pool), ids=("threads", "processes"))
def test_an_executor_that_lives_gives_every_answer_and_stays_usable(make):
    with make() as executor:
        assert all_of(square, 30, executor) == {n: n * n for n in range(30)}
        assert executor.submit(square, 3).result() == 9


def test_a_worker_killed_in_the_middle_costs_nothing_where_a_factory_makes_the_pools(tmp_path):
    made = []

    def factory():
        made.append(pool())
        return made[-1]

    assert all_of(partial(kill_on, {7, 25}, str(tmp_path), True), 40, factory) == {n: n * n for n in range(40)}
    assert len(made) > 1


def test_a_pool_that_was_given_is_followed_by_a_process_and_a_warning(tmp_path):
    with pool() as given, pytest.warns(RuntimeWarning, match="the executor broke; what it lost"):
        answers = all_of(partial(kill_on, {3}, str(tmp_path), True), 12, given)
    assert answers == {n: n * n for n in range(12)}


@pytest.mark.parametrize("fatal", ({0}, {2, 19, 20}, {21}))
def test_what_ends_its_worker_each_time_is_lost_and_nothing_else(tmp_path, fatal):
    answers = all_of(partial(kill_on, fatal, str(tmp_path), False), 22, pool)
    assert {n for n, answer in answers.items() if isinstance(answer, Lost)} == fatal
    assert all("BrokenProcessPool" in answers[n].reason for n in fatal)
    assert all(answers[n] == n * n for n in set(range(22)) - fatal)


class Fickle(Executor):
    """Does with the i-th submission what `fates` says: its answer where it says nothing."""

    def __init__(self, fates):
        self.fates, self.count = fates, 0

    def submit(self, fn, /, *args, **kwargs):
        fate = self.fates.get(self.count)
        self.count += 1
        future = Future()
        if fate == "cancel":
            future.cancel()
            future.set_running_or_notify_cancel()
        elif isinstance(fate, Exception):
            future.set_exception(fate)
        elif fate == "refuse":
            raise RuntimeError("cannot schedule new futures after shutdown")
        else:
            future.set_result(fn(*args, **kwargs))
        return future


class KilledWorker(Exception):
    pass


@pytest.mark.parametrize("fate", ("cancel", KilledWorker("at tcp"), OSError("connection lost")), ids=str)
def test_a_future_that_is_cancelled_or_lost_is_submitted_again(fate):
    executor = Fickle({0: fate, 3: fate, 5: fate})  # 5 is the first of those submitted again
    assert all_of(square, 5, executor) == {n: n * n for n in range(5)}
    assert executor.count == 8


def test_an_executor_that_is_lost_at_every_try_gives_the_last_words_and_no_loop():
    executor = Fickle(dict.fromkeys(range(100), KilledWorker("at tcp")))
    answers = all_of(square, 3, executor)
    assert all(answer.reason == "its worker was lost each time: KilledWorker: at tcp" for answer in answers.values())
    assert executor.count == 9


def test_an_executor_that_takes_no_more_is_followed_by_a_process():
    with pytest.warns(RuntimeWarning, match="3 of the cases"):
        assert all_of(square, 5, Fickle({2: "refuse", 3: "refuse", 4: "refuse"})) == {n: n * n for n in range(5)}


def test_an_executor_that_takes_nothing_is_its_callers_mistake():
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        all_of(square, 2, executor)


def test_what_the_work_raises_is_raised_with_its_place_and_the_rest_is_cancelled():
    with pool(1) as executor, pytest.raises(InputError, match="n is 0, expected another") as caught:
        all_of(refuse, 2000, executor)
    assert "in refuse" in caught.value.__notes__[0]


def test_work_that_cannot_be_sent_is_bad_input():
    with pool(1) as executor, pytest.raises(InputError, match="the engine cannot be sent to a worker: "):
        all_of(lambda n: n, 3, executor)
    lock = threading.Lock()
    with pool(1) as executor, pytest.raises(InputError, match=r"cannot pickle '_thread.lock' object"):
        all_of(partial(square, lock), 3, executor)
