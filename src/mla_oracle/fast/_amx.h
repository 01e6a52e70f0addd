/* SPDX-License-Identifier: Apache-2.0
 * AMX tiles, as much of them as _amx.pxd needs: 8 tiles of 16 rows of 64 bytes, numbered by literals.
 *
 * The statements say that they touch memory (GCC 12's own intrinsics do not, and stores before them get lost).
 * Where the build has no AMX, HAS_TILES is 0 and everything here does nothing: the code that calls it is dead.
 */
#ifndef MLA_ORACLE_AMX_H
#define MLA_ORACLE_AMX_H

#include "_vec.h"

#if defined __AMX_BF16__
#include <immintrin.h>
#define HAS_TILES 1

static const struct {
    unsigned char palette, start_row, reserved[14];
    unsigned short row_bytes[16];
    unsigned char rows[16];
} tile_shapes __attribute__((aligned(64))) = {
    .palette = 1,
    .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
    .rows = {16, 16, 16, 16, 16, 16, 16, 16},
};

static inline void tiles_on(void)
{
    __asm__ volatile("ldtilecfg %0" :: "m"(tile_shapes) : "memory");
}

static inline void tiles_off(void)
{
    __asm__ volatile("tilerelease" ::: "memory");
}

#define tile_zero(t) ({ __asm__ volatile("tilezero %%tmm" #t ::: "memory"); })
#define tile_load(t, at, stride) ({ __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t \
    :: "r"((const void*)(at)), "r"((long)(stride)) : "memory"); })
#define tile_store(t, at, stride) ({ __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" \
    :: "r"((void*)(at)), "r"((long)(stride)) : "memory"); })
/* c[16, 16] f32 += a[16, 32] b[32, 16], both bf16; b as pairs of its rows: [16, 16, 2]. */
#define tile_multiply(c, a, b) ({ __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::); })

/* Lanes of 4 or 2 bytes out of two registers: lane i is number index[i] of the two in a row. */
static inline veci pick_words(veci index, veci a, veci b)
{
    return (veci)_mm512_permutex2var_epi32((__m512i)a, (__m512i)index, (__m512i)b);
}

static inline veci pick_halves(veci index, veci a, veci b)
{
    return (veci)_mm512_permutex2var_epi16((__m512i)a, (__m512i)index, (__m512i)b);
}

#else
#define HAS_TILES 0
#define tiles_on() ((void)0)
#define tiles_off() ((void)0)
#define tile_zero(t) ((void)0)
#define tile_load(t, at, stride) ((void)(at), (void)(stride))
#define tile_store(t, at, stride) ((void)(at), (void)(stride))
#define tile_multiply(c, a, b) ((void)0)
#define pick_words(index, a, b) ((void)(index), (void)(b), (a))
#define pick_halves(index, a, b) ((void)(index), (void)(b), (a))
#endif

#endif
