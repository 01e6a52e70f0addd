# SPDX-License-Identifier: Apache-2.0
# One walk over the keys that queries see in one cache, in order. Every call with a selection, a window or a cache
# format makes it, so it is compiled; visible.py says what is visible.
from libc.stdint cimport int32_t, int64_t

ctypedef fused index:
    int32_t
    int64_t


def walk(
    const index[:, :] indices,          # [n, K] positions or slots; or [n, 0] of none: every position in turn
    bint selected,
    const int32_t[:] length,            # [n] indices that count; or [0]: all
    const int64_t[:, :] limits,         # [n, 4]: how many there are, the window's first and last, the last by causality
    int64_t window_first,               # those below are in every window
    const unsigned char[:, :] kept,     # [n, columns]: positions that are keys; or [0, 0]: all
    bint skip,                          # an index that is too large is no key; else it is a fault
    const int64_t[:] request,           # [n]
    const int32_t[:, :] table,          # [B, max_blocks]; or [0, 0] of slots
    int64_t num_blocks,
    int64_t block_size,
    const int64_t[:, :] places,         # [m, 3]: a key lies at start + block * [1] + offset in it * [2]
    int64_t[::1] counts,                # [n] keys so far, IN AND OUT
    int64_t[:, :, ::1] found,           # OUT [m, n, K']: where each key lies
    int64_t[:, ::1] positions,          # OUT [n, K']; or [0, 0]
):
    """(row, entry, column) of the first fault: an index too large (column -1), or an id that no block has; or -1s."""
    cdef Py_ssize_t r, k, i, entries, n = request.shape[0]
    cdef int64_t p, column, block = 0, offset, base, c
    for r in range(n):
        entries = indices.shape[1] if selected else min(limits[r, 0], limits[r, 3] + 1)
        if selected and length.shape[0]:
            entries = min(entries, length[r])
        base = -block_size
        c = counts[r]
        for k in range(entries):
            p = indices[r, k] if selected else k
            if p < 0:
                continue
            if p >= limits[r, 0]:
                if skip:
                    continue
                return r, k, -1
            if p > limits[r, 3] or ((p < limits[r, 1] or p > limits[r, 2]) and p >= window_first):
                continue
            if kept.shape[0] and not kept[r, p]:
                continue
            offset = p - base
            if not 0 <= offset < block_size:
                column = p // block_size
                base = column * block_size
                offset = p - base
                block = table[request[r], column] if table.shape[0] else column
                if not 0 <= block < num_blocks:
                    return r, k, column
            for i in range(places.shape[0]):
                found[i, r, c] = places[i, 0] + block * places[i, 1] + offset * places[i, 2]
            if positions.shape[0]:
                positions[r, c] = p
            c += 1
        counts[r] = c
    return -1, -1, -1
