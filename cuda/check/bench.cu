// SPDX-License-Identifier: Apache-2.0
// What timings need beside the kernels that are timed: inputs made where they lie, and the machine's own two limits.
#include "mma.cuh"

// A number in [-1, 1) of its place: a hash of 32 bits (the finaliser of MurmurHash3).
__device__ inline float noise(long long i, unsigned seed) {
    unsigned x = (unsigned)i * 0x9e3779b9u ^ (unsigned)(i >> 32) ^ seed;
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    return (int)(x ^ x >> 16) * 0x1p-31f;
}

// A thread per number.
extern "C" __global__ void __launch_bounds__(THREADS) bench_fill_f32(
    float *out, long long n, unsigned seed, float size
) {
    long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (i < n) out[i] = size * noise(i, seed);
}

// A thread per two numbers, n even.
#define FILL(Stored)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS) bench_fill_##Stored(                                   \
        unsigned *out, long long n, unsigned seed, float size                                                    \
    ) {                                                                                                          \
        long long i = 2 * ((long long)blockIdx.x * THREADS + threadIdx.x);                                       \
        if (i < n) out[i / 2] = pack(size * noise(i, seed), size * noise(i + 1, seed), Stored());                \
    }
FILL(f16)
FILL(bf16)

// Copy n chunks of 16 bytes, eight to a thread.
extern "C" __global__ void __launch_bounds__(THREADS) bench_copy(const uint4 *from, uint4 *to, long long n) {
    long long first = (long long)blockIdx.x * THREADS * 8 + threadIdx.x;
    uint4 x[8];
    for (int j = 0; j < 8; j++)
        if (first + j * THREADS < n) x[j] = from[first + j * THREADS];
    for (int j = 0; j < 8; j++)
        if (first + j * THREADS < n) to[first + j * THREADS] = x[j];
}

// Read n chunks of 16 bytes, eight to a thread, so that nothing else is left in the caches.
extern "C" __global__ void __launch_bounds__(THREADS) bench_read(const uint4 *from, unsigned *out, long long n) {
    long long first = (long long)blockIdx.x * THREADS * 8 + threadIdx.x;
    unsigned all = 0;
    for (int j = 0; j < 8; j++)
        if (first + j * THREADS < n) {
            uint4 x = from[first + j * THREADS];
            all |= x.x ^ x.y ^ x.z ^ x.w;
        }
    if (all == 0xdeadbeef) *out = all;  // it must be worth reading
}

// `steps` times eight products of 16 x 8 x 16 a warp, from registers alone: the rate of mma.sync and nothing else.
extern "C" __global__ void __launch_bounds__(THREADS) bench_mma_bf16(const unsigned *in, float *out, int steps) {
    unsigned a[4], b[2];
    float d[8][4] = {};
    for (int j = 0; j < 4; j++) a[j] = in[j * WARP + threadIdx.x % WARP];
    for (int j = 0; j < 2; j++) b[j] = in[(4 + j) * WARP + threadIdx.x % WARP];
    for (int step = 0; step < steps; step++)
        for (int j = 0; j < 8; j++) multiply(d[j], a, b, bf16());
    float sum = 0;
    for (int j = 0; j < 8; j++)
        for (int e = 0; e < 4; e++) sum += d[j][e];
    out[(long long)blockIdx.x * THREADS + threadIdx.x] = sum;
}

// Keep the stream busy for about `cycles` cycles, so that what is queued behind runs without gaps.
extern "C" __global__ void bench_wait(long long cycles) {
    long long begin = clock64();
    while (clock64() - begin < cycles) {}
}
