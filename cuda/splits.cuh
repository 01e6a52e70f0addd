// SPDX-License-Identifier: Apache-2.0
// How the keys of a request are cut into splits: by its own length alone, whatever batch it stands in.
#pragma once
#include "common.cuh"

constexpr int MOST_SPLITS = 64;     // of a request, by gpu/paged.py

// The keys of each split: `split_keys`, or the whole tiles that make MOST_SPLITS of a longer request.
__device__ inline int keys_of_split(int length, int split_keys) {
    return max(split_keys, TILE * ((length - 1) / (TILE * MOST_SPLITS) + 1));
}

// Query t of T of a request sees its first `visible` keys.
__device__ inline int visible_of(const int *seq_lens, int row, int T, int causal) {
    int b = row / T, t = row % T;
    return causal ? seq_lens[b] - T + t + 1 : seq_lens[b];
}
