// SPDX-License-Identifier: Apache-2.0
// New rows [c_kv | k_pe] into a paged cache, bit for bit: row t goes to slot block * block_size + offset.
#include "common.cuh"

// A block per row; a negative slot skips it. Numbers are moved as their bits.
template <typename Bits>
__device__ void append(const Bits *c_kv, const Bits *k_pe, const long long *slot_mapping, Bits *kv_cache, int L, int R,
                       int block_size, long long c_kv_row, long long k_pe_row, long long cache_block,
                       long long cache_row) {
    int t = blockIdx.x;
    long long slot = slot_mapping[t];
    if (slot < 0) return;
    Bits *row = kv_cache + slot / block_size * cache_block + slot % block_size * cache_row;

    for (int l = threadIdx.x; l < L; l += THREADS) row[l] = c_kv[t * c_kv_row + l];
    for (int p = threadIdx.x; p < R; p += THREADS) row[L + p] = k_pe[t * k_pe_row + p];
}

#define KERNEL(Bits, dtype)                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS) append_rows_##dtype(                                   \
        const Bits *c_kv,               /* [T, L] */                                                             \
        const Bits *k_pe,               /* [T, R] */                                                             \
        const long long *slot_mapping,  /* [n], contiguous, n <= T */                                            \
        Bits *kv_cache,                 /* [num_blocks, block_size, L + R] */                                    \
        int L, int R, int block_size,                                                                            \
        long long c_kv_row, long long k_pe_row, long long cache_block, long long cache_row                       \
    ) {                                                                                                          \
        append(c_kv, k_pe, slot_mapping, kv_cache, L, R, block_size, c_kv_row, k_pe_row, cache_block, cache_row); \
    }

KERNEL(unsigned, f32)
KERNEL(unsigned short, f16)
KERNEL(unsigned short, bf16)
