// SPDX-License-Identifier: Apache-2.0
// One form of wgmma to a kernel, so that a GPU's bits can be laid beside the interpreter's: gpu/check/products.py.
//
// A block is a warpgroup and makes one product of what its part of `image_`, `size` words, is in shared memory: there,
// the matrices lie as the descriptors say, whose addresses count from the first byte. Fragments are as the instruction
// takes them: of each thread four words of a where it is held in registers, COUNT of c and d. c is added if `more`.
#include "wgmma.cuh"

#define TO_4 "%0, %1, %2, %3"
constexpr int MOST = 96 << 10;  // bytes of an image

#define PROBE(name, COUNT, MORE, instruction, ...)                                                               \
    DYNAMIC_SMEM(name, MOST)                                                                                     \
    extern "C" __global__ void __launch_bounds__(WARPGROUP)                                                      \
    name(const unsigned *image_, int size, unsigned long long left_, unsigned long long right_, int more,        \
         const unsigned *a_, const unsigned *c_, unsigned *d_) {                                                 \
        extern __shared__ __align__(1024) unsigned image[];                                                      \
        long long place = (long long)blockIdx.x * WARPGROUP + threadIdx.x;                                       \
        for (int i = threadIdx.x; i < size; i += WARPGROUP) image[i] = image_[(long long)blockIdx.x * size + i]; \
        show_to_products();                                                                                      \
        __syncthreads();                                                                                         \
        [[maybe_unused]] unsigned a[4];                                                                          \
        float d[COUNT];                                                                                          \
        for (int j = 0; j < 4; j++) a[j] = a_[4 * place + j];                                                    \
        for (int j = 0; j < COUNT; j++) d[j] = __uint_as_float(c_[COUNT * place + j]);                           \
        unsigned long long left = left_ + (address_of(image) >> 4), right = right_ + (address_of(image) >> 4);   \
        before_products();                                                                                       \
        asm volatile("{\n\t.reg .pred more;\n\tsetp.ne.b32 more, %" #MORE ", 0;\n\t"                             \
                     "wgmma.mma_async.sync.aligned." instruction ";\n\t}"                                        \
                     : BOTH_##COUNT(0) : __VA_ARGS__, "l"(right), "r"(more) : "memory");                         \
        end_of_products();                                                                                       \
        wait_for_products(d);                                                                                    \
        for (int j = 0; j < COUNT; j++) d_[COUNT * place + j] = __float_as_uint(d[j]);                           \
    }

// a in shared memory; SCALES: of a and b, TURNED: which of them are MN-major.
#define STORED(name, N, COUNT, A, B, MORE, dtype, SCALES, TURNED)                                                \
    PROBE(name, COUNT, MORE,                                                                                     \
          "m64n" #N "k16.f32." #dtype "." #dtype " {" TO_##COUNT "}, %" #A ", %" #B ", more, " SCALES ", " TURNED, \
          "l"(left))
STORED(wgmma_m64n64k16_bf16_stored, 64, 32, 32, 33, 34, bf16, "1, 1", "0, 0")
STORED(wgmma_m64n64k16_f16_stored_turned_both, 64, 32, 32, 33, 34, f16, "1, 1", "1, 1")
STORED(wgmma_m64n256k16_bf16_stored_turned_b, 256, 128, 128, 129, 130, bf16, "-1, 1", "0, 1")
STORED(wgmma_m64n8k16_f16_stored_turned_a, 8, 4, 4, 5, 6, f16, "1, -1", "1, 0")

// a in registers, which are K-major.
#define HELD(name, N, COUNT, A, B, C, D, RIGHT, MORE, dtype, SCALES, TURNED)                                     \
    PROBE(name, COUNT, MORE,                                                                                     \
          "m64n" #N "k16.f32." #dtype "." #dtype " {" TO_##COUNT "}, {%" #A ", %" #B ", %" #C ", %" #D "}, "     \
          "%" #RIGHT ", more, " SCALES ", " TURNED,                                                              \
          "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]))
HELD(wgmma_m64n8k16_f16_held, 8, 4, 4, 5, 6, 7, 8, 9, f16, "1, 1", "0")
HELD(wgmma_m64n8k16_bf16_held, 8, 4, 4, 5, 6, 7, 8, 9, bf16, "1, 1", "0")
HELD(wgmma_m64n64k16_f16_held, 64, 32, 32, 33, 34, 35, 36, 37, f16, "-1, -1", "0")
HELD(wgmma_m64n256k16_f16_held_turned_b, 256, 128, 128, 129, 130, 131, 132, 133, f16, "1, 1", "1")
