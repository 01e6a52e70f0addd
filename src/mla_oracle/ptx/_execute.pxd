# SPDX-License-Identifier: Apache-2.0
# One instruction that computes, for the lanes of the group: arguments in, flushed if .ftz; results written whole if
# every live lane executes (a lane that has exited needs its registers no more), else to scratch and then masked in.
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from mla_oracle.ptx._block cimport OPERANDS, PIECE, Block, Instr, sized
from mla_oracle.ptx._convert cimport convert
from mla_oracle.ptx._float cimport floating
from mla_oracle.ptx._half cimport FLUSH, ROUNDING, SATURATE
from mla_oracle.ptx._integer cimport integer
from mla_oracle.ptx._opcodes cimport *

cdef extern from "<fenv.h>" nogil:
    int fesetround(int mode)
    int FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD


cdef inline void blend(uint8_t* d, const uint8_t* s, const uint32_t* mask, int width, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t k
    if width == 4:
        for k in range(n):
            (<uint32_t*>d)[k] = (<uint32_t*>s)[k] if mask[k] else (<uint32_t*>d)[k]
    elif width == 8:
        for k in range(n):
            (<uint64_t*>d)[k] = (<uint64_t*>s)[k] if mask[k] else (<uint64_t*>d)[k]
    else:
        for k in range(n):
            (<uint16_t*>d)[k] = (<uint16_t*>s)[k] if mask[k] else (<uint16_t*>d)[k]


cdef inline void flush(const uint32_t* a, uint32_t* d, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t k
    for k in range(n):
        d[k] = a[k] if a[k] & 0x7F800000 else a[k] & 0x80000000U


cdef inline void saturate(float* d, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t k
    for k in range(n):
        d[k] = (1 if d[k] > 1 else d[k]) if d[k] > 0 else 0


cdef inline void set_rounding(int mode) noexcept nogil:
    fesetround(
        FE_TOWARDZERO if mode == ZERO else FE_DOWNWARD if mode == DOWN else FE_UPWARD if mode == UP else FE_TONEAREST
    )


cdef inline void compute(Block* b, const Instr* i, const uint32_t* mask, bint all_live) noexcept nogil:
    """Everything up to LAST_CONVERT: one result, or none that depends on another lane."""
    cdef uint8_t* args[4]
    cdef uint8_t* out
    cdef int k, flags = i.flags if i.op > LAST_INTEGER else 0
    # Conversions other than these round by themselves, and may build on rounding to nearest.
    cdef int mode = flags & ROUNDING if i.op < LAST_FLOAT or i.op in (CVT_F32_F64, CVT_FLOAT_INT) else NEAREST
    for k in range(4):
        args[k] = sized(b, i.operand[1 + k], i.size) if k == 0 else sized(b, i.operand[1 + k], argument_width(i, k))
    if flags & FLUSH:
        for k in range(3):
            if i.operand[1 + k] >= 0:
                flush(<uint32_t*>args[k], <uint32_t*>(b.scratch + (1 + k) * PIECE), b.n * i.count)
                args[k] = b.scratch + (1 + k) * PIECE
    out = sized(b, i.operand[0], i.width) if all_live else b.scratch
    if i.op < LAST_INTEGER:
        integer(i, out, args, b.n)
    else:
        if mode != NEAREST:
            set_rounding(mode)
        if i.op < LAST_FLOAT:
            floating(i, out, args, b.n)
        else:
            convert(i, out, args, b.n)
        if mode != NEAREST:
            set_rounding(NEAREST)
        if flags & FLUSH and not (EQ_F32 <= i.op <= NUM_F64):
            flush(<uint32_t*>out, <uint32_t*>out, b.n * i.count)
        if flags & SATURATE:
            saturate(<float*>out, b.n * i.count)
    if not all_live:
        blend(sized(b, i.operand[0], i.width), out, mask, i.width, b.n)


cdef inline int argument_width(const Instr* i, int k) noexcept nogil:
    """Bytes per lane of argument k > 0: the first's, but for shift counts, positions and predicates."""
    if SHL_16 <= i.op <= SHR_U64 or i.op in (BFE_U, BFE_S):
        return 4
    if i.op == BFI:
        return i.size if k == 1 else 4
    if SELECT_16 <= i.op <= SELECT_64 and k == 2:
        return 4
    return i.size
