# SPDX-License-Identifier: Apache-2.0
"""The paged kernel of sm_90a against strict f64, within the bound of mla_oracle.gpu.paged, interpreted and on a GPU.

Tiles have 64 keys; one warpgroup weighs the even ones, another the odd ones, so a pair is 128 keys.
"""

import kernel_cases
import ml_dtypes
import numpy as np
import pytest
from fast_cases import make, place
from kernel_cases import Planted, assert_far, assert_right, bits, decode, stored

from mla_oracle.errors import UnsupportedError
from mla_oracle.gpu import forms, layout, paged, paged_wgmma
from mla_oracle.gpu.machine import Buffer
from mla_oracle.ptx import Fault, Interpreter

BF16, F16 = ml_dtypes.bfloat16, np.float16


@pytest.fixture(params=["ptx sm_90a", "cuda"])
def machine(request):
    for machine in kernel_cases.machine(request.param):
        if machine.arch != "sm_90a":
            pytest.skip("the device is not of compute capability 9.0")
        yield machine


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("edges", [(1, 2, 63, 64, 65), (127, 128, 129), (191, 192, 193, 320)], ids=str)
def test_lengths_around_every_edge_of_a_tile_a_pair_and_a_split(machine, edges, dtype):
    case = stored(make(len(edges), 1, 2, 192, 128, edges, 16), dtype)
    assert_right(machine, case, kernel="wgmma", split_keys=192)


@pytest.mark.parametrize("H", [1, 20, 64, 65, 128])
def test_any_number_of_heads(machine, H):
    assert_right(machine, stored(make(2, 1, H, 128, 128, [5, 140], 16)), kernel="wgmma")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("T", [2, 4])
def test_query_tokens_see_their_own_prefix_and_empty_rows_are_zero(machine, T, causal):
    """20 heads: rows of one block are of several tokens."""
    case = stored(make(6, T, 20, 192, 128, [0, 1, 65, 0, 130, 3], 16, causal=causal, empty_lse=np.inf))
    out, lse = assert_right(machine, case, kernel="wgmma", split_keys=64)
    assert (out[0] == 0).all() and (lse[[0, 3]] == np.inf).all()


@pytest.mark.parametrize("block_size", [1, 61])
def test_any_block_size(machine, block_size):
    assert_right(machine, stored(make(3, 2, 2, 192, 128, [130, 0, 61], block_size)), kernel="wgmma", split_keys=96)


@pytest.mark.parametrize("DV", [(576, 512), (512, 512), (320, 256), (448, 128), (128, 128)], ids=str)
def test_row_widths_of_models_and_others_of_whole_boxes(machine, DV):
    assert_right(machine, stored(make(1, 1, 3, *DV, [200], 16)), kernel="wgmma")


def test_it_is_chosen_where_it_takes_the_problem_and_refused_by_name_elsewhere(machine):
    def who(case, kernel=None, **how):
        return paged.kernel_of(case.q, case.kv_cache, case.V, how.pop("arch", machine.arch), kernel, **how)

    case = make(1, 1, 2, 192, 128, [33], 16)
    assert who(stored(case)) == "paged_wgmma_bf16" and who(stored(case, F16)) == "paged_wgmma_f16"
    assert who(stored(case), "mma") == "paged_mma_bf16" and who(stored(case), "scalar") == "paged_decode_bf16"
    for other, said, chosen in [
        (case, "q is f32 and kv_cache f32, expected both f16 or both bf16", "paged_decode_f32"),
        (stored(make(1, 1, 2, 144, 128, [33], 16)), "D is 144, expected a multiple of 64", "paged_mma_bf16"),
        (stored(make(1, 1, 2, 192, 64, [3], 16)), "head_dim_v is 64, expected 128 or 256 or 512", "paged_mma_bf16"),
        (stored(make(1, 1, 2, 640, 512, [3], 16)), "D is 640 and head_dim_v 512, expected", "paged_mma_bf16"),
        (stored(make(1, 1, 2, 2048, 512, [3], 16)), "D is 2048 and head_dim_v 512, expected", "paged_decode_bf16"),
    ]:
        assert who(other) == chosen
        with pytest.raises(UnsupportedError, match=f"^kernel 'wgmma' does not take this problem: {said}"):
            who(other, "wgmma")
    for arch in ("sm_80", "sm_90", "sm_100", "sm_120"):
        assert not who(stored(case), arch=arch).startswith("paged_wgmma")
        with pytest.raises(UnsupportedError, match=f": arch is {arch}, expected sm_90a"):
            who(stored(case), "wgmma", arch=arch)
    for special in ({"packed": 1}, {"selected": True}):
        with pytest.raises(UnsupportedError, match=r"^kernel 'wgmma' takes neither packed rows nor a selection$"):
            who(stored(case), "wgmma", **special)


