// SPDX-License-Identifier: Apache-2.0
// Tensor cores of sm_90a: tiles as they read them, barriers in shared memory, the product of a warpgroup.
//
// A warpgroup is four warps; a product takes its matrices from shared memory and goes on while the threads do. PTX ISA,
// "Asynchronous warpgroup-level matrix instructions": of d [64, N] the lanes of warp w hold of rows 16 w + lane / 4 and
// 8 below the two neighbours at columns 8 j + 2 (lane % 4), in d[4 j] and d[4 j + 1], d[4 j + 2] and d[4 j + 3].
//
// A tile is boxes of 64 columns; a box has 128 bytes of each of its 64 rows, and lies at a multiple of 1024. The chunks
// of a row are swizzled: chunk c of row r is where c ^ r % 8 would be ("128-byte swizzling mode").
#pragma once
#include "mma.cuh"

constexpr int WARPGROUP = 4 * WARP;
constexpr int BOX = 64;                             // rows and columns of a box
constexpr int ROW_OF_BOX = 128, BOX_BYTES = BOX * ROW_OF_BOX;
constexpr int STEP = 16;                            // columns of a product's factors

__device__ inline unsigned in_tile(int row, int chunk) {    // bytes from its first box
    return chunk / 8 * BOX_BYTES + row * ROW_OF_BOX + CHUNK * (chunk % 8 ^ row % 8);
}

// What a product is told of a matrix that begins at `shared`: eight rows are 1024 bytes; where its rows are the columns
// of the product ("turned": MN-major), 64 columns are a box. STEP columns on is 32 bytes on, STEP rows on 2048.
__device__ inline unsigned long long matrix_at(unsigned shared) {
    return 1ull << 62 | (8ull * ROW_OF_BOX >> 4) << 32 | (unsigned long long)BOX_BYTES >> 4 << 16 | shared >> 4;
}

// What this thread wrote or saw copied to shared memory is there for products that are begun after it, by whoever met it
// at a barrier since.
__device__ inline void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Before the first product, and before each whose d other instructions wrote to.
__device__ inline void before_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void end_of_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until every product of this warpgroup has ended, d's among them.
template <int N>
__device__ inline void wait_for_products(float (&d)[N]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");    // so that it is read no earlier
}

#define TO_32                                                                                                    \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                     \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TO_64                                                                                                    \
    TO_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                   \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TO_128                                                                                                   \
    TO_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                   \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                           \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "               \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define BOTH_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define BOTH_16(i) BOTH_4(i), BOTH_4(i + 4), BOTH_4(i + 8), BOTH_4(i + 12)
#define BOTH_32(i) BOTH_16(i), BOTH_16(i + 16)
#define BOTH_64(i) BOTH_32(i), BOTH_32(i + 32)
#define BOTH_128(i) BOTH_64(i), BOTH_64(i + 64)

// d [64, N] of a warpgroup = a [64, STEP] b [STEP, N], plus d if `more`. `TURNED`: b is in memory as it is written here;
// otherwise its columns are rows there.
#define PRODUCT(N, COUNT, A, B, MORE, TURN, dtype)                                                               \
    template <int TURNED>                                                                                        \
    __device__ inline void multiply(float (&d)[COUNT], unsigned long long a, unsigned long long b, int more, dtype) { \
        asm volatile("{\n\t.reg .pred more;\n\tsetp.ne.b32 more, %" #MORE ", 0;\n\t"                             \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #dtype "." #dtype " {" TO_##COUNT "}, "   \
                     "%" #A ", %" #B ", more, 1, 1, 0, %" #TURN ";\n\t}"                                         \
                     : BOTH_##COUNT(0) : "l"(a), "l"(b), "r"(more), "n"(TURNED) : "memory");                     \
    }

PRODUCT(64, 32, 32, 33, 34, 35, f16)
PRODUCT(64, 32, 32, 33, 34, 35, bf16)
PRODUCT(128, 64, 64, 65, 66, 67, f16)
PRODUCT(128, 64, 64, 65, 66, 67, bf16)
PRODUCT(256, 128, 128, 129, 130, 131, f16)
PRODUCT(256, 128, 128, 129, 130, 131, bf16)

// --- a barrier in shared memory: it ends a phase when as many have arrived as it expects, and begins the next

using Barrier = unsigned long long;

__device__ inline void expect(Barrier &barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address_of(&barrier)), "r"(arrivals) : "memory");
}

__device__ inline void arrive(Barrier &barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address_of(&barrier)) : "memory");
}

// This thread arrives when all that it has begun to copy is there.
__device__ inline void arrive_when_copied(Barrier &barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address_of(&barrier)) : "memory");
}

// Until the phase of this parity has ended: the first is 0, the one after it 1, the next 0.
__device__ inline void wait(Barrier &barrier, int parity) {
    int ended = 0;
    while (!ended)
        asm volatile("{\n\t.reg .pred ended;\n\t"
                     "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n\t"
                     "selp.b32 %0, 1, 0, ended;\n\t}"
                     : "=r"(ended) : "r"(address_of(&barrier)), "r"(parity) : "memory");
}

// `threads` threads meet; barrier 0 is __syncthreads'.
__device__ inline void meet(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// A warpgroup gives registers back, or waits until there are as many: of each thread, where all began with as many.
template <int REGISTERS>
__device__ inline void keep_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

template <int REGISTERS>
__device__ inline void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
