# SPDX-License-Identifier: Apache-2.0
"""Suites: cases that together see every applicable mutant, and engines run over them.

    suite = choose(probes("geometry=glm-5.2,dtype=bf16"))
    report = run_suite(suite.cases, engine)                 # engine(case) -> {"out": ..., "lse": ...}
    print(report.table())

probes.py lists the cases to choose from, choose.py chooses, engines.py and run.py run, outcome.py, junit.py and
page.py report, command.py is the command line.
"""

from .choose import Suite, choose
from .engines import Command, EngineCrash, EngineHang
from .outcome import Outcome, Report
from .probes import probes
from .run import run_suite

__all__ = ["Command", "EngineCrash", "EngineHang", "Outcome", "Report", "Suite", "choose", "probes", "run_suite"]
