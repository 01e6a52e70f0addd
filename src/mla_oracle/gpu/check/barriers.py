# SPDX-License-Identifier: Apache-2.0
"""What threads and copies of sm_90a wait for each other by, on the machine and on the interpreter: mbarriers, copies in
bulk, named barriers; elect.sync and setmaxnreg besides. A probe is a kernel of cuda/check/barriers.cu.

A part by itself and the last one: a machine that differs may wait for ever here, until its budget ends it.
"""

from __future__ import annotations

from collections.abc import Iterator

from mla_oracle.gpu import paged_wgmma
from mla_oracle.gpu.check import instructions
from mla_oracle.gpu.check.part import Bench
from mla_oracle.gpu.check.report import Finding
from mla_oracle.gpu.check.table import Instruction

FILE = "check/barriers.cu"
MBARRIERS = (
    "mbarrier_arrive_b64 mbarrier_arrive_noComplete_b64 mbarrier_test_wait_parity_b64 mbarrier_expect_tx_b64 "
    "mbarrier_arrive_expect_tx_b64 mbarrier_try_wait_b64 mbarrier_try_wait_parity_b64"
)
COPIES = (
    "cp_async_mbarrier_arrive_noinc_b64 cp_async_mbarrier_arrive_b64 cp_async_bulk_shared_cluster_global "
    "cp_async_bulk_global_shared_cta cp_async_bulk_global_shared_cta_wait_read"
)
NAMED = "bar_sync bar_arrive bar_red_popc_u32 bar_red_and_pred bar_red_or_pred"

INSTRUCTIONS = [  # those that wait for others last
    Instruction("elect_sync", file=FILE),
    *(Instruction(name, file=FILE) for name in MBARRIERS.split()),
    *(Instruction(name, words=4, threads=32, file=FILE) for name in COPIES.split()),
    *(Instruction(name, file=FILE) for name in NAMED.split()),
    Instruction("setmaxnreg_sync_aligned_u32", threads=512, file=FILE),
]


def findings(bench: Bench) -> Iterator[Finding]:
    from mla_oracle.ptx import Interpreter

    machine = bench.machine
    if reason := paged_wgmma.not_for(machine.arch):
        yield {"name": "mbarriers and their like", "ok": None, "reason": f"not applicable, {reason}"}
        return
    n = instructions.FEW if bench.small else instructions.MANY
    yield from instructions.conformance(machine, Interpreter(machine.arch), n, INSTRUCTIONS)
