// SPDX-License-Identifier: Apache-2.0
// The smallest piece of a tensor-core kernel: one 16 x 8 x 16 product, by way of cp.async, ldmatrix and mma.sync.
//
//   micro_qk   d = c + a b^T, b [8, 16]: scores, queries times keys as they lie in the cache
//   micro_pv   d = c + a b,   b [16, 8]: values, weights times the same rows (ldmatrix turns them round)
//
// One warp. A lane holds two neighbours of row lane/4 and two of row lane/4 + 8 of c and d, at column 2 (lane % 4).
#include "mma.cuh"

template <typename T, bool turned>
__device__ void product(const unsigned short *a, const unsigned short *b, const float *c, float *d) {
    __shared__ __align__(16) unsigned short a_tile[16 * 16], b_tile[16 * 8];
    int lane = threadIdx.x;
    copy_async(address_of(a_tile + 8 * lane), a + 8 * lane, CHUNK);
    if (lane < 16) copy_async(address_of(b_tile + 8 * lane), b + 8 * lane, CHUNK);
    end_of_group();
    wait_for_groups();
    __syncwarp();

    unsigned a_part[4], b_part[2];
    load_matrices(a_part, address_of(a_tile + lane % 16 * 16 + lane / 16 * 8));
    if (turned) load_turned(b_part, address_of(b_tile + lane % 16 * 8));
    else load_matrices(b_part, address_of(b_tile + lane % 8 * 16 + lane / 8 % 2 * 8));

    int corner = lane / 4 * 8 + lane % 4 * 2;
    float part[4] = {c[corner], c[corner + 1], c[corner + 64], c[corner + 65]};
    multiply(part, a_part, b_part, T());
    d[corner] = part[0];
    d[corner + 1] = part[1];
    d[corner + 64] = part[2];
    d[corner + 65] = part[3];
}

#define KERNEL(name, T, turned)                                                                                  \
    extern "C" __global__ void __launch_bounds__(WARP) name(                                                     \
        const unsigned short *a,    /* [16, 16], contiguous, 16-byte aligned */                                  \
        const unsigned short *b,    /* [8, 16] or, turned, [16, 8]; likewise */                                  \
        const float *c,             /* [16, 8], contiguous */                                                    \
        float *d                    /* [16, 8], contiguous */                                                    \
    ) {                                                                                                          \
        product<T, turned>(a, b, c, d);                                                                          \
    }

KERNEL(micro_qk_f16, f16, false)
KERNEL(micro_qk_bf16, bf16, false)
KERNEL(micro_pv_f16, f16, true)
KERNEL(micro_pv_bf16, bf16, true)
