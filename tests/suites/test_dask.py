# SPDX-License-Identifier: Apache-2.0
"""A suite on Dask's executor, on a cluster of several processes: workers die in the middle, no case is lost."""

import contextlib
import os
import signal
from functools import partial

import numpy as np
import pytest

from mla_oracle.cases.recipes import parse_id
from mla_oracle.mutants import find
from mla_oracle.oracle import expected
from mla_oracle.suites import run_suite

distributed = pytest.importorskip("distributed", reason="needs the extra dask")
dask = pytest.importorskip("dask")

IDS = [
    str(parse_id(f"paged:heads=2,row=12,value=8,scale=0.3,lens={5 + seed}+0+3,tokens=2,block=4,seed={seed}"))
    for seed in range(16)
]
KILLS_ONCE, KILLS, WRONG = IDS[4], IDS[9], IDS[12]


def engine(folder, kills, case):
    """Right, but wrong on one case; its worker is killed at the first try of another, and at every one of `kills`."""
    if case.id == KILLS_ONCE:
        with contextlib.suppress(FileExistsError):
            open(os.path.join(folder, "killed"), "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
    if case.id in kills:
        os.kill(os.getpid(), signal.SIGKILL)
    results = find("causal.none").run(case) if case.id == WRONG else expected(case, precision="f64")
    return {name: array.astype(np.float32) for name, array in results.items()}


@pytest.fixture
def client(request, tmp_path):
    """Three workers; a worker that dies is started anew. The parameter: how many deaths Dask itself forgives a task."""
    settings = {
        "distributed.scheduler.allowed-failures": request.param,
        "distributed.comm.timeouts.connect": "120s",
        "temporary-directory": str(tmp_path / "dask"),
    }
    with (
        dask.config.set(settings),
        distributed.LocalCluster(
            n_workers=3, threads_per_worker=1, dashboard_address=None, silence_logs=50, memory_limit=0
        ) as cluster,
        distributed.Client(cluster, timeout="120s") as client,
    ):
        yield client


@pytest.mark.parametrize("client, kills", ((3, ()), (0, (KILLS,))), indirect=["client"], ids=("dask's", "ours"))
def test_a_worker_killed_in_the_middle_loses_nothing(client, kills, tmp_path):
    before = set(client.run(os.getpid).values())
    told = []
    report = run_suite(
        IDS,
        partial(engine, str(tmp_path), kills),
        client.get_executor(),
        progress=lambda outcome, done, total: told.append(outcome.case),
    )
    assert (tmp_path / "killed").exists()
    assert before - set(client.run(os.getpid, on_error="ignore").values())  # a worker is not there any more
    assert sorted(told) == sorted(IDS)
    assert [o.case for o in report.outcomes] == IDS
    verdicts = {o.case: o.verdict for o in report.outcomes if o.verdict != "pass"}
    assert verdicts == {WRONG: "fail"} | dict.fromkeys(kills, "crash")
    assert all("KilledWorker" in o.reason for o in report.outcomes if o.case in kills)
    assert report.summary.startswith("suspected over all cases: no causal bound")
