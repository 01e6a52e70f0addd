# SPDX-License-Identifier: Apache-2.0
"""Paged cases for the fast tier, the strict f64 truth beside them, and the bound the fast tier publishes.

`make` builds a Case; `strict64` and `fast` run it; `bound` is the docstring of fast/paged.py in numpy.
BUILDS are what there is to test: every instruction set, and amx, which is for bf16 caches, with either query
("amx float32", "amx bfloat16"). `fast` and `assert_within_bound` store a case as its build wants it.
"""

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from mla_oracle.fast import isa as isas
from mla_oracle.fast import paged
from mla_oracle.reference import _paged

STORED = {"float32": 0, "float16": 1, "bfloat16": 2, "float64": 3}
BUILDS = [
    build
    for isa in isas.available()
    for build in (["amx float32", "amx bfloat16"] if isa == "amx" else [isa])
]


@dataclass(frozen=True)
class Case:
    q: np.ndarray  # [B, T, H, D]
    kv_cache: np.ndarray  # [num_blocks, block_size, D]
    block_table: np.ndarray  # [B, max_blocks] i32
    seq_lens: np.ndarray  # [B] i32
    V: int
    scale: float = 0.0625
    causal: bool = True
    empty_lse: float = -np.inf

    def keys(self, b):
        """The rows of request b in order, f64 [seq_len, D]."""
        block_size = self.kv_cache.shape[1]
        slots = np.arange(self.seq_lens[b])
        return self.kv_cache[self.block_table[b, slots // block_size], slots % block_size].astype(np.float64)

    def visible(self, b, t):
        n = int(self.seq_lens[b])
        return max(0, n - self.q.shape[1] + t + 1) if self.causal else n

    def but(self, **changes):
        return replace(self, **changes)


def make(B, T, H, D, V, lens, block_size, seed=0, q_size=1.0, kv_size=1.0, **conventions):
    """Normal inputs, shuffled pages, NaN in every slot that no row may read."""
    rng = np.random.default_rng(seed)
    lens = np.asarray(lens, np.int32)
    blocks = max(1, -(-int(lens.max(initial=0)) // block_size))
    pages = rng.permutation(B * blocks + 3)[: B * blocks].reshape(B, blocks).astype(np.int32)
    kv = np.full((B * blocks + 3, block_size, D), np.nan, np.float32)
    for b in range(B):
        slots = np.arange(lens[b])
        kv[pages[b, slots // block_size], slots % block_size] = kv_size * rng.standard_normal((lens[b], D))
        pages[b, -(-lens[b] // block_size) :] = 2147480000
    q = (q_size * rng.standard_normal((B, T, H, D))).astype(np.float32)
    return Case(q, kv, pages, lens, V, **conventions)


def place(case, b, position, row):
    """Write `row` at a position of request b."""
    block_size = case.kv_cache.shape[1]
    case.kv_cache[case.block_table[b, position // block_size], position % block_size] = row


def stored(case, build):
    """`case` with what `build` stores: bf16 rows and its query for amx, no change else."""
    query = build.partition(" ")[2]
    if not query:
        return case
    return case.but(q=case.q.astype(query), kv_cache=case.kv_cache.astype(ml_dtypes.bfloat16))


def _run(decode, case, dtype, **options):
    B, T, H, _ = case.q.shape
    out, lse = np.full((B, T, H, case.V), 77, dtype), np.full((B, T, H), 77, dtype)
    decode(
        case.q.view(np.uint8),
        STORED[case.q.dtype.name],
        case.kv_cache.view(np.uint8),
        STORED[case.kv_cache.dtype.name],
        case.block_table,
        case.seq_lens,
        case.scale,
        case.causal,
        1.0,
        case.empty_lse,
        out,
        lse,
        **options,
    )
    return out, lse


def strict64(case):
    return _run(_paged.decode, case, np.float64)


def fast(case, dtype=np.float32, isa=None, **options):
    return _run(
        paged.decode, stored(case, isa or ""), dtype, isa=isa and isa.partition(" ")[0], **options
    )


def bound(case, dtype, tiles=False):
    """(out [B, T, H, V], lse [B, T, H]): what fast may miss strict f64 by; `tiles`: on amx."""
    B, T, H, D = case.q.shape
    eps, tiny = float(np.finfo(dtype).eps), float(np.finfo(dtype).smallest_normal)
    out, lse = np.zeros((B, T, H, case.V)), np.zeros((B, T, H))
    for b in range(B):
        rows = case.keys(b)
        finite = np.isfinite(rows).all(1)
        rows = np.where(finite[:, None], rows, 0)
        for t in range(T):
            n = case.visible(b, t)
            if not finite[:n].any():
                continue
            q, k = np.nan_to_num(case.q[b, t].astype(np.float64)), rows[:n]
            score = np.where(finite[:n], q @ k.T, -np.inf) * case.scale
            size = (np.abs(q) @ np.abs(k).T).max(1) * abs(case.scale)
            top = score.max(1, keepdims=True)
            p = np.exp(score - top)
            relative = eps * ((D + 6) * size + 2 * n + 32)
            if tiles:
                flushed = D * tiny * (np.abs(q).max(1) + 2 * np.abs(k).max() + 8) * abs(case.scale)
                relative = relative + 2 * flushed
            mean = p @ np.abs(k[:, : case.V]) / p.sum(1, keepdims=True)
            largest = np.abs(k[:, : case.V]).max()
            out[b, t] = relative[:, None] * mean + n * tiny * largest
            if tiles:
                out[b, t] += 2.0**-17 * mean + n * tiny * (largest + 6)
            lse[b, t] = relative + eps * (np.abs(top[:, 0]) + np.log(n))
    return out, lse


def assert_within_bound(case, dtype=np.float32, isa=None, **options):
    case = stored(case, isa or "")
    expected_out, expected_lse = strict64(case)
    out, lse = fast(case, dtype, isa, **options)
    allowed_out, allowed_lse = bound(case, dtype, "amx" in (isa or "") and dtype == np.float32)
    for name, got, expected, allowed in [
        ("out", out, expected_out, allowed_out),
        ("lse", lse, expected_lse, allowed_lse),
    ]:
        with np.errstate(invalid="ignore"):
            good = np.abs(got - expected) <= allowed
        good |= (got == expected) | (np.isnan(got) & np.isnan(expected))
        assert good.all(), (name, np.argwhere(~good)[0], got[~good][0], expected[~good][0], allowed[~good][0])
    return out, lse
