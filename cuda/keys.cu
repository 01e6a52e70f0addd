// SPDX-License-Identifier: Apache-2.0
// The keys that each query sees, as a list of rows: what a top-k selection or a window leaves of a request.
//
//   candidates, in order: the entries of a selection, or else the first tokens that are kept and then the window
//   seen      not negative, before the end of the selection, within the length, causality and the window
//   listed    where the row of each begins, no gaps, in the same order
#include "common.cuh"

// Fill `keys` and `counts`: a warp per query token, one candidate a lane.
extern "C" __global__ void __launch_bounds__(WARP) keys_list(
    const int *block_table,         // [B, max_blocks]; null: indices are slots, block_size to a page
    const int *seq_lens,            // [B]; not read with slots
    const int *indices,             // [B, T, K], contiguous; null: no selection
    const int *lengths,             // [B, T]: how many indices count; null: K
    int causal,
    int left, int right,            // the window: query at p sees p - left to p + right; -1: no end
    int kept,                       // first tokens that every window holds
    long long *keys,                // [B T, most], contiguous
    int *counts,                    // [B T]
    int T, int K, int block_size, int most,
    long long cache_block, long long cache_row, long long table_request
) {
    int n = blockIdx.x, b = n / T, lane = threadIdx.x;
    int len = block_table ? seq_lens[b] : 0, at = len - T + n % T;          // the query's own position
    int most_seen = causal ? max(0, at + 1) : len;
    int end = right < 0 || right >= most_seen - at ? most_seen : max(0, at + right + 1);  // no sum beyond 32 bits
    kept = min(kept, most_seen);
    int low = left < 0 || left >= at ? kept : max(kept, at - left);
    int candidates = !indices ? kept + max(0, end - low) : lengths ? min(K, lengths[n]) : K;

    int count = 0;
    for (int first = 0; first < candidates; first += WARP) {
        int i = first + lane;
        int j = i >= candidates ? -1 : indices ? indices[(long long)n * K + i] : i < kept ? i : low + i - kept;
        bool seen = j >= 0 && (!block_table || j < kept || (j >= low && j < end));
        unsigned all = __ballot_sync(~0u, seen);
        if (seen) {
            long long page = block_table ? block_table[b * table_request + j / block_size] : j / block_size;
            keys[(long long)n * most + count + __popc(all & ((1u << lane) - 1))] =
                page * cache_block + j % block_size * cache_row;
        }
        count += __popc(all);
    }
    if (lane == 0) counts[n] = count;
}
