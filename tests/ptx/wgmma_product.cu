// SPDX-License-Identifier: Apache-2.0
// D [64, 64] = A [64, K] B [64, K]^T of bf16, warp-specialised: a warpgroup copies tiles of 64 numbers along K into two
// stages of shared memory, another multiplies them. Rows of a tile have 128 bytes, swizzled; an mbarrier says a
// stage is full, another that it is free. K is a multiple of 64.
constexpr int TILE = 64 * 128, STAGE = 2 * TILE, STAGES = 2, CONSUMERS = 128, PRODUCERS = 128;

__device__ unsigned address_of(const void *shared) { return (unsigned)__cvta_generic_to_shared(shared); }

__device__ void wait_for(unsigned barrier, int phase) {
    asm volatile("{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra AGAIN; }"
                 ::"r"(barrier), "r"(phase & 1) : "memory");
}

__device__ void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ void copy_tile(unsigned shared, const char *rows, long long row_bytes, int first) {
    for (int i = first; i < 64 * 8; i += PRODUCERS) {
        int row = i / 8, chunk = i % 8;
        unsigned at = shared + row * 128 + (chunk ^ row % 8) * 16;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(rows + row * row_bytes + chunk * 16)
                     : "memory");
    }
}

__device__ unsigned long long matrix_at(unsigned shared) {
    return (unsigned long long)(shared >> 4) | 1ull << 16 | (1024ull >> 4) << 32 | 1ull << 62;
}

#define EIGHT(f, i) f(i), f(i + 1), f(i + 2), f(i + 3), f(i + 4), f(i + 5), f(i + 6), f(i + 7)
#define HELD(i) "+f"(d[i])

__device__ void hold(float (&d)[32]) {
    asm volatile("" : EIGHT(HELD, 0), EIGHT(HELD, 8), EIGHT(HELD, 16), EIGHT(HELD, 24)::"memory");
}

__device__ void multiply(float (&d)[32], unsigned long long a, unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "%32, %33, 1, 1, 1, 0, 0;"
                 : EIGHT(HELD, 0), EIGHT(HELD, 8), EIGHT(HELD, 16), EIGHT(HELD, 24) : "l"(a), "l"(b) : "memory");
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + PRODUCERS)
wgmma_product(const char *a, const char *b, float *out, int tiles) {
    extern __shared__ __align__(1024) char shared[];
    __shared__ __align__(8) unsigned long long barriers[2 * STAGES];
    unsigned first = address_of(shared), full = address_of(barriers), free = full + 8 * STAGES;
    int thread = threadIdx.x, lane = thread % 32;
    if (thread == 0) {
        for (int s = 0; s < STAGES; s++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(full + 8 * s), "n"(PRODUCERS) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(free + 8 * s), "n"(CONSUMERS) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();  // the mbarriers are there
    if (thread >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        for (int t = 0; t < tiles; t++) {
            int s = t % STAGES, turn = t / STAGES;
            wait_for(free + 8 * s, turn + 1);
            copy_tile(first + s * STAGE, a + t * 128, tiles * 128LL, thread - CONSUMERS);
            copy_tile(first + s * STAGE + TILE, b + t * 128, tiles * 128LL, thread - CONSUMERS);
            asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full + 8 * s) : "memory");
        }
        return;
    }
    float d[32] = {};
    for (int t = 0; t < tiles; t++) {
        int s = t % STAGES, turn = t / STAGES;
        wait_for(full + 8 * s, turn);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        hold(d);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        unsigned long long left = matrix_at(first + s * STAGE), right = matrix_at(first + s * STAGE + TILE);
        for (int k = 0; k < 4; k++) multiply(d, left + 2 * k, right + 2 * k);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        hold(d);
        arrive(free + 8 * s);  // the stage is free
        for (int i = 0; i < 32; i++) d[i] *= 0.5f;
    }
    for (int i = 0; i < 32; i++) {
        int row = thread / 32 * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        out[row * 64 + column] = d[i];
    }
}
