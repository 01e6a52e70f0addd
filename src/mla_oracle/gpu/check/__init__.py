# SPDX-License-Identifier: Apache-2.0
"""The one command for a machine with a GPU: everything compiled, checked and timed, in minutes.

    python -m mla_oracle.gpu.check --report FILE [--machine cuda|ptx] [--seconds N] [--parts compile,trials,...]

    __main__      the command: its parts, their shares of the time, exit codes
    supervisor    a part in a process of its own, with a budget; what it found so far is kept whatever becomes of it
    report        the JSON file and the table
    part          what runs in such a process: one of the modules below, each with `findings(bench)`
      compilation, trials, instructions (accumulation), timing, peers,
      products (wgmma, accumulation) and barriers, both for sm_90a alone

A finding is a dict: "name", "ok" (True, False: something differs, None: nothing was to be judged), and its figures.
"""
