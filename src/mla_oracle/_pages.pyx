# SPDX-License-Identifier: Apache-2.0
# One walk over the lengths and the block ids in use: every call of a paged form makes it, so it is compiled.
from libc.stdint cimport int32_t, int64_t


def scan(
    const int32_t[:, :] block_table,    # [B, max_blocks]
    const int32_t[:] seq_lens,          # [B]
    int64_t num_blocks,
    int64_t block_size,
):
    """(tokens, b, slot): the sum of the lengths, then where the first fault is.

    b is -1 if there is none; slot is -1 if seq_lens[b] is negative or past the table, else the index of an id that
    no block has.
    """
    cdef Py_ssize_t b, slot
    cdef int64_t tokens = 0, used
    for b in range(seq_lens.shape[0]):
        used = (<int64_t>seq_lens[b] + block_size - 1) // block_size
        if seq_lens[b] < 0 or used > block_table.shape[1]:
            return tokens, b, -1
        for slot in range(used):
            if not 0 <= block_table[b, slot] < num_blocks:
                return tokens, b, slot
        tokens += seq_lens[b]
    return tokens, -1, -1
