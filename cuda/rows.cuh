// SPDX-License-Identifier: Apache-2.0
// Latent rows as a cache stores them, and how packed ones become rows of f16 or bf16.
//
//   PACKED 0    D numbers of the query's dtype
//   PACKED 1    D e4m3 codes; their one scale is folded into softmax_scale and the output
//   PACKED 2    fp8_ds_mla, 656 bytes: 512 e4m3 codes, 4 f32 scales of 128 codes each, 64 bf16 rope numbers;
//   PACKED 3    its scales rounded to bf16 before they multiply; PACKED 4: of its scales, the exponent alone
//
// Products are formed in f32 and rounded once.
#pragma once
#include "mma.cuh"

#ifndef PACKED
#define PACKED 0
#endif

constexpr int LATENT = 512, GROUP = 128, SCALES_AT = LATENT, ROPE_AT = LATENT + LATENT / GROUP * 4;  // of fp8_ds_mla
constexpr int ROW_BYTES = PACKED > 1 ? ROPE_AT + 2 * (D - LATENT) : PACKED ? D : 2 * D;
static_assert(PACKED < 2 || D == LATENT + 64, "a row of fp8_ds_mla has 576 numbers");

template <typename Stored> struct RowOf { using type = Stored; };
#if PACKED
template <> struct RowOf<f16> { using type = unsigned char; };
template <> struct RowOf<bf16> { using type = unsigned char; };
#endif

// e4m3: exact. Below 2^-6 a code is subnormal, and so are these bits until they are multiplied.
__device__ inline float of_code(unsigned code) {
    float magnitude = __uint_as_float((code & 0x7f) << 20) * __uint_as_float(247 << 23);  // 2^120
    magnitude = (code & 0x7f) == 0x7f ? __uint_as_float(0x7fc00000) : magnitude;
    return code & 0x80 ? -magnitude : magnitude;
}

__device__ inline float of_scale(float scale) {
    if (PACKED == 3) return __uint_as_float(pack(0, scale, bf16()));
    if (PACKED == 4) {              // as an e8m0 code: 0 is 2^-127, all ones is NaN
        unsigned bits = __float_as_uint(scale) & 0x7f800000;
        return __uint_as_float(bits == 0 ? 0x00400000 : bits == 0x7f800000 ? 0x7fc00000 : bits);
    }
    return scale;
}

// One chunk of a tile, eight numbers from column 8 `chunk` on, of the packed row that lies at `row`.
template <typename Stored>
__device__ inline uint4 unpack(const unsigned char *row, int chunk) {
    if (PACKED > 1 && chunk >= LATENT / PER_CHUNK)
        return *(const uint4 *)(row + ROPE_AT + (chunk - LATENT / PER_CHUNK) * CHUNK);
    uint2 codes = *(const uint2 *)(row + chunk * PER_CHUNK);
    float scale = PACKED > 1 ? of_scale(*(const float *)(row + SCALES_AT + chunk / (GROUP / PER_CHUNK) * 4)) : 1;
    unsigned both[4];
    for (int i = 0; i < 4; i++) {
        unsigned pair = (i < 2 ? codes.x : codes.y) >> i % 2 * 16;
        both[i] = pack(of_code(pair & 0xff) * scale, of_code(pair >> 8 & 0xff) * scale, Stored());
    }
    return make_uint4(both[0], both[1], both[2], both[3]);
}
