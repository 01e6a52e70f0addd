# SPDX-License-Identifier: Apache-2.0
# Registers of wgmma in flight (9.7.15.4): from its issue until a warp has waited for its group, nobody may touch what a
# product uses, but for products of the same shape that add to the same registers. flights.py says where to look.
from libc.stdint cimport int32_t, uint32_t

from mla_oracle.ptx._block cimport OPERANDS, Block, Instr, Products, fail
from mla_oracle.ptx._clocks cimport proxy_columns, told_of
from mla_oracle.ptx._opcodes cimport *

cdef enum:
    GROUP = 128         # lanes of a warpgroup

# Instr.flags
cdef enum WgmmaFlag:
    NEGATED = 1
    TURNED_A = 2
    TURNED_B = 4
    A_IN_REGISTERS = 8


cdef inline bint unused(Block* b, const Instr* i, const uint32_t* mask) noexcept nogil:
    """Are the suspects among its operands free of products in flight? A move takes along that they are not."""
    cdef Py_ssize_t first, k
    cdef uint32_t here, waited
    cdef uint32_t* using
    if b.shadow.told == NULL:
        return True
    for first in range(0, b.n, 32):
        here = 0
        for k in range(first, first + 32):
            here |= mask[k]
        if not here:
            continue
        using = b.in_flight + ((b.low + first) >> 5) * b.launch.rows
        waited = b.products[(b.low + first) >> 5].waited
        if i.op == MOV_32 and i.suspects & 2 and using[i.operand[1]] >> 10 > waited:
            using[i.operand[0]] = using[i.operand[1]]
            continue
        for k in range(OPERANDS):
            if i.suspects >> k & 1 and using[i.operand[k]] >> 10 > waited:
                return fail(b, IN_USE, b.low + first, i.operand[k], 0, 0)
    return True


cdef inline bint take_off(Block* b, const Instr* i, Py_ssize_t lane, uint32_t group) noexcept nogil:
    """The registers of a product of one warp are in flight from here. Those of D may be so already if N is the same."""
    cdef uint32_t* using = b.in_flight + (lane >> 5) * b.launch.rows
    cdef const int32_t* units = b.launch.targets + i.imm
    cdef uint32_t waited = b.products[lane >> 5].waited
    cdef int k
    if i.suspects:
        return fail(b, WGMMA_UNFENCED, lane, 0, 0, 0)
    for k in range(4 if i.flags & A_IN_REGISTERS else 0):
        if using[i.operand[k]] >> 10 > waited and not using[i.operand[k]] & 1:
            return fail(b, IN_USE, lane, i.operand[k], 0, 0)
        using[i.operand[k]] = group << 10 | 1
    for k in range(i.second):
        if using[units[k]] >> 10 > waited and using[units[k]] & 1023 != <uint32_t>i.count:
            return fail(b, IN_USE, lane, units[k], 0, 0)
        using[units[k]] = group << 10 | <uint32_t>i.count
    return True


cdef inline void settle_products(Block* b, const Instr* i, Py_ssize_t first) noexcept nogil:
    """commit_group and wait_group of one warp."""
    cdef Products* p = b.products + (first >> 5)
    cdef Py_ssize_t k, column = 2 * proxy_columns(b) + first // GROUP
    if i.op == WGMMA_COMMIT:
        p.committed += 1
    elif i.op == WGMMA_WAIT and p.committed > <uint32_t>i.imm:
        p.waited = max(p.waited, p.committed - <uint32_t>i.imm)
        for k in range(first, first + 32):
            told_of(b, k)[column] = max(told_of(b, k)[column], p.waited + 1)


cdef inline bint none_multiplied(Block* b, const uint32_t* mask) noexcept nogil:
    """Before the lanes in `mask` exit: are products in flight?"""
    cdef Py_ssize_t k
    for k in range(b.n):
        if mask[k] and b.products[(b.low + k) >> 5].issued > b.products[(b.low + k) >> 5].waited:
            return fail(b, WGMMA_UNFINISHED, b.low + k, 0, 0, 0)
    return True
