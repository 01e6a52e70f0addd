# SPDX-License-Identifier: Apache-2.0
"""Attention as torch computes it, in every 16-bit dtype and in f32, is inside the budget of what it declares.

    sdpa      scaled_dot_product_attention of the dtype                 nothing declared
    mixed     scores and softmax in f32, weights cast to the dtype      nothing declared
    eager     everything in the dtype but the softmax                   preset torch-eager
"""

import numpy as np
import pytest

from mla_oracle import compare, generate
from mla_oracle.oracle import expected

torch = pytest.importorskip("torch", reason="torch is not installed")

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
FAMILIES = ("normal", "peaked", "flat", "position", "onehot", "tailed", "rising")
SHAPES = ((2, 24, 16), (3, 72, 64), (8, 576, 512))
LENGTHS = (1, 2, 3, 5, 17, 64, 65, 300, 577)


def of(array, dtype):
    return torch.from_numpy(np.ascontiguousarray(array.astype(np.float32))).to(DTYPES[dtype])


def attention(how, q, keys, values, scale):
    """q [H, D], keys [n, D], values [n, V] -> out [H, V], lse [H] or None."""
    if how == "sdpa":
        every_head = [x[None, None].expand(1, len(q), -1, -1) for x in (keys, values)]
        out = torch.nn.functional.scaled_dot_product_attention(q[None, :, None], *every_head, scale=scale)
        return out[0, :, 0], None
    scores = (q @ keys.T) * scale if how == "eager" else (q.float() @ keys.float().T) * scale
    weights = torch.softmax(scores.float(), -1).to(values.dtype)
    return weights @ values, torch.logsumexp(scores.float(), -1)


@pytest.mark.parametrize("how", ["sdpa", "mixed", "eager"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", FAMILIES)
def test_torch_is_inside_the_budget(inputs: str, dtype: str, how: str) -> None:
    seed = FAMILIES.index(inputs)
    rng = np.random.default_rng(seed)
    for H, D, V in SHAPES:
        lens = rng.choice(LENGTHS, 3)
        scale = float(D**-0.5 * rng.choice([0.3, 1, 3]))
        case = generate(
            f"paged:heads={H},row={D},value={V},lens={'+'.join(map(str, lens))},scale={scale!r},block=16,"
            f"inputs={inputs},dtype={dtype},seed={seed}"
        )
        out, lse = [], []
        for b, n in enumerate(lens):
            j = np.arange(n)
            rows = of(case.kv_cache[case.block_table[b, j // 16], j % 16], dtype)
            row_out, row_lse = attention(how, of(case.q[b], dtype), rows, rows[:, :V], scale)
            out.append(row_out.float().numpy())
            lse.append(row_lse if row_lse is None else row_lse.numpy())
        actual = {"out": np.stack(out).astype(case.kv_cache.dtype)}
        if how != "sdpa":
            actual["lse"] = np.stack(lse)
        spec = "torch-eager" if how == "eager" else None
        verdict = compare.check(case, actual, expected(case), numerics=spec)
        assert verdict.passed, (seed, case.id, verdict.reason)
