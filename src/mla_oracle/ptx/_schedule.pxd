# SPDX-License-Identifier: Apache-2.0
# Which lanes execute next. Those with the smallest pc do, in all warps together, until they come to where others
# wait, branch apart, or stop: so that lanes that parted meet again at the first instruction they share.
# A lane that spins on what another lane of its block would have to write therefore never sees it: RUNAWAY.
from libc.stdint cimport int32_t, uint32_t

from mla_oracle.ptx._access cimport load, store
from mla_oracle.ptx._async cimport commit, copy, none_unfinished, wait
from mla_oracle.ptx._atomic cimport atomic
from mla_oracle.ptx._barriers cimport arrive, complete
from mla_oracle.ptx._block cimport (
    AT_BARRIER, AT_COLLECTIVE, BARRIERS, EXITED, RUNNING, Block, Instr, fail, row,
)
from mla_oracle.ptx._bulk cimport bulk, none_copied
from mla_oracle.ptx._deadlock cimport refuse
from mla_oracle.ptx._execute cimport compute
from mla_oracle.ptx._flights cimport none_multiplied, unused
from mla_oracle.ptx._mbarrier cimport mbarrier
from mla_oracle.ptx._opcodes cimport *
from mla_oracle.ptx._tensor cimport matrices
from mla_oracle.ptx._warp cimport collective, ready
from mla_oracle.ptx._wgmma cimport warpgroup, whole_groups

cdef enum:
    NOWHERE = 0x7FFFFFFF


cdef inline bint choose(Block* b) noexcept nogil:
    """The next group; False: there is none, for all have exited or (b.fault) nobody can run on."""
    cdef Py_ssize_t k, lanes = b.launch.lanes, first = lanes, last = -1
    cdef int32_t pc = NOWHERE, other = NOWHERE
    for k in range(lanes):
        if b.states[k] == RUNNING:
            pc = min(pc, b.pcs[k])
    if pc == NOWHERE:
        if not refuse(b):
            return stuck(b)
        for k in range(lanes):
            if b.states[k] == RUNNING:
                pc = min(pc, b.pcs[k])
    b.dense = b.full = True
    for k in range(lanes):
        b.mask[k] = 0
        if (b.states[k] == RUNNING or b.states[k] == AT_COLLECTIVE) and b.pcs[k] == pc:
            b.mask[k] = 0xFFFFFFFFU
            b.states[k] = RUNNING
            first = min(first, k)
            last = k
        elif b.states[k] == RUNNING or (b.states[k] == AT_COLLECTIVE and b.pcs[k] > pc):
            other = min(other, b.pcs[k])
    b.low = first & ~31
    b.n = (last | 31) + 1 - b.low
    for k in range(b.low, b.low + b.n):
        b.dense = b.dense and b.mask[k]
        b.full = b.full and b.mask[k] == b.live[k]
    b.pc, b.other = pc, other
    return True


cdef inline bint stuck(Block* b) noexcept nogil:
    """Nobody runs. Always False; without a fault if all have exited."""
    cdef Py_ssize_t k
    b.low = 0
    if b.fault:
        return False
    for k in range(b.launch.lanes):
        if b.states[k] == AT_COLLECTIVE:
            b.pc = b.pcs[k]
            return fail(b, DIVERGENT_WARP, k, 0, 0, 0)
    for k in range(b.launch.lanes):
        if b.states[k] == AT_BARRIER:
            b.pc = b.pcs[k]
            return fail(b, BARRIER_DEADLOCK, k, b.barrier_of[k], b.barriers[b.barrier_of[k]].arrived, 0)
    return False


cdef inline void move_to(Block* b, const uint32_t* mask, int32_t pc) noexcept nogil:
    cdef Py_ssize_t k
    for k in range(b.n):
        if mask[k]:
            b.pcs[b.low + k] = pc


cdef inline bint leave(Block* b, const uint32_t* mask) noexcept nogil:
    """The lanes exit, which may complete a barrier others wait at."""
    cdef Py_ssize_t k
    cdef int32_t which
    if b.launch.checks and not none_unfinished(b, mask):
        return False
    if b.shadow.told != NULL and not (none_copied(b, mask) and none_multiplied(b, mask)):
        return False
    for k in range(b.n):
        if mask[k]:
            b.states[b.low + k], b.live[b.low + k] = EXITED, 0
    b.idle = 0
    for which in range(BARRIERS):
        if b.barriers[which].arrived and b.barriers[which].count == 0 and not complete(b, which):
            return False
    return True


cdef inline bint park(Block* b, const Instr* i, const uint32_t* mask, const uint32_t* waiting) noexcept nogil:
    """Lanes of warps that are not complete wait for the rest; the others come back to this instruction."""
    cdef Py_ssize_t k
    for k in range(b.n):
        if mask[k]:
            b.pcs[b.low + k] = b.pc
            if waiting[(b.low + k) >> 5]:
                b.states[b.low + k] = AT_COLLECTIVE
    return True


# What an instruction means for the group.
cdef enum Step:
    NEXT, JUMP, REGROUP, STOP


