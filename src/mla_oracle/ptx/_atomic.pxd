# SPDX-License-Identifier: Apache-2.0
# atom and red (9.7.13.5, 9.7.13.6), lane after lane; blocks on other threads see each of them whole.
# Operands: [the old value], address, b, [c]. Instr.second says which Atomic.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from mla_oracle.ptx._access cimport find_addresses, find_space, fits_shared, in_global, in_local
from mla_oracle.ptx._block cimport Block, Instr, fail, sized
from mla_oracle.ptx._formats cimport quiet, to_bits
from mla_oracle.ptx._opcodes cimport *
from mla_oracle.ptx._races cimport ATOMIC, span_bits, writes
from mla_oracle.reference._common cimport from_bits

cdef extern from * nogil:
    bint swap_if "__atomic_compare_exchange_n"(uint64_t* at, uint64_t* old, uint64_t new, bint weak, int good, int bad)
    bint swap_if_narrow "__atomic_compare_exchange_n"(
        uint32_t* at, uint32_t* old, uint32_t new, bint weak, int good, int bad)
    int RELAXED "__ATOMIC_RELAXED"


cdef inline uint64_t combined(int which, int size, uint64_t old, uint64_t b, uint64_t c) noexcept nogil:
    """The new value. Signed numbers of 4 bytes are sign-extended already."""
    cdef double x, y
    if which == ATOM_ADD:
        return old + b
    if which == ATOM_ADD_F:
        if size == 4:
            return to_bits(quiet(from_bits(<uint32_t>old) + from_bits(<uint32_t>b)))
        memcpy(&x, &old, 8)
        memcpy(&y, &b, 8)
        x += y
        memcpy(&old, &x, 8)
        return old
    if which == ATOM_MIN_S:
        return old if <int64_t>old < <int64_t>b else b
    if which == ATOM_MIN_U:
        return min(old, b)
    if which == ATOM_MAX_S:
        return old if <int64_t>old > <int64_t>b else b
    if which == ATOM_MAX_U:
        return max(old, b)
    if which == ATOM_AND:
        return old & b
    if which == ATOM_OR:
        return old | b
    if which == ATOM_XOR:
        return old ^ b
    if which == ATOM_EXCH:
        return b
    if which == ATOM_CAS:
        return c if old == b else old
    if which == ATOM_INC:
        return 0 if old >= b else old + 1
    return b if old == 0 or old > b else old - 1


cdef inline uint64_t update(uint64_t place, int which, int size, uint64_t b, uint64_t c) noexcept nogil:
    """Change the number at a place on the host; what it was."""
    cdef bint signed = which == ATOM_MIN_S or which == ATOM_MAX_S
    cdef uint64_t old
    cdef uint32_t narrow
    if size == 8:
        old = (<uint64_t*>place)[0]
        while not swap_if(<uint64_t*>place, &old, combined(which, 8, old, b, c), False, RELAXED, RELAXED):
            pass
        return old
    narrow = (<uint32_t*>place)[0]
    if signed:
        b = <uint64_t><int64_t><int32_t>b
    while True:
        old = <uint64_t><int64_t><int32_t>narrow if signed else narrow
        if swap_if_narrow(<uint32_t*>place, &narrow, <uint32_t>combined(which, 4, old, b, c), False, RELAXED, RELAXED):
            return narrow


cdef inline uint64_t argument(const Block* b, int32_t unit, int size, Py_ssize_t k) noexcept nogil:
    return (<uint64_t*>sized(b, unit, 8))[k] if size == 8 else (<uint32_t*>sized(b, unit, 4))[k]


cdef inline bint atomic(Block* b, const Instr* i, const uint32_t* mask) noexcept nogil:
    cdef int space = i.kind, first = i.results + 1
    cdef Py_ssize_t k
    cdef uint64_t x, y = 0, address
    cdef uint16_t bits
    find_addresses(b, i, i.operand[i.results])
    if space == GENERIC:
        space = find_space(b, i, mask)
    if space < 0:
        return False
    if space == GLOBAL and not in_global(b, i, mask, True, True):
        return False
    if space == LOCAL and not in_local(b, i, mask, True, True):
        return False
    for k in range(b.n):
        if not mask[k]:
            continue
        if space == SHARED:
            address = b.where[k]
            if not fits_shared(b, b.low + k, address, i.size):
                return False
            bits = span_bits(<uint32_t>address, i.size)
            if b.launch.checks and b.shadow.written[address >> 4] & bits != bits:
                return fail(b, NEVER_WRITTEN, b.low + k, address, i.size, SHARED)
            if b.launch.checks and not writes(b, <uint32_t>(b.low + k), <uint32_t>address, i.size, NULL, ATOMIC):
                return False
            b.where[k] = <uint64_t>(b.shared + address)
        x = argument(b, i.operand[first], i.size, k)
        if i.operand[first + 1] >= 0:
            y = argument(b, i.operand[first + 1], i.size, k)
        x = update(b.where[k], i.second, i.size, x, y)
        if i.results and i.operand[0] >= 0:
            if i.size == 8:
                (<uint64_t*>sized(b, i.operand[0], 8))[k] = x
            else:
                (<uint32_t*>sized(b, i.operand[0], 4))[k] = <uint32_t>x
    return True
