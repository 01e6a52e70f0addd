# SPDX-License-Identifier: Apache-2.0
"""The tensor-core paged kernel against strict f64, within the bound of mla_oracle.gpu.paged, interpreted and on a GPU.

Problems are small, so that every tile fits: each of the architectures is given one.
"""

import kernel_cases
import ml_dtypes
import numpy as np
import pytest
from fast_cases import make, place
from kernel_cases import Planted, assert_far, assert_right, bits, decode, stored

from mla_oracle.errors import UnsupportedError
from mla_oracle.gpu import forms, layout, paged, paged_mma
from mla_oracle.gpu.machine import Buffer
from mla_oracle.ptx import Fault

BF16, F16 = ml_dtypes.bfloat16, np.float16


@pytest.fixture(params=[*kernel_cases.TILE_OF, "cuda"])
def machine(request, monkeypatch):
    yield from kernel_cases.tiled(request.param, monkeypatch)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("edges", [(1, 2, 31, 32, 33), (63, 64, 65), (127, 128, 129)], ids=str)
def test_lengths_around_every_edge_of_a_tile_and_a_split(machine, edges, dtype):
    case = stored(make(len(edges), 1, 2, 48, 32, edges, 16), dtype)
    assert_right(machine, case, kernel="mma", split_keys=96)


@pytest.mark.parametrize("H", [1, 3, 16, 20, 64, 128])
def test_any_number_of_heads(machine, H):
    assert_right(machine, stored(make(2, 1, H, 32, 16, [5, 40], 16)), kernel="mma")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("T", [2, 4])
def test_query_tokens_see_their_own_prefix_and_empty_rows_are_zero(machine, T, causal):
    """20 heads: rows of one block are of several tokens."""
    case = stored(make(6, T, 20, 32, 16, [0, 1, 33, 0, 70, 3], 16, causal=causal, empty_lse=np.inf))
    out, lse = assert_right(machine, case, kernel="mma", split_keys=32)
    assert (out[0] == 0).all() and (lse[[0, 3]] == np.inf).all()


@pytest.mark.parametrize("block_size", [1, 61])
def test_any_block_size(machine, block_size):
    assert_right(machine, stored(make(3, 2, 2, 32, 16, [130, 0, 61], block_size)), kernel="mma", split_keys=96)


@pytest.mark.parametrize("DV", [(576, 512), (512, 512), (288, 256), (144, 128), (80, 48), (16, 16)], ids=str)
def test_row_widths_of_models_and_odd_ones(machine, DV):
    assert_right(machine, stored(make(1, 1, 3, *DV, [70], 16)), kernel="mma")


def test_it_is_chosen_where_rows_are_aligned_and_refused_by_name_elsewhere(machine):
    def who(case, kernel=None):
        names = []
        rows = case.q.shape[:3]
        outputs = np.empty((*rows, case.V), np.float32), np.empty(rows, np.float32)
        problem = case.q, case.kv_cache, case.block_table, case.seq_lens, case.scale, case.causal, 1.0, -np.inf
        forms.fill(
            lambda *args, **how: names.append(forms.decode_paged(*args, **how)),
            machine, *problem, outputs=outputs, kernel=kernel,
        )  # fmt: skip
        return names[0]

    case = make(1, 1, 2, 48, 32, [33], 16)
    assert who(stored(case)) == "paged_mma_bf16" and who(stored(case, F16)) == "paged_mma_f16"
    assert who(stored(case), "scalar") == "paged_decode_bf16"
    padded = np.zeros((*case.kv_cache.shape[:2], 52), BF16)
    padded[..., :48] = case.kv_cache
    apart = np.zeros((len(case.kv_cache), 16 * 48 + 4), BF16)
    apart = np.lib.stride_tricks.as_strided(apart, case.kv_cache.shape, (apart.strides[0], 96, 2))
    q = np.zeros((1, 1, 2, 52), BF16)[..., :48]
    for other, said in [
        (case, "q is f32 and kv_cache f32, expected both f16 or both bf16"),
        (case.but(kv_cache=case.kv_cache.astype(BF16)), "q is f32 and kv_cache bf16"),
        (stored(make(1, 1, 2, 40, 32, [33], 16)), "D is 40, expected a multiple of 16"),
        (stored(case.but(V=33)), "head_dim_v is 33, expected a multiple of 16"),
        (stored(case).but(kv_cache=padded[..., :48]), "kv_cache has a stride on axis 1 of 104, expected a multiple"),
        (stored(case).but(kv_cache=apart), "kv_cache has a stride on axis 0 of 1544, expected a multiple of 16 bytes"),
        (stored(case).but(q=q), "q has a stride on axis 2 of 104, expected a multiple of 16 bytes"),
        (stored(make(1, 1, 1, 2048, 512, [3], 16)), "D is 2048 and head_dim_v 512, expected at most 512"),
    ]:
        assert who(other).startswith("paged_decode")
        with pytest.raises(UnsupportedError, match=f"^kernel 'mma' does not take this problem: .*{said}"):
            who(other, "mma")


