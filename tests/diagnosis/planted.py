# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels with their text changed, interpreted: one deterministic wrong function each.

    out, lse = paged(generate(PAGED), [("paged.cu", old, new)], kernel="scalar")

A change is (file, old, new), where `old` stands once in the flattened source, or (file, old, new, which), its which-th
occurrence. The interpreter does not look for races or junk here (tests/ptx does): what is asked is what was computed.
"""

import numpy as np

from mla_oracle import backends, oracle
from mla_oracle.gpu import cache, forms, sources
from mla_oracle.ptx import Interpreter

SPLIT_KEYS = 64


class Planted(Interpreter):
    """Kernels of a changed text."""

    def __init__(self, arch, changes=()):
        super().__init__(arch, checks=False)
        self.changes = changes
        for file in {change[0] for change in changes}:
            self.text(file)

    def text(self, file):
        text = sources.flatten(file)
        for name, old, new, *which in self.changes:
            if name != file:
                continue
            parts = text.split(old)
            assert len(parts) == 2 if not which else len(parts) > which[0] + 1, f"{old!r}: {len(parts) - 1} times"
            at = (which or [0])[0] + 1
            text = old.join(parts[:at]) + new + old.join(parts[at:])
        return text

    def kernel(self, file, name, **defines):
        options = [f"-D{macro}={value}" for macro, value in defines.items()]
        return self.load(cache.compile(self.text(file), self.arch, name=file, options=options).ptx, name, file=file)


def paged(case, changes=(), kernel="scalar", arch="sm_80"):
    """{"out", "lse"} of a paged case as the changed kernel computes them, in f32."""
    q = case.q if case.q.ndim == 4 else case.q[:, None]
    out, lse = np.empty((*q.shape[:3], case.head_dim_v), np.float32), np.empty(q.shape[:3], np.float32)
    unit = 1.0 if case.lse_base == "e" else float(np.log2(np.e))
    inputs = (q, case.kv_cache, case.block_table, case.seq_lens, case.softmax_scale, case.causal, unit, case.empty_lse)
    forms.fill(forms.decode_paged, Planted(arch, changes), *inputs, outputs=(out, lse), split_keys=SPLIT_KEYS,
               kernel=kernel)
    return {"out": out.reshape(*case.q.shape[:-1], -1), "lse": lse.reshape(case.q.shape[:-1])}


def other(case, changes, monkeypatch):
    """The results of a case of another kind."""
    machine = Planted("sm_80", changes)
    monkeypatch.setattr(backends, "_machine", lambda backend, threads: machine)
    return oracle.expected(case, backend="ptx", precision="f32")
