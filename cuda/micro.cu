// SPDX-License-Identifier: Apache-2.0
// The smallest piece of a tensor-core kernel: one 16 x 8 x 16 product, by way of cp.async, ldmatrix and mma.sync.
//
//   micro_qk   d = c + a b^T, b [8, 16]: scores, queries times keys as they lie in the cache
//   micro_pv   d = c + a b,   b [16, 8]: values, weights times the same rows (ldmatrix turns them round)
//
// One warp. A lane holds two neighbours of row lane/4 and two of row lane/4 + 8 of c and d, at column 2 (lane % 4).
#include "common.cuh"

__device__ inline unsigned address_of(const void *shared) { return (unsigned)__cvta_generic_to_shared(shared); }

__device__ inline void copy_async(unsigned short *shared, const unsigned short *global) {  // 16 bytes
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address_of(shared)), "l"(global) : "memory");
}

__device__ inline void wait_for_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 0;" ::: "memory");
}

__device__ inline void load_a(unsigned (&a)[4], const unsigned short *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address_of(row)) : "memory");
}

__device__ inline void load_b(unsigned (&b)[2], const unsigned short *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(b[0]), "=r"(b[1]) : "r"(address_of(row)) : "memory");
}

__device__ inline void load_b_turned(unsigned (&b)[2], const unsigned short *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(b[0]), "=r"(b[1]) : "r"(address_of(row)) : "memory");
}

#define MULTIPLY(dtype)                                                                                          \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." #dtype "." #dtype ".f32 "                              \
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                               \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

__device__ inline void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], f16) { MULTIPLY(f16); }
__device__ inline void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], bf16) { MULTIPLY(bf16); }

template <typename T, bool turned>
__device__ void product(const unsigned short *a, const unsigned short *b, const float *c, float *d) {
    __shared__ __align__(16) unsigned short a_tile[16 * 16], b_tile[16 * 8];
    int lane = threadIdx.x;
    copy_async(a_tile + 8 * lane, a + 8 * lane);
    if (lane < 16) copy_async(b_tile + 8 * lane, b + 8 * lane);
    wait_for_copies();
    __syncwarp();

    // Lane i names row i of the matrices of 8 x 8 that ldmatrix reads: eight of the first, eight of the next ...
    unsigned a_part[4], b_part[2];
    load_a(a_part, a_tile + lane % 16 * 16 + lane / 16 * 8);
    if (turned) load_b_turned(b_part, b_tile + lane % 16 * 8);
    else load_b(b_part, b_tile + lane % 8 * 16 + lane / 8 % 2 * 8);

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
