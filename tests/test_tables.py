# SPDX-License-Identifier: Apache-2.0
"""Page tables: hand-written ones of each spelling, round trips bit for bit, one line for each contradiction."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import paged, rows_of

from mla_oracle import InputError, decode_paged
from mla_oracle.checks import arguments_named
from mla_oracle.spellings.cache_layouts import tokens_as_blocks
from mla_oracle.spellings.tables import (
    from_block_offsets,
    from_block_table,
    from_csr_pages,
    from_csr_tokens,
    from_length_info,
    from_request_tokens,
    to_block_offsets,
    to_csr_pages,
    to_csr_tokens,
    to_length_info,
    to_request_tokens,
)


def i32(*values):
    return np.array(values, np.int32)


def alike(table, block_table, seq_lens):
    assert table.block_table.dtype == table.seq_lens.dtype == np.int32
    assert table.block_table.tolist() == block_table and table.seq_lens.tolist() == seq_lens


PAGES = {"indptr": i32(0, 2, 2, 5), "indices": i32(7, 3, 9, 0, 4), "block_size": 4}


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint32])
def test_csr_pages_with_a_last_page_length_or_with_lengths(kind):
    indptr, indices = PAGES["indptr"].astype(kind), PAGES["indices"].astype(kind)
    last = from_csr_pages(indptr, indices, block_size=4, last_page_len=np.array([1, 0, 4], kind))
    alike(last, [[7, 3, -1], [-1, -1, -1], [9, 0, 4]], [5, 0, 12])
    lens = from_csr_pages(indptr, indices, block_size=4, kv_lens=np.array([5, 0, 4], kind))
    alike(lens, [[7, 3], [-1, -1], [9, -1]], [5, 0, 4])  # pages 0 and 4 are owned, and not needed


def test_a_request_without_pages_may_have_any_last_page_length():
    for last in (0, 1, 4):
        assert from_csr_pages(**PAGES, last_page_len=i32(1, last, 1)).seq_lens.tolist() == [5, 0, 9]


def test_a_request_of_no_token_is_written_with_no_page_and_a_last_page_length_of_0():
    pages = to_csr_pages(i32(7, 3, 9, 9, 1, 9).reshape(3, 2), i32(5, 0, 4), block_size=4)
    assert [array.tolist() for array in pages] == [[0, 2, 2, 3], [7, 3, 1], [1, 0, 4]]


def test_csr_tokens_are_pages_of_one_token():
    alike(from_csr_tokens(i32(0, 3, 3, 4), i32(8, 2, 5, 8)), [[8, 2, 5], [-1, -1, -1], [8, -1, -1]], [3, 0, 1])


def test_no_request_and_no_token_are_tables_too():
    alike(from_csr_tokens(i32(0), i32()), [], [])
    alike(from_csr_tokens(i32(0, 0), i32()), [[-1]], [0])
    assert to_csr_pages(i32().reshape(0, 3), i32(), block_size=4).indptr.tolist() == [0]


def test_a_request_map_is_read_through_its_pool_indices():
    req_to_token = i32(-1, -1, -1, 6, 0, 2, -7, 99, -1, 4, 5, 3).reshape(4, 3)
    table = from_request_tokens(req_to_token, np.array([3, 1, 2, 3]), np.array([2, 3, 0, 3]))
    alike(table, [[4, 5, -1], [6, 0, 2], [-1, -1, -1], [4, 5, 3]], [2, 3, 0, 3])


def test_block_offsets_have_one_plane_for_keys_and_one_for_values():
    planes = i32(4, 2, 9, 4, 2, -3, 1, 8, 8, 1, 0, 0).reshape(2, 2, 3)
    table = from_block_offsets(planes, i32(8, 3), block_size=4)
    alike(table, [[4, 2, 9], [1, 8, 8]], [8, 3])
    assert np.shares_memory(table.block_table, planes)
    both = to_block_offsets(table.block_table)
    assert both.shape == (2, 2, 3) and np.shares_memory(both, planes)
    assert (both[:, 0] == table.block_table).all() and (both[:, 1] == table.block_table).all()


def test_length_info_keeps_the_first_tokens_and_those_of_the_window():
    info = i32(3, 0, 2, 5, 0, 0, 2, 0, 0).reshape(3, 3)  # last page, offset, first
    table = from_length_info(PAGES["indptr"], PAGES["indices"], info, block_size=4)
    # request 0 has 7 tokens in pages 7 and 3: 0 and 1, then 5 and 6; request 2 all of its 10
    everything = [36, 37, 38, 39, 0, 1, 2, 3, 16, 17]
    alike(table, [[28, 29, 13, 14, *[-1] * 6], [-1] * 10, everything], [4, 0, 10])


def test_length_info_of_a_request_that_has_not_reached_its_window():
    table = from_length_info(i32(0, 1), i32(2), i32(3, 4, 4).reshape(3, 1), block_size=4)
    alike(table, [[8, 9, 10]], [3])


def test_i32_tables_are_taken_as_they_are_and_wider_ones_are_narrowed_where_in_use():
    table, lens = i32(3, 2147480000, 1, 0).reshape(2, 2), i32(4, 5)
    same = from_block_table(table, lens, block_size=4)
    assert same.block_table is table and same.seq_lens is lens
    wide = np.array([[3, 2**40], [1, 0]])
    alike(from_block_table(wide, lens.astype(np.int64), block_size=4), [[3, -1], [1, 0]], [4, 5])


tables = st.integers(0, 2**32 - 1).map(
    lambda seed: (np.random.default_rng(seed), int(np.random.default_rng(seed).integers(1, 6)))
)


def drawn(rng, block):
    """(block_table, seq_lens) as this module makes them: -1 past the lengths, no column too many."""
    lens = rng.integers(0, 4 * block, rng.integers(0, 6)).astype(np.int32)
    used = -(-lens // block)
    width = max(1, int(used.max(initial=0)))
    ids = rng.permutation(len(lens) * width).reshape(len(lens), width)
    return np.where(np.arange(width) < used[:, None], ids, -1).astype(np.int32), lens


def identical(one, other):
    pairs = zip(one, other, strict=True)
    return all(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)


@given(tables)
@settings(deadline=None)
def test_every_spelling_and_back_is_the_same_bits(drawing):
    rng, block = drawing
    table, lens = drawn(rng, block)
    pages = to_csr_pages(table, lens, block_size=block)
    for how in ({"last_page_len": pages.last_page_len}, {"kv_lens": lens}):
        back = from_csr_pages(pages.indptr, pages.indices, block_size=block, **how)
        assert identical(back, (table, lens))
    assert identical(to_csr_pages(*back, block_size=block), pages)

    tokens = to_csr_tokens(table, lens, block_size=block)
    by_token = from_csr_tokens(*tokens)
    assert identical(to_csr_tokens(*by_token, block_size=1), tokens)

    pool = rng.permutation(len(lens) + 3)[: len(lens)]
    request_map = to_request_tokens(table, lens, block_size=block, req_pool_indices=pool)
    assert identical(from_request_tokens(*request_map), by_token)
    offsets = to_block_offsets(table)
    assert identical(from_block_offsets(offsets, lens, block_size=block), (table, lens))

    left, first = int(rng.integers(0, 9)), int(rng.integers(0, 4))
    windowed = from_length_info(*to_length_info(table, lens, block_size=block, window_left=left, window_first=first),
                                block_size=block)
    for b, n in enumerate(lens):
        seen = [p for p in range(n) if p >= n - 1 - left or p < first]
        slots = [table[b, p // block] * block + p % block for p in seen]
        assert windowed.block_table[b, : len(seen)].tolist() == slots and windowed.seq_lens[b] == len(seen)


def test_tokens_in_blocks_of_one_decode_to_the_same_bits():
    problem = paged(3, [5, 0, 12], block=4)
    wanted = decode_paged(**problem)
    table, lens, cache = problem["block_table"], problem["seq_lens"], problem["kv_cache"]
    slots = tokens_as_blocks(cache)
    request_map = to_request_tokens(table, lens, block_size=4, req_pool_indices=i32(4, 0, 1))
    for spelled in (
        from_csr_tokens(*to_csr_tokens(table, lens, block_size=4)),
        from_request_tokens(*request_map, num_slots=len(slots)),
    ):
        again = dict(problem, kv_cache=slots, block_table=spelled.block_table, seq_lens=spelled.seq_lens)
        assert identical(decode_paged(**again), wanted)
        assert np.array_equal(rows_of(again, 2), rows_of(problem, 2))


BAD_CSR = [
    ({"indptr": i32(1, 2, 2, 5)}, "indptr[0] is 1, expected 0"),
    ({"indptr": i32()}, "indptr is empty, expected [B + 1]"),
    ({"indptr": i32(0, 3, 2, 5)}, "indptr[2] is 2, expected at least 3, indptr[1]"),
    ({"indptr": i32(0, 2, 2, 4)}, "indptr[3] is 4, expected 5, the length of indices"),
    ({"indptr": i32(0, 2, 2, 6)}, "indptr[3] is 6, expected 5, the length of indices"),
    ({"indptr": np.zeros(4)}, "indptr is f64, expected i32 or i64 or u32"),
    ({"indices": i32(7, 3, -1, 0, 4)}, "indices[2] is -1, expected 0 to 9"),
    ({"indices": i32(7, 10, 9, 0, 4)}, "indices[1] is 10, expected 0 to 9"),
    ({"last_page_len": i32(0, 0, 1)}, "last_page_len[0] is 0, expected 1 to 4: indptr gives request 0 2 pages of 4"),
    ({"last_page_len": i32(1, 0, 5)}, "last_page_len[2] is 5, expected 1 to 4: indptr gives request 2 3 pages of 4"),
    ({"last_page_len": i32(1, 5, 1)}, "last_page_len[1] is 5, expected 0 to 4: indptr gives request 1 0 pages of 4"),
    ({"last_page_len": i32(1, 1)}, "last_page_len is [2], expected [B] with B = 3 on axis 0"),
    ({"kv_lens": i32(1, 0, 1)}, "last_page_len and kv_lens are both given, expected one of them"),
    ({"last_page_len": None},
     "neither last_page_len nor kv_lens is given, expected one of them for pages of 4"),
    ({"last_page_len": None, "kv_lens": i32(1, 1, 1)},
     "kv_lens[1] is 1, expected 0 to 0: indptr gives request 1 0 pages of 4"),
    ({"last_page_len": None, "kv_lens": i32(-1, 0, 1)},
     "kv_lens[0] is -1, expected 0 to 8: indptr gives request 0 2 pages of 4"),
    ({"block_size": 0}, "block_size is 0, expected an integer from 1 to 2147483647"),
    ({"block_size": 2**30}, "indptr gives request 2 2147483649 tokens in blocks of 1073741824, expected below 2^31"),
]


@pytest.mark.parametrize(("change", "text"), BAD_CSR)
def test_contradicting_csr_pages_are_named_in_one_line(change, text):
    good = PAGES | {"last_page_len": i32(1, 0, 1), "num_blocks": 10}
    from_csr_pages(**good)
    with pytest.raises(InputError) as error:
        from_csr_pages(**good | change)
    assert str(error.value) == text


def test_pages_that_no_length_needs_may_hold_anything():
    from_csr_pages(i32(0, 3), i32(1, -5, 77), block_size=4, kv_lens=i32(4), num_blocks=2)


BAD = [
    (lambda: from_csr_tokens(i32(0, 2), i32(4, 5), num_slots=5), "indices[1] is 5, expected 0 to 4"),
    (lambda: from_request_tokens(i32(1, 2).reshape(1, 2), i32(1), i32(1)),
     "req_pool_indices[0] is 1, expected 0 to 0, a row of req_to_token"),
    (lambda: from_request_tokens(i32(1, 2).reshape(1, 2), i32(0), i32(3)),
     "seq_lens[0] is 3, expected 0 to 2, the tokens of a row of req_to_token"),
    (lambda: from_request_tokens(i32(9, 9, 1, -2).reshape(2, 2), i32(1), i32(2)),
     "req_to_token[1, 1] is -2, expected 0 to 2147483647"),
    (lambda: to_request_tokens(i32(1, 2).reshape(2, 1), i32(1, 1), block_size=2, req_pool_indices=i32(5, 5)),
     "req_pool_indices[1] is 5, which req_pool_indices[0] is"),
    (lambda: to_request_tokens(i32(1).reshape(1, 1), i32(1), block_size=2, req_pool_indices=i32(-1)),
     "req_pool_indices[0] is -1, expected 0 or more"),
    (lambda: from_block_offsets(i32(1, 2, 1, 3).reshape(1, 2, 2), i32(5), block_size=4),
     "block_offsets[0, 1, 1] is 3, expected 2, the block of its key"),
    (lambda: from_block_offsets(i32(1, 1).reshape(1, 2, 1), i32(5), block_size=4),
     "seq_lens[0] is 5, expected 0 to 4: block_offsets has 1 blocks of 4 a request"),
    (lambda: from_block_offsets(i32(1, 1).reshape(1, 2, 1), i32(4), block_size=4, num_blocks=1),
     "block_offsets[0, 0, 0] is 1, expected 0 to 0"),
    (lambda: from_block_offsets(i32(1, 1, 1).reshape(1, 3, 1), i32(4), block_size=4),
     "block_offsets is [1, 3, 1], expected [B, 2, max_blocks]"),
    (lambda: from_length_info(i32(0, 2), i32(3, 1), i32(3, 1, 2).reshape(3, 1), block_size=4),
     "length_info[2, 0] is 2, expected 0 to 1, the offset of the window"),
    (lambda: from_length_info(i32(0, 2), i32(3, 1), i32(3, 8, 2).reshape(3, 1), block_size=4),
     "length_info[1, 0] is 8, expected at most 7, the tokens of the request"),
    (lambda: from_length_info(i32(0, 2), i32(3, 1), i32(3, 1).reshape(2, 1), block_size=4),
     "length_info is [2, 1], expected [3, B]"),
    (lambda: from_block_table(np.array([[2**40]]), i32(1), block_size=4),
     "block_table[0, 0] is 1099511627776, expected 0 to 2147483647"),
    (lambda: from_block_table(i32(1).reshape(1, 1), i32(5), block_size=4),
     "seq_lens[0] is 5, expected 0 to 4: block_table has 1 blocks of 4 a request"),
    (lambda: to_csr_pages(i32(-1).reshape(1, 1), i32(1), block_size=4),
     "block_table[0, 0] is -1, expected 0 to 2147483647"),
    (lambda: to_csr_tokens(i32(2**30).reshape(1, 1), i32(1), block_size=4),
     "block_table[0, 0] is 1073741824, expected a block whose slots are below 2^31"),
    (lambda: from_csr_tokens(np.concatenate([i32(0), np.full(2**15, 2**14, np.int32)]), np.zeros(2**14, np.int32)),
     "the lengths need a table of 32768 x 16384, expected at most 268435456 entries"),
]


@pytest.mark.parametrize(("call", "text"), BAD)
def test_a_contradiction_is_one_line_that_names_the_argument(call, text):
    with pytest.raises(InputError) as error:
        call()
    assert str(error.value) == text


def test_arguments_may_go_by_an_engines_names():
    with (
        pytest.raises(InputError, match=r"^kv_indptr\[2\] is 1, expected at least 2, kv_indptr\[1\]$"),
        arguments_named(indptr="kv_indptr", indices="kv_indices"),
    ):
        from_csr_tokens(i32(0, 2, 1), i32(5))
