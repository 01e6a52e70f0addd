/* SPDX-License-Identifier: Apache-2.0
 * One register of numbers as a C type, so that Cython's own + and * act on whole registers.
 *
 * The build gives REAL (float or double) and -march; the register and tile sizes follow from those.
 * Nothing is computed here: the loops are in _tiles.pxd and the kernels.
 */
#ifndef MLA_ORACLE_VEC_H
#define MLA_ORACLE_VEC_H

#include <math.h>

typedef REAL real;
#define IS_DOUBLE (sizeof(REAL) == 8)

enum { PAIR = 8 / sizeof(REAL) };   /* two floats, one double */

/* Registers: 32 of 64 bytes, 16 of 32, 16 of 16. A score tile is TOKENS x VECS accumulators, a value tile
 * HEADS x VECS. The narrow score tile has one register of heads: there numbers of a row are spread over a
 * register by pairs, which halves the loads, and the accumulators are TOKENS x PAIR. */
#if defined __AMX_BF16__
#define VEC_BYTES 64
enum { WIDE_TOKENS = 8, WIDE_VECS = 2, NARROW_TOKENS = 8, VALUE_HEADS = 4, VALUE_VECS = 4 };
#elif defined __AVX512F__
#define VEC_BYTES 64
enum { WIDE_TOKENS = 6, WIDE_VECS = 4, NARROW_TOKENS = 12, VALUE_HEADS = 8, VALUE_VECS = 2 };
#elif defined __AVX__
#define VEC_BYTES 32
enum { WIDE_TOKENS = 6, WIDE_VECS = 2, NARROW_TOKENS = 12 / PAIR, VALUE_HEADS = 4, VALUE_VECS = 3 };
#else
#define VEC_BYTES 16
enum { WIDE_TOKENS = 6, WIDE_VECS = 2, NARROW_TOKENS = 12 / PAIR, VALUE_HEADS = 2, VALUE_VECS = 4 };
#endif

enum {
    LANES = VEC_BYTES / sizeof(REAL),
    WIDE = LANES * WIDE_VECS,
    COLUMNS = LANES * VALUE_VECS,
    LINE = 64 / sizeof(REAL),
    KEYS = 4,       /* whose values are added in one turn of a loop: its end is foreseen if its turns are few */
#if defined __AMX_BF16__
    TILE = 128,     /* keys of a softmax step: a multiple of every number of TOKENS */
#else
    TILE = 96,
#endif
    PANEL = 4096,   /* numbers of the turned query that a pass over the tile's keys keeps in L1 */
    WIDE_RATE = 3, NARROW_RATE = 6, VALUE_RATE = 3  /* lines to prefetch per LINE of d, and per KEYS: few at
                                                       a time, over scores and values both: none waits */
};

typedef REAL vec __attribute__((vector_size(VEC_BYTES), aligned(1), may_alias));

/* Integers of the same width, for the exponent bits and for masks. */
#define WORD __typeof__(__builtin_choose_expr(IS_DOUBLE, 0LL, 0))
typedef WORD word;
typedef WORD veci __attribute__((vector_size(VEC_BYTES), aligned(1), may_alias));

/* PAIR numbers as 8 bytes, and a register of them. */
typedef long long stored_pair __attribute__((aligned(1), may_alias));
typedef long long pairs __attribute__((vector_size(VEC_BYTES), aligned(1), may_alias));

/* 1.5 * 2^MANTISSA: adding it rounds to an integer, whose bits are then the lowest of the sum. */
enum { MANTISSA = sizeof(REAL) == 8 ? 52 : 23, BIAS = sizeof(REAL) == 8 ? 1023 : 127 };
#define ROUNDER ((REAL)(IS_DOUBLE ? 0x1.8p52 : 0x1.8p23))

/* The smallest normal number. */
#define SMALLEST ((REAL)(IS_DOUBLE ? 0x1p-1022 : 0x1p-126))

/* Numbers as they lie in a cache: at any byte. */
typedef REAL stored_real __attribute__((aligned(1), may_alias));
typedef float stored_float __attribute__((aligned(1), may_alias));
typedef double stored_double __attribute__((aligned(1), may_alias));
typedef unsigned short stored_half __attribute__((aligned(1), may_alias));

static inline vec splat(real x)
{
    return (vec){0} + x;
}

static inline pairs splat_pair(stored_pair x)
{
    return (pairs){0} + x;
}

/* a where `left > right` in that lane, b elsewhere; false where either is NaN. */
static inline vec where_greater(vec left, vec right, vec a, vec b)
{
    veci mask = (veci)(left > right);
    return (vec)(((veci)a & mask) | ((veci)b & ~mask));
}

#endif
