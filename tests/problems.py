# SPDX-License-Identifier: Apache-2.0
"""Small random problems, as the keyword arguments of the form they are for; drawn by numpy, not by the package.

problem = paged(7, [5, 0, 12], T=2)
out, lse = decode_paged(**problem)
rows = rows_of(problem, 2)          # [12, D] f64: the tokens of request 2 in order
"""

import ml_dtypes
import numpy as np

from mla_oracle import Geometry

DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f64": np.float64}


def paged(seed, lens, *, T=None, H=2, D=6, V=4, block=4, dtype="f32", amplitude=1.0, unread=np.nan, scale=0.5):
    """Arguments of decode_paged; pages are shuffled, and what no request reads holds `unread`."""
    rng = np.random.default_rng(seed)
    used = [-(-n // block) for n in lens]
    ids = rng.permutation(sum(used) + 2)
    cache = np.full((len(ids), block, D), unread, DTYPES[dtype])
    table = np.full((len(lens), max([*used, 1])), 2**31 - 1, np.int32)
    for b, n in enumerate(lens):
        table[b, : used[b]], ids = ids[: used[b]], ids[used[b] :]
        for j in range(n):
            cache[table[b, j // block], j % block] = amplitude * rng.standard_normal(D)
    shape = (len(lens), H, D) if T is None else (len(lens), T, H, D)
    return {
        "q": (amplitude * rng.standard_normal(shape)).astype(DTYPES[dtype]),
        "kv_cache": cache,
        "block_table": table,
        "seq_lens": np.array(lens, np.int32),
        "softmax_scale": scale,
        "head_dim_v": V,
    }


def rows_of(problem, b):
    """The latent rows [n, D] of request b, in f64."""
    j = np.arange(problem["seq_lens"][b])
    block = problem["kv_cache"].shape[1]
    return problem["kv_cache"][problem["block_table"][b, j // block], j % block].astype(np.float64)


def queries_of(problem):
    """q [B, T, H, D] in f64."""
    q = problem["q"].astype(np.float64)
    return q if q.ndim == 4 else q[:, None]


def visible(problem, b, t, causal=True):
    """How many tokens query t of request b sees."""
    n, T = int(problem["seq_lens"][b]), queries_of(problem).shape[1]
    return max(0, n - T + t + 1) if causal else n


def dense(seed, *, t_q=2, t_kv=5, H=2, P=3, R=2, V=4, L=6, dtype="f32"):
    """Arguments of attend_naive and attend_absorbed."""
    rng = np.random.default_rng(seed)
    shapes = {
        "q_nope": (t_q, H, P),
        "q_pe": (t_q, H, R),
        "c_kv": (t_kv, L),
        "k_pe": (t_kv, R),
        "w_uk": (H, P, L),
        "w_uv": (H, V, L),
    }
    geometry = Geometry(num_heads=H, qk_nope_head_dim=P, qk_rope_head_dim=R, v_head_dim=V, kv_lora_rank=L)
    return {"geometry": geometry} | {
        name: rng.standard_normal(shape).astype(DTYPES[dtype]) for name, shape in shapes.items()
    }


def same(a, b):
    """Equal bits, where every NaN is like any other."""
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(np.all((a == b) & (np.signbit(a) == np.signbit(b)) | np.isnan(a) & np.isnan(b)))
