# SPDX-License-Identifier: Apache-2.0
"""decode_paged on the fast tier: what reaches the kernels of its arguments, far pages, small ones, stale scratch."""

import ml_dtypes
import numpy as np
import pytest
from fast_cases import BUILDS, assert_within_bound, fast, make, place, stored
from problems import paged

from mla_oracle import decode_paged, generate
from mla_oracle.cases.placement import sparse_cache
from mla_oracle.fast import isa as isas
from mla_oracle.fast import threads


@pytest.mark.parametrize("precision", ["f32", "f64"])
def test_an_lse_in_base_2_is_that_in_base_e_times_log2_e(precision):
    problem = paged(7, [5, 0, 40], T=2)
    natural = decode_paged(**problem, precision=precision, backend="fast").lse
    base_2 = decode_paged(**problem, precision=precision, backend="fast", lse_base="2").lse
    exact = (natural.astype(np.longdouble) * np.log2(np.e)).astype(natural.dtype)
    assert np.array_equal(base_2, exact) and np.isinf(base_2[1]).all()


@pytest.mark.parametrize("isa", isas.available())
def test_the_build_that_is_named_runs(isa):
    case = make(1, 1, 2, 130, 96, [200], 16)
    case = case.but(kv_cache=case.kv_cache.astype(ml_dtypes.bfloat16), q=case.q.astype(ml_dtypes.bfloat16))
    problem = {
        "q": case.q,
        "kv_cache": case.kv_cache,
        "block_table": case.block_table,
        "seq_lens": case.seq_lens,
        "softmax_scale": case.scale,
        "head_dim_v": case.V,
    }
    found = {name: decode_paged(**problem, isa=name).out.tobytes() for name in isas.available()}
    assert found[isa] == fast(case, isa=f"{isa} bfloat16" if isa == "amx" else isa)[0].tobytes()
    assert len(set(found.values())) > 1 or len(found) == 1


@pytest.mark.parametrize("isa", isas.available())
def test_pages_beyond_32_bits_are_reached(isa):
    """The bytes between pages are far more than 2^32; nothing but the pages in use is backed by memory."""
    recipe = "paged:heads=3,row=64,value=32,lens=7+130,block=16,scale=0.5,dtype=bf16"
    huge, near = generate(f"{recipe},pages=huge"), generate(recipe)
    cache = sparse_cache(huge)
    assert cache.strides[0] * int(huge.block_table[:, 0].max()) > 2**33
    how = {"softmax_scale": 0.5, "head_dim_v": 32, "isa": isa}
    found = decode_paged(huge.q, cache, huge.block_table, huge.seq_lens, **how)
    expected = decode_paged(near.q, near.kv_cache, near.block_table, near.seq_lens, **how)
    assert [x.tobytes() for x in found] == [x.tobytes() for x in expected]


@pytest.mark.parametrize("isa", BUILDS)
@pytest.mark.parametrize("block_size", [1, 8, 15, 17, 31])
def test_pages_that_end_anywhere_within_a_block_of_rows(isa, block_size):
    """Rows as wide as AMX takes them in place, from pages that do not follow one another."""
    assert_within_bound(make(2, 1, 20, 64, 32, [131, 47], block_size), isa=isa)


@pytest.mark.parametrize("isa", BUILDS)
@pytest.mark.parametrize("block_size", [1, 15, 64])
@pytest.mark.parametrize("H", [20, 40, 130])
def test_the_same_bits_wherever_in_a_cache_line_rows_begin(isa, block_size, H):
    """For more than 32 query rows AMX takes 16 of them in place if none splits a line: numpy does not align so.

    Unread slots hold numbers: scores of a row taken by mistake that are not finite would be computed again.
    """
    case = make(1, 1, H, 64, 32, [131], block_size)
    case = stored(case.but(kv_cache=np.nan_to_num(case.kv_cache, nan=3)), isa)
    memory, found = np.empty(case.kv_cache.nbytes + 128, np.uint8), set()
    for byte in (0, 32, 33):
        start = -memory.ctypes.data % 64 + byte
        cache = memory[start : start + case.kv_cache.nbytes].view(case.kv_cache.dtype).reshape(case.kv_cache.shape)
        cache[...] = case.kv_cache
        out, lse = fast(case.but(kv_cache=cache), isa=isa.partition(" ")[0])
        found.add(out.tobytes() + lse.tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("isa", BUILDS)
@pytest.mark.parametrize("H", [16, 64, 128])
def test_a_requests_nan_is_not_in_the_next_ones_scratch(isa, H):
    case = make(3, 1, H, 64, 32, [140, 5, 97], 16)
    for position in range(140):
        place(case, 0, position, np.full(64, np.nan, np.float32))
    out, lse = fast(case, isa=isa, threads=1)
    assert np.isnan(out[0]).all() and np.isfinite(out[1:]).all() and np.isfinite(lse[1:]).all()
    wide = stored(case, isa)
    for b in (1, 2):
        one = slice(b, b + 1)
        alone = wide.but(q=wide.q[one], block_table=wide.block_table[one], seq_lens=wide.seq_lens[one])
        assert fast(alone, isa=isa, threads=1)[0].tobytes() == out[b].tobytes()


@pytest.mark.parametrize("asked", [1, 3])
def test_no_more_threads_than_asked_for_take_part(asked, monkeypatch):
    used = []
    monkeypatch.setattr(threads, "run", lambda work, n: (used.append(n), work()))
    decode_paged(**paged(7, [9] * 5), backend="fast", threads=asked)
    assert used == [asked]