cdef inline int branch(Block* b, const Instr* i, const uint32_t* mask, bint all_taken) noexcept nogil:
    cdef Py_ssize_t k
    if i.op == BRA and all_taken:
        b.pc = <int32_t>i.imm
        return JUMP
    if i.op == BRA:
        move_to(b, mask, <int32_t>i.imm)
        return REGROUP
    for k in range(b.n):    # brx.idx: a table from i.imm, i.second long
        if mask[k]:
            if (<uint32_t*>row(b, i.operand[0]))[k] >= <uint32_t>i.second:
                fail(b, TRAPPED, b.low + k, 0, 0, 0)
                return STOP
            b.pcs[b.low + k] = b.launch.targets[i.imm + (<uint32_t*>row(b, i.operand[0]))[k]]
    return REGROUP


cdef inline int control(Block* b, const Instr* i, uint32_t* mask, bint all_taken) noexcept nogil:
    cdef int changed
    # bra, brx.idx, ret and exit (9.7.12.3 - 9.7.12.7), membar and fence (9.7.13.4), trap (9.7.19.4)
    if i.op == BRA or i.op == BRX:
        return branch(b, i, mask, all_taken)
    if i.op == EXIT:
        return REGROUP if leave(b, mask) else STOP
    if i.op == FENCE:
        return NEXT
    if i.op == TRAP:
        fail(b, TRAPPED, b.low, 0, 0, 0)
        return STOP
    if i.op > FENCE:
        changed = mbarrier(b, i, mask) if i.op < BULK_LOAD else bulk(b, i, mask)
        return STOP if changed < 0 else REGROUP if changed else NEXT
    return REGROUP if arrive(b, i, mask) else STOP


cdef inline int memory(Block* b, const Instr* i, const uint32_t* mask) noexcept nogil:
    cdef bint well = True
    if i.op == LOAD:
        well = load(b, i, mask)
    elif i.op == STORE:
        well = store(b, i, mask)
    elif i.op == CP_ASYNC:
        well = copy(b, i, mask)
    elif i.op == ATOM or i.op == RED:
        well = atomic(b, i, mask)
    elif b.launch.checks:
        if i.op == CP_COMMIT:
            commit(b, mask)
        else:
            wait(b, mask, <uint32_t>i.imm, i.op == CP_WAIT_ALL)
    return NEXT if well else STOP


cdef inline int warps(Block* b, const Instr* i, const uint32_t* mask) noexcept nogil:
    cdef uint32_t waiting[32]
    cdef int k, state
    for k in range(32):
        waiting[k] = 0
    state = ready(b, i, mask, waiting)
    if state > 0 and (i.op == WGMMA_F16 or i.op == WGMMA_BF16 or i.op == SETMAXNREG):
        state = whole_groups(b, mask, waiting)
    if state < 0:
        return STOP
    if state == 0:
        park(b, i, mask, waiting)
        return REGROUP
    if i.op >= WGMMA_F16:
        return NEXT if warpgroup(b, i, mask) else STOP
    return NEXT if (collective(b, i, mask) if i.op < LDMATRIX else matrices(b, i, mask)) else STOP


cdef inline int guard(Block* b, const Instr* i) noexcept nogil:
    """Fill b.guarded; how many of the group's lanes its predicate lets through: 0 none, 1 some, 2 all."""
    cdef const uint32_t* p = <const uint32_t*>row(b, i.guard)
    cdef uint32_t flip = 0xFFFFFFFFU if i.negated else 0, some = 0, missing = 0
    cdef Py_ssize_t k
    cdef const uint32_t* mask = b.mask + b.low
    cdef uint32_t* out = b.guarded + b.low
    for k in range(b.n):
        out[k] = mask[k] & (p[k] ^ flip)
        some |= out[k]
        missing |= mask[k] ^ out[k]
    return (1 if missing else 2) if some else 0


cdef inline int step(Block* b, const Instr* i) noexcept nogil:
    """One instruction, for those lanes of the group its predicate lets through."""
    cdef uint32_t* mask = b.mask + b.low
    cdef bint all_taken = True
    cdef int through = 2
    if i.guard >= 0:
        through = guard(b, i)
        if through == 0:
            return NEXT
        if through == 1:
            all_taken = False
            mask = b.guarded + b.low
    if i.suspects and i.op != WGMMA_F16 and i.op != WGMMA_BF16 and not unused(b, i, mask):
        return STOP
    if i.op < LAST_CONVERT:
        compute(b, i, mask, b.full and all_taken)
        return NEXT
    if i.op > LAST_WARP and i.op < LAST_MEMORY:
        return memory(b, i, mask)
    if not all_taken:
        # Lanes that are let by stand behind the instruction already.
        move_to(b, b.mask + b.low, b.pc + 1)
    if i.op < LAST_WARP:
        return warps(b, i, mask)
    return control(b, i, mask, all_taken)


# How far a block has come.
cdef enum Outcome:
    FINISHED, PAUSED, FAULTY


cdef inline int run_block(Block* b) noexcept nogil:
    """Until every lane has exited, b.fault says what is wrong, or b.pause instructions are done: an Outcome."""
    cdef const Instr* i
    cdef int done
    while choose(b):
        while True:
            i = b.launch.code + b.pc
            if b.steps >= b.pause:
                move_to(b, b.mask + b.low, b.pc)
                return PAUSED
            b.steps += 1
            done = step(b, i)
            if done == NEXT:
                b.pc += 1
            elif done == STOP:
                return FAULTY
            elif done == REGROUP:
                break
            if b.pc >= b.other:
                move_to(b, b.mask + b.low, b.pc)
                break
    return FAULTY if b.fault else FINISHED
