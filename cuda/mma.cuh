// SPDX-License-Identifier: Apache-2.0
// Tensor cores: 16-byte copies to shared memory, fragments from it, one product of 16 x 8 x 16.
//
// PTX ISA, "Warp-level matrix instructions": a lane holds of d [16, 8] the two neighbours at column 2 (lane % 4) of
// rows lane / 4 and lane / 4 + 8. Shared memory is addressed in bytes, as the instructions take it.
#pragma once
#include "common.cuh"

constexpr int CHUNK = 16;               // bytes of a copy, and of a row of a matrix that ldmatrix reads
constexpr int PER_CHUNK = CHUNK / 2;    // elements of it

__device__ inline unsigned address_of(const void *shared) { return (unsigned)__cvta_generic_to_shared(shared); }

// `bytes` of 16 are read, the rest of the 16 are zeros.
__device__ inline void copy_async(unsigned shared, const void *global, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

__device__ inline void end_of_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

__device__ inline void wait_for_groups() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// Lane i names row i of the matrices of 8 x 8; matrix by matrix, eight lanes each.
__device__ inline void load_matrices(unsigned (&a)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(row) : "memory");
}

__device__ inline void load_matrices(unsigned (&b)[2], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(b[0]), "=r"(b[1]) : "r"(row) : "memory");
}

__device__ inline void load_turned(unsigned (&b)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(row) : "memory");
}

__device__ inline void load_turned(unsigned (&b)[2], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(b[0]), "=r"(b[1]) : "r"(row) : "memory");
}

#define MULTIPLY(dtype)                                                                                          \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." #dtype "." #dtype ".f32 "                              \
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                               \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

__device__ inline void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned *b, f16) { MULTIPLY(f16); }
__device__ inline void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned *b, bf16) { MULTIPLY(bf16); }

// Two floats rounded to nearest, the first in the lower half.
__device__ inline unsigned pack(float low, float high, f16) {
    unsigned both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ inline unsigned pack(float low, float high, bf16) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// The two halves, 0 where one is not finite: its exponent is all ones.
__device__ inline unsigned finite_or_zero(unsigned both, unsigned exponent) {
    unsigned low = (both & exponent) == exponent ? 0 : both & 0xffff;
    unsigned high = (both >> 16 & exponent) == exponent ? 0 : both & 0xffff0000;
    return low | high;
}

__device__ inline unsigned exponent_of(f16) { return 0x7c00; }
__device__ inline unsigned exponent_of(bf16) { return 0x7f80; }

// Rows of CHUNKS chunks in shared memory, laid so that the same chunk of eight rows lies in eight different banks.
template <int CHUNKS>
struct Rows {
    static constexpr int STRIDE = CHUNKS % 8 ? CHUNKS | 1 : CHUNKS;  // chunks from row to row

    static __device__ unsigned at(int row, int chunk) {          // bytes from the first row
        return CHUNK * (row * STRIDE + (CHUNKS % 8 ? chunk : chunk ^ row % 8));
    }
};