def test_strided_views(machine):
    case = stored(make(3, 2, 3, 192, 128, [70, 5, 40], 16))
    room = np.full((case.kv_cache.shape[0], 2, 16, 208), np.nan, BF16)
    room[:, 1, :, 8:200] = case.kv_cache
    heads_first = np.ascontiguousarray(case.q.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    apart = case.but(q=heads_first, kv_cache=room[:, 1, :, 8:200])
    assert bits(decode(machine, apart, kernel="wgmma")) == bits(decode(machine, case, kernel="wgmma"))


def test_the_largest_ids_reach_their_page_and_no_other_is_read(machine):
    """The cache begins so far before its pages that they have the last ids there are: page 0 is no memory at all."""
    case = stored(make(3, 1, 2, 128, 128, [70, 0, 33], 16))
    expected = decode(machine, case, kernel="wgmma")
    arrays = [forms.put(machine, x) for x in (case.q, case.kv_cache, case.block_table, case.seq_lens)]
    near, first = arrays[1], 2**31 - len(case.kv_cache)
    pointer = (near.pointer - first * near.strides[0]) % 2**64
    arrays[1] = Buffer(pointer, (2**31, *near.shape[1:]), near.dtype, near.strides, near)
    table = np.where(case.block_table < 2**30, case.block_table.astype(np.int64) + first, -1)
    arrays[2] = forms.put(machine, table.astype(np.int32))
    out, lse = machine.empty((3, 1, 2, 128), np.float32), machine.empty((3, 1, 2), np.float32)
    forms.decode_paged(machine, *arrays, case.scale, True, 1.0, -np.inf, out, lse, longest=70, kernel="wgmma")
    assert bits(map(machine.download, (out, lse))) == bits(expected)


def test_requests_that_lie_further_apart_than_32_bits_hold(machine):
    """Queries and tables; those of the first request, which is empty, are no memory at all."""
    assert_far(machine, stored(make(2, 1, 2, 128, 128, [0, 33], 16)), kernel="wgmma")


@pytest.mark.parametrize("q_size", [0.0, 0.1, 30.0])
def test_flat_and_peaked_scores(machine, q_size):
    case = stored(make(2, 1, 3, 192, 128, [330, 70], 16, q_size=q_size))
    assert_right(machine, case, kernel="wgmma", split_keys=192)


@pytest.mark.parametrize("rise", [1.0, -90.0])
def test_scores_that_rise_or_fall_so_that_every_tile_rescales(machine, rise):
    case = make(1, 1, 2, 128, 128, [400], 16)
    case.q[..., 0] = 16
    for position, row in enumerate(case.keys(0).astype(np.float32)):
        row[0] = rise * position / 32
        place(case, 0, position, row)
    assert_right(machine, stored(case), kernel="wgmma", split_keys=320)


@pytest.mark.skipif(kernel_cases.missing("ptx") is not None, reason="the extra cuda is not installed")
def test_a_block_fits_the_shared_memory_and_the_kernel_declares_it():
    assert paged_wgmma.shared_bytes(576, 512) <= layout.most_smem("sm_90a")
    machine = Interpreter("sm_90a")
    for D, V in ((576, 512), (512, 512), (192, 128)):
        kernel = machine.kernel("paged_wgmma.cu", "paged_wgmma_f16", D=D, V=V)
        assert kernel.declared_smem == paged_wgmma.shared_bytes(D, V)


# --- bugs planted in its text


PAIRS_WAIT = "        if (i >= STAGES) wait(shared.done[i % STAGES], i / STAGES - 1 & 1);\n"
GIVES_BACK = "    if (threadIdx.x % WARP == 0) arrive(shared.done[stage]);"
EXPECTED = "expect(shared.weighed[stage], WARPGROUP / WARP)"
BUGS = {
    "no wait for a tile": ("    wait(shared.copied[stage], pair & 1);\n", "", "cp.async|never written"),
    "a wait for a tile of the wrong parity": (
        "    wait(shared.copied[stage], pair & 1);",
        "    wait(shared.copied[stage], pair & 1 ^ 1);",
        "cp.async not waited for|never written|deadlock",
    ),
    "no wait for the queries": ("    wait(shared.there, 0);\n", "", "cp.async not waited for|never written"),
    "no wait before a tile is copied over": (PAIRS_WAIT, "", "cp.async|race"),
    "that wait of the wrong parity": ("i / STAGES - 1 & 1", "i / STAGES & 1", "cp.async|race"),
    "no wait for the weights": ("    wait(shared.weighed[stage], pair & 1);\n", "", "race|never written"),
    "weights over what products of others may read": (
        "    if (pair > 0) wait(shared.done[stage], pair - 1 & 1);\n",
        "",
        "race: .* what wgmma of thread",
    ),
    "weights over a row that other warps read": ("    meet(1 + stage, WARPGROUP);", "    //", "race"),
    "weights without a fence": ("    show_to_products();\n    __syncwarp();", "    __syncwarp();", "fence"),
    "tiles without a fence": ("    show_to_products();\n    unsigned long long a", "    unsigned long long a", "fence"),
    "no wait for products": ('asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");', "", "wgmma"),
    "no fence before products": (
        "    before_products();\n    #pragma unroll\n    for (int key",
        "    for (int key",
        "wgmma",
    ),
    "a tile given back before its products have ended": (
        f"    wait_for_products(acc);\n{GIVES_BACK}",
        f"{GIVES_BACK}\n    wait_for_products(acc);",
        "race|wgmma",
    ),
    "nobody gives a tile back": (GIVES_BACK, "", "deadlock"),
    "sums before they are there": ("    meet(1 + GROUPS, GROUPS * WARPGROUP);", "    //", "race|never written"),
    "an arrival too few": (EXPECTED, "expect(shared.weighed[stage], 5)", "deadlock"),
    "an arrival too many": (EXPECTED, "expect(shared.weighed[stage], 3)", "race|mbarrier"),
    "barriers used before they are made": (
        "    __syncthreads();\n    int warpgroup",
        "    int warpgroup",
        "race|mbarrier",
    ),
    "a warp that leaves its warpgroup": (
        "    before_products();\n    #pragma unroll\n    for (int column",
        "    if (threadIdx.x % WARPGROUP < WARP) return;\n    before_products();\n    for (int column",
        "deadlock|divergent",
    ),
    "the tail by the last page": ("            if (j >= part.end) continue;\n", "", "out of bounds|never written"),
    "rows past the last": ("        if (part.group + r >= p.T * p.H) continue;\n", "", "out of bounds|race"),
    "a product of a box too far": (
        "matrix_at(address_of(shared.tiles[stage]));",
        "matrix_at(address_of(shared.tiles[stage]) + 28 * BOX_BYTES);",
        "out of bounds|never written",
    ),
}

WRONG = {
    "no swizzle": ("CHUNK * (chunk % 8 ^ row % 8)", "CHUNK * (chunk % 8)"),
    "the last columns skipped": ("for (int column = 0; column < D;", "for (int column = 0; column < V;"),
    "values read along their rows": ("multiply<1>(acc", "multiply<0>(acc"),
    "the next keys 16 columns on": ("b + key * ROW_OF_BOX / CHUNK", "b + key * 2 / CHUNK"),
    "both warpgroups on the first columns": ("mine * (COLUMNS / BOX) * BOX_BYTES", "0"),
    "boxes that are near": ("(unsigned long long)BOX_BYTES >> 4 << 16", "64ull << 16"),
    "no tail mask": ("key < rows.visible[half] ?", "true ?"),
    "no causal mask": ("p.causal ? len - p.T + t + 1 : len);\n        rows.m", "len);\n        rows.m"),
    "no rescaling": ("acc[i] *= i % 4 < 2 ? upper : lower;", ";"),
    "no rescaling of the sum": ("rows.l[half] *= rows.m[half] == -INF ? 0 : exp2f(rows.m[half] - m);", ";"),
    "sums of one warpgroup": ("shared.sums[0][r] + shared.sums[1][r]", "shared.sums[0][r]"),
    "a maximum of its own tiles alone": ("is_first ? -INF : shared.maximum[stage ^ 1][row + 8 * half]", "rows.m[half]"),
    "a query's rows of the wrong token": ("r / p.H * p.q_token", "r % p.T * p.q_token"),
    "values that are not scrubbed": ("if (__any_sync(~0u, odd)) scrub<Stored>(shared.tiles[stage]);", ""),
}


@pytest.mark.skipif(kernel_cases.missing("ptx") is not None, reason="the extra cuda is not installed")
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_reported(bug):
    old, new, said = BUGS[bug]
    case = stored(make(2, 2, 20, 320, 256, [350, 37], 16))
    with pytest.raises(Fault, match=said):
        decode(Planted("sm_90a", old, new), case, kernel="wgmma")


@pytest.mark.skipif(kernel_cases.missing("ptx") is not None, reason="the extra cuda is not installed")
@pytest.mark.parametrize("bug", WRONG)
def test_a_planted_bug_gives_wrong_numbers(bug):
    """Scores that rise, and a last value that the first query must not see."""
    case = make(2, 2, 20, 320, 256, [350, 37], 16)
    for position, row in enumerate(case.keys(0).astype(np.float32)):
        row[0] = position / 16
        place(case, 0, position, row)
    place(case, 0, 349, np.full(320, np.nan, np.float32))
    with pytest.raises(AssertionError):
        assert_right(Planted("sm_90a", *WRONG[bug]), stored(case), kernel="wgmma")