def test_more_requests_than_an_axis_of_a_grid_has_are_the_scalar_kernels_and_of_a_selection_refused(machine):
    q, cache = np.broadcast_to(BF16(0), (65536, 1, 1, 16)), np.zeros((1, 16, 16), BF16)
    assert paged.kernel_of(q[1:], cache, 16, machine.arch).startswith("paged_mma")
    assert paged.kernel_of(q, cache, 16, machine.arch) == "paged_decode_bf16"
    with pytest.raises(UnsupportedError, match="q has 65536 requests, expected at most 65535"):
        paged.kernel_of(q, cache, 16, machine.arch, "mma")
    there, partial = forms.put(machine, q), machine.empty((1, 1, 1, 16), np.float32)
    with pytest.raises(UnsupportedError, match="requests is 65536, the CUDA kernels take at most 65535"):
        paged_mma.launch(machine, "paged_mma_bf16", there, there, *[there] * 4, partial, listed=True)


@pytest.mark.parametrize("name", ["q", "kv_cache"])
def test_an_address_that_is_not_aligned_is_refused(machine, name):
    case = stored(make(1, 1, 2, 48, 32, [33], 16))
    arrays = {"q": forms.put(machine, case.q), "kv_cache": forms.put(machine, case.kv_cache)}
    whole = arrays[name]
    arrays[name] = Buffer(whole.pointer + 2, whole.shape, whole.dtype, whole.strides, whole)
    assert paged.kernel_of(*arrays.values(), 32, machine.arch) == "paged_decode_bf16"
    with pytest.raises(UnsupportedError, match=rf": {name} begins at address \d+, expected a multiple of 16 bytes$"):
        paged.kernel_of(*arrays.values(), 32, machine.arch, "mma")


def test_strided_views(machine):
    case = stored(make(3, 2, 3, 32, 16, [70, 5, 40], 16))
    room = np.full((case.kv_cache.shape[0], 2, 16, 48), np.nan, BF16)
    room[:, 1, :, 8:40] = case.kv_cache
    heads_first = np.ascontiguousarray(case.q.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    apart = case.but(q=heads_first, kv_cache=room[:, 1, :, 8:40])
    assert bits(decode(machine, apart, kernel="mma")) == bits(decode(machine, case, kernel="mma"))


def test_the_largest_ids_reach_their_page_and_no_other_is_read(machine):
    """The cache begins so far before its pages that they have the last ids there are: page 0 is no memory at all."""
    case = stored(make(3, 1, 2, 32, 16, [70, 0, 33], 16))
    expected = decode(machine, case, kernel="mma")
    arrays = [forms.put(machine, x) for x in (case.q, case.kv_cache, case.block_table, case.seq_lens)]
    near, first = arrays[1], 2**31 - len(case.kv_cache)
    pointer = (near.pointer - first * near.strides[0]) % 2**64
    arrays[1] = Buffer(pointer, (2**31, *near.shape[1:]), near.dtype, near.strides, near)
    table = np.where(case.block_table < 2**30, case.block_table.astype(np.int64) + first, -1)
    arrays[2] = forms.put(machine, table.astype(np.int32))
    out, lse = machine.empty((3, 1, 2, 16), np.float32), machine.empty((3, 1, 2), np.float32)
    forms.decode_paged(machine, *arrays, case.scale, True, 1.0, -np.inf, out, lse, longest=70, kernel="mma")
    assert bits(map(machine.download, (out, lse))) == bits(expected)


def test_requests_that_lie_further_apart_than_32_bits_hold(machine):
    """Queries and tables; those of the first request, which is empty, are no memory at all."""
    assert_far(machine, stored(make(2, 1, 2, 32, 16, [0, 33], 16)), kernel="mma")


@pytest.mark.parametrize("q_size", [0.0, 0.1, 30.0])
def test_flat_and_peaked_scores(machine, q_size):
    case = stored(make(2, 1, 3, 48, 32, [130, 70], 16, q_size=q_size))
    assert_right(machine, case, kernel="mma", split_keys=64)


@pytest.mark.parametrize("rise", [1.0, -90.0])
def test_scores_that_rise_or_fall_so_that_every_tile_rescales(machine, rise):
    case = make(1, 1, 2, 32, 16, [200], 16)
    case.q[..., 0] = 16
    for position, row in enumerate(case.keys(0).astype(np.float32)):
        row[0] = rise * position / 32
        place(case, 0, position, row)
    assert_right(machine, stored(case), kernel="mma", split_keys=64)


def test_a_negative_scale_weighs_rows_that_it_turns_to_minus_infinity_with_zero(machine):
    case = make(1, 1, 3, 32, 16, [70], 16, scale=-0.1)
    case.q[..., 3] = np.abs(case.q[..., 3]) + 1
    place(case, 0, 5, np.where(np.arange(32) == 3, np.inf, 1).astype(np.float32))
    assert all(np.isfinite(bound).all() for bound in kernel_cases.paged(stored(case), kernel="mma"))
    out, lse = assert_right(machine, stored(case), kernel="mma", split_keys=64)
    assert np.isfinite(out).all() and np.isfinite(lse).all()


# --- bugs planted in its text


BUGS = {
    "no wait": ("        wait_for_groups();\n", "", "cp.async not waited for"),
    "no barrier after the wait": ("        __syncthreads();            // the rows are there", "        //", "race"),
    "no barrier before maxima are used": ("if (__syncthreads_or(odd))", "if (odd)", "race|never written"),
    "no barrier before weights are used": (
        "        __syncthreads();            // the weights",
        "        //",
        "race|never",
    ),
    "a barrier in one warp": (
        "        __syncthreads();            // the weights are there",
        "        if (warp == 0) __syncthreads();",
        "divergent barrier|race|never",
    ),
    "rows past the last": ("if (row >= rows) continue;\n            float *out", "float *out", "out of bounds|race"),
    "the tail by the last page": ("        if (j >= end) continue;\n", "", "out of bounds|never written"),
    "the tile after the last": ("if (first + KEYS < end) {", "{", "cp.async"),
    "uninitialised weights": (
        "if (key_warp == 0 && lane % 4 == 0) shared.rescale[row]",
        "if (0) shared.rescale[row]",
        "never",
    ),
    "a shuffle under divergence": (
        "                top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));",
        "                if (lane < 16) top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));",
        "divergent warp",
    ),
    "commit on half the threads": (
        "    end_of_group();\n",
        "    if (threadIdx.x % 64 < 32) end_of_group();\n",
        "cp.async",
    ),
    "a read past the queries": (
        "Latent::at(row + 16 * i + lane % 16, chunk",
        "Latent::at(row + 16 * i + lane % 16 + 4096, chunk",
        "out of bounds",
    ),
}

WRONG = {
    "no tail mask": ("key < min(end, visible[i][half]) ?", "true ?"),
    "no causal mask": ("key < min(end, visible[i][half]) ?", "key < end ?"),
    "operands swapped in inline assembly": ("{%8, %9}", "{%9, %8}"),
    "no .trans": ("x4.trans.shared", "x4.shared"),
    "no rescaling": ("acc[i][c][n][e] *= e < 2 ? upper : lower;", ";"),
    "no rescaling of the sum": ("l[i][half] *= rescale;", ";"),
    "a query's rows of the wrong token": ("r / p.H * p.q_token", "r % p.T * p.q_token"),
    "values that are not scrubbed": ("scrub<Stored>(shared.tiles + now * TILE_BYTES);", ";"),
}


@pytest.mark.skipif(kernel_cases.missing("ptx") is not None, reason="the extra cuda is not installed")
@pytest.mark.parametrize("arch", ["sm_80", "sm_100"])
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_reported(bug, arch):
    old, new, said = BUGS[bug]
    case = stored(make(2, 2, 20, 48, 32, [150, 37], 16))
    with pytest.raises(Fault, match=said):
        decode(Planted(arch, old, new), case, kernel="mma")


@pytest.mark.skipif(kernel_cases.missing("ptx") is not None, reason="the extra cuda is not installed")
@pytest.mark.parametrize("arch", ["sm_80", "sm_100"])
@pytest.mark.parametrize("bug", WRONG)
def test_a_planted_bug_gives_wrong_numbers(bug, arch):
    case = make(2, 2, 20, 48, 32, [150, 37], 16)
    # Scores that rise, and a last value that the first query must not see.
    for position, row in enumerate(case.keys(0).astype(np.float32)):
        row[0] = position / 16
        place(case, 0, position, row)
    place(case, 0, 149, np.full(48, np.nan, np.float32))
    with pytest.raises(AssertionError):
        assert_right(Planted(arch, *WRONG[bug]), stored(case), kernel="mma")


def test_the_tile_is_the_largest_that_fits_the_shared_memory():
    tiles = {
        (576, 0): {"sm_80": (64, 32), "sm_86": (16, 32), "sm_89": (16, 32), "sm_90": (64, 64), "sm_120": (16, 32)},
        (592, 0): {"sm_80": (64, 32), "sm_86": (16, 32), "sm_90": (64, 32)},
        (640, 0): {"sm_80": (32, 32), "sm_86": None, "sm_90": (64, 32), "sm_100": (64, 32)},
        (896, 0): {"sm_80": (16, 32), "sm_86": None, "sm_90a": (32, 32)},
        (1024, 0): {"sm_80": (16, 32), "sm_86": None, "sm_90": (32, 32)},
        (2048, 0): {"sm_80": None, "sm_90": None},
        (128, 0): {"sm_80": (64, 64), "sm_86": (64, 64)},
        (576, 2): {"sm_80": (64, 32), "sm_86": (32, 32), "sm_90": (64, 64)},
    }
    for (D, packed), of in tiles.items():
        for arch, wanted in of.items():
            assert paged_mma.tile(D, arch, packed) == wanted, (D, packed, arch)
            fits = [t for t in paged_mma.TILES if paged_mma.shared_bytes(D, *t, packed) <= layout.most_smem(arch)]
            assert fits[:1] == ([] if wanted is None else [wanted])


@pytest.mark.skipif(kernel_cases.missing("ptx") is not None, reason="the extra cuda is not installed")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("D", [592, 640])
def test_rows_that_the_largest_tile_is_too_wide_for_take_a_smaller_one(arch, D):
    """And are right on every architecture that has one."""
    machine = kernel_cases.interpreter(arch)
    case = stored(make(2, 2, 20, D, 512, [70, 5], 16))
    assert paged.kernel_of(case.q, case.kv_cache, 512, machine.arch) == "paged_mma_bf16"
    assert_right(machine, case, kernel="mma", split_keys=64)
