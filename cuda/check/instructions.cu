// SPDX-License-Identifier: Apache-2.0
// One instruction to a kernel, so that a GPU's bits can be laid beside the interpreter's: gpu/check/instructions.py.
//
// A kernel is called what its instruction is, with _ for its dots. Thread i reads word i of a, b and c and writes word
// i of d, but where a block is one warp and a lane has several words: ldmatrix, movmatrix, cp.async, mma. A number of
// 16 bits or fewer is the lower part of its word. Instructions newer than sm_80 are left out below their architecture.
#include "mma.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define HAS_E4M3
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define HAS_BF16
#endif

#define WORDS const unsigned *a_, const unsigned *b_, const unsigned *c_, unsigned *d_
#define KERNEL(name, body)                                                                                       \
    extern "C" __global__ void name(WORDS) {                                                                     \
        long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;                                          \
        unsigned a = a_[i], b = b_[i], c = c_[i], d;                                                             \
        (void)b, (void)c;                                                                                        \
        body;                                                                                                    \
        d_[i] = d;                                                                                               \
    }

#define ONE(name, text) KERNEL(name, asm volatile(text " %0, %1;" : "=r"(d) : "r"(a)))
#define TWO(name, text) KERNEL(name, asm volatile(text " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)))
#define THREE(name, text) KERNEL(name, asm volatile(text " %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)))
#define TO_HALF(name, text)                                                                                      \
    KERNEL(name, unsigned short h; asm volatile(text " %0, %1;" : "=h"(h) : "r"(a)); d = h)
#define TWO_TO_HALF(name, text)                                                                                  \
    KERNEL(name, unsigned short h; asm volatile(text " %0, %1, %2;" : "=h"(h) : "r"(a), "r"(b)); d = h)
#define OF_HALF(name, text) KERNEL(name, asm volatile(text " %0, %1;" : "=r"(d) : "h"((unsigned short)a)))
#define HALF(name, text)                                                                                         \
    KERNEL(name, unsigned short h; asm volatile(text " %0, %1;" : "=h"(h) : "h"((unsigned short)a)); d = h)
#define COMPARE(name, text)                                                                                      \
    KERNEL(name, asm volatile("{ .reg .pred p; " text " p, %1, %2; selp.b32 %0, 1, 0, p; }" : "=r"(d) : "r"(a), "r"(b)))

// Arithmetic of f32.
TWO(add_rn_f32, "add.rn.f32")
TWO(add_rn_ftz_f32, "add.rn.ftz.f32")
TWO(sub_rn_f32, "sub.rn.f32")
TWO(mul_rn_f32, "mul.rn.f32")
TWO(mul_rn_ftz_f32, "mul.rn.ftz.f32")
THREE(fma_rn_f32, "fma.rn.f32")
THREE(fma_rn_ftz_f32, "fma.rn.ftz.f32")
THREE(fma_rz_f32, "fma.rz.f32")
THREE(fma_rm_f32, "fma.rm.f32")
THREE(fma_rp_f32, "fma.rp.f32")
TWO(div_rn_f32, "div.rn.f32")
ONE(rcp_rn_f32, "rcp.rn.f32")
ONE(sqrt_rn_f32, "sqrt.rn.f32")
TWO(min_f32, "min.f32")
TWO(max_f32, "max.f32")
TWO(min_NaN_f32, "min.NaN.f32")
TWO(max_NaN_f32, "max.NaN.f32")
ONE(neg_f32, "neg.f32")
ONE(abs_f32, "abs.f32")
COMPARE(setp_eq_f32, "setp.eq.f32")
COMPARE(setp_neu_f32, "setp.neu.f32")
COMPARE(setp_lt_f32, "setp.lt.f32")
COMPARE(setp_geu_f32, "setp.geu.f32")
COMPARE(setp_num_f32, "setp.num.f32")

// Approximations.
ONE(ex2_approx_f32, "ex2.approx.f32")
ONE(ex2_approx_ftz_f32, "ex2.approx.ftz.f32")
ONE(lg2_approx_f32, "lg2.approx.f32")
ONE(lg2_approx_ftz_f32, "lg2.approx.ftz.f32")
ONE(rcp_approx_f32, "rcp.approx.f32")
ONE(rcp_approx_ftz_f32, "rcp.approx.ftz.f32")
ONE(rsqrt_approx_f32, "rsqrt.approx.f32")
ONE(rsqrt_approx_ftz_f32, "rsqrt.approx.ftz.f32")
ONE(sqrt_approx_f32, "sqrt.approx.f32")
ONE(sqrt_approx_ftz_f32, "sqrt.approx.ftz.f32")
TWO(div_full_f32, "div.full.f32")
TWO(div_approx_f32, "div.approx.f32")
ONE(sin_approx_f32, "sin.approx.f32")
ONE(cos_approx_f32, "cos.approx.f32")
ONE(tanh_approx_f32, "tanh.approx.f32")

// Conversions.
OF_HALF(cvt_f32_f16, "cvt.f32.f16")
TO_HALF(cvt_rn_f16_f32, "cvt.rn.f16.f32")
TO_HALF(cvt_rz_f16_f32, "cvt.rz.f16.f32")
TO_HALF(cvt_rn_bf16_f32, "cvt.rn.bf16.f32")
TO_HALF(cvt_rz_bf16_f32, "cvt.rz.bf16.f32")
TWO(cvt_rn_f16x2_f32, "cvt.rn.f16x2.f32")
TWO(cvt_rn_bf16x2_f32, "cvt.rn.bf16x2.f32")
ONE(cvt_rni_s32_f32, "cvt.rni.s32.f32")
ONE(cvt_rzi_s32_f32, "cvt.rzi.s32.f32")
ONE(cvt_rzi_u32_f32, "cvt.rzi.u32.f32")
ONE(cvt_rn_f32_s32, "cvt.rn.f32.s32")
ONE(cvt_rn_f32_u32, "cvt.rn.f32.u32")
ONE(cvt_rni_f32_f32, "cvt.rni.f32.f32")
ONE(cvt_rmi_f32_f32, "cvt.rmi.f32.f32")
ONE(cvt_rzi_f32_f32, "cvt.rzi.f32.f32")
ONE(cvt_sat_f32_f32, "cvt.sat.f32.f32")
#ifdef HAS_E4M3
TWO_TO_HALF(cvt_rn_satfinite_e4m3x2_f32, "cvt.rn.satfinite.e4m3x2.f32")
TWO_TO_HALF(cvt_rn_satfinite_e5m2x2_f32, "cvt.rn.satfinite.e5m2x2.f32")
OF_HALF(cvt_rn_f16x2_e4m3x2, "cvt.rn.f16x2.e4m3x2")
OF_HALF(cvt_rn_f16x2_e5m2x2, "cvt.rn.f16x2.e5m2x2")
#endif
#ifdef HAS_BF16
OF_HALF(cvt_f32_bf16, "cvt.f32.bf16")
#endif

// Arithmetic of f16 and bf16, two numbers to a word.
TWO(add_rn_f16x2, "add.rn.f16x2")
TWO(mul_rn_f16x2, "mul.rn.f16x2")
THREE(fma_rn_f16x2, "fma.rn.f16x2")
THREE(fma_rn_bf16x2, "fma.rn.bf16x2")
TWO(min_f16x2, "min.f16x2")
TWO(max_NaN_f16x2, "max.NaN.f16x2")
TWO(min_bf16x2, "min.bf16x2")
TWO(max_NaN_bf16x2, "max.NaN.bf16x2")
HALF(ex2_approx_f16, "ex2.approx.f16")
HALF(tanh_approx_f16, "tanh.approx.f16")

// Integers and bits.
#define DIVIDE(name, text) KERNEL(name, asm volatile(text " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b ? b : 1)))
DIVIDE(div_u32, "div.u32")
DIVIDE(rem_u32, "rem.u32")
DIVIDE(div_s32, "div.s32")
DIVIDE(rem_s32, "rem.s32")
THREE(mad_lo_u32, "mad.lo.u32")
TWO(mul_hi_s32, "mul.hi.s32")
TWO(mul_hi_u32, "mul.hi.u32")
TWO(min_s32, "min.s32")
TWO(max_u32, "max.u32")
TWO(shl_b32, "shl.b32")
TWO(shr_u32, "shr.u32")
TWO(shr_s32, "shr.s32")
THREE(shf_l_wrap_b32, "shf.l.wrap.b32")
THREE(shf_r_clamp_b32, "shf.r.clamp.b32")
THREE(bfe_u32, "bfe.u32")
THREE(bfe_s32, "bfe.s32")
KERNEL(bfi_b32, asm volatile("bfi.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "r"(c >> 8)))
THREE(prmt_b32, "prmt.b32")
THREE(prmt_b32_f4e, "prmt.b32.f4e")
THREE(prmt_b32_rc16, "prmt.b32.rc16")
#define LOP3(name, table)                                                                                        \
    KERNEL(name, asm volatile("lop3.b32 %0, %1, %2, %3, " table ";" : "=r"(d) : "r"(a), "r"(b), "r"(c)))
LOP3(lop3_b32_96, "0x96")
LOP3(lop3_b32_ca, "0xca")
LOP3(lop3_b32_1d, "0x1d")
// 64 bits: of a wide result the two words are laid over each other.
__device__ inline unsigned folded(unsigned long long x) { return (unsigned)x * 3 ^ (unsigned)(x >> 32); }
__device__ inline unsigned long long joined(unsigned low, unsigned high) {
    return (unsigned long long)high << 32 | low;
}
// A number between 2^-160 and 2^160 of any sign and fraction.
__device__ inline unsigned long long number(unsigned low, unsigned high, unsigned power) {
    return joined(low, (high & 0x800fffff) | (1023 - 160 + power % 320) << 20);
}
#define WIDE(name, text, ...)                                                                                    \
    KERNEL(name, unsigned long long w; asm volatile(text ";" : "=l"(w) : __VA_ARGS__); d = folded(w))
WIDE(mul_wide_s32, "mul.wide.s32 %0, %1, %2", "r"(a), "r"(b))
WIDE(mad_wide_u32, "mad.wide.u32 %0, %1, %2, %3", "r"(a), "r"(b), "l"(joined(c, a)))
WIDE(mul_lo_s64, "mul.lo.s64 %0, %1, %2", "l"(joined(a, b)), "l"(joined(c, a)))
WIDE(div_s64, "div.s64 %0, %1, %2", "l"(joined(a, b)), "l"(joined(c | 1, a >> c % 32)))
WIDE(bfi_b64, "bfi.b64 %0, %1, %2, %3, %4", "l"(joined(a, b)), "l"(joined(b, a)), "r"(c & 63), "r"(c >> 8 & 63))
WIDE(mul_rn_f64, "mul.rn.f64 %0, %1, %2", "l"(number(a, b, c)), "l"(number(b, a, c >> 9)))
WIDE(cvt_rn_f64_s64, "cvt.rn.f64.s64 %0, %1", "l"(joined(a, b)))
KERNEL(cvt_rn_f32_s64, asm volatile("cvt.rn.f32.s64 %0, %1;" : "=r"(d) : "l"(joined(a, b))))
KERNEL(cvt_rn_f32_f64, asm volatile("cvt.rn.f32.f64 %0, %1;" : "=r"(d) : "l"(number(a, b, c))))
ONE(popc_b32, "popc.b32")
ONE(clz_b32, "clz.b32")
ONE(brev_b32, "brev.b32")
ONE(bfind_u32, "bfind.u32")
ONE(bfind_s32, "bfind.s32")

// A warp: the predicate of shfl is the top bit. Every lane is of the mask.
#define SHFL(name, text)                                                                                         \
    KERNEL(name, unsigned p; asm volatile("{ .reg .pred q; " text " %0|q, %2, %3, %4, -1; selp.b32 %1, 1, 0, q; }" \
                                          : "=r"(d), "=r"(p) : "r"(a), "r"(b), "r"(c)); d = d ^ p << 31)
#define ALL(name, text) KERNEL(name, asm volatile(text " %0, %1, -1;" : "=r"(d) : "r"(a)))
SHFL(shfl_sync_idx_b32, "shfl.sync.idx.b32")
SHFL(shfl_sync_up_b32, "shfl.sync.up.b32")
SHFL(shfl_sync_down_b32, "shfl.sync.down.b32")
SHFL(shfl_sync_bfly_b32, "shfl.sync.bfly.b32")
KERNEL(vote_sync_ballot_b32,
       asm volatile("{ .reg .pred q; setp.lt.u32 q, %1, %2; vote.sync.ballot.b32 %0, q, -1; }"
                    : "=r"(d) : "r"(a), "r"(b)))
ALL(redux_sync_add_u32, "redux.sync.add.u32")
ALL(redux_sync_min_s32, "redux.sync.min.s32")
ALL(redux_sync_max_u32, "redux.sync.max.u32")
ALL(redux_sync_xor_b32, "redux.sync.xor.b32")
KERNEL(match_any_sync_b32, asm volatile("match.any.sync.b32 %0, %1, -1;" : "=r"(d) : "r"(a & 7)))

// A block is a warp with four words a lane: 32 rows of 16 bytes in shared memory, of which lane i names row b % 32.
template <int N>
__device__ inline void write_words(unsigned *d_, const unsigned (&x)[N]) {
    for (int j = 0; j < 4; j++) d_[(blockIdx.x * 32LL + threadIdx.x) * 4 + j] = j < N ? x[j] : 0;
}

#define LDMATRIX(name, N, text)                                                                                  \
    extern "C" __global__ void __launch_bounds__(WARP) name(WORDS) {                                             \
        __shared__ __align__(16) unsigned rows[128];                                                             \
        long long first = blockIdx.x * 32LL + threadIdx.x;                                                       \
        for (int j = 0; j < 4; j++) rows[4 * threadIdx.x + j] = a_[4 * first + j];                               \
        __syncwarp();                                                                                            \
        unsigned x[N], row = address_of(rows) + b_[4 * first] % 32 * 16;                                         \
        text;                                                                                                    \
        write_words(d_, x);                                                                                      \
    }
#define LOAD_ONE(modifier)                                                                                       \
    asm volatile("ldmatrix.sync.aligned.m8n8.x1" modifier ".shared.b16 {%0}, [%1];" : "=r"(x[0]) : "r"(row) : "memory")
#define LOAD_TWO(modifier)                                                                                       \
    asm volatile("ldmatrix.sync.aligned.m8n8.x2" modifier ".shared.b16 {%0, %1}, [%2];"                          \
                 : "=r"(x[0]), "=r"(x[1]) : "r"(row) : "memory")
LDMATRIX(ldmatrix_x1, 1, LOAD_ONE(""))
LDMATRIX(ldmatrix_x1_trans, 1, LOAD_ONE(".trans"))
LDMATRIX(ldmatrix_x2, 2, LOAD_TWO(""))
LDMATRIX(ldmatrix_x2_trans, 2, LOAD_TWO(".trans"))
LDMATRIX(ldmatrix_x4, 4, load_matrices(x, row))
LDMATRIX(ldmatrix_x4_trans, 4, load_turned(x, row))
ONE(movmatrix_sync_aligned_m8n8_trans_b16, "movmatrix.sync.aligned.m8n8.trans.b16")

// `size` bytes of which b % (size + 1) are read and the rest are zeros, over what was in shared memory before.
#define CP_ASYNC(name, text, size)                                                                               \
    extern "C" __global__ void __launch_bounds__(WARP) name(WORDS) {                                             \
        __shared__ __align__(16) unsigned rows[128];                                                             \
        long long first = 4 * (blockIdx.x * 32LL + threadIdx.x);                                                 \
        for (int j = 0; j < 4; j++) rows[4 * threadIdx.x + j] = c_[first + j];                                   \
        unsigned at = address_of(rows + 4 * threadIdx.x), bytes = b_[first] % (size + 1);                        \
        asm volatile(text " [%0], [%1], " #size ", %2;" ::"r"(at), "l"(a_ + first), "r"(bytes) : "memory");      \
        end_of_group();                                                                                          \
        wait_for_groups();                                                                                       \
        for (int j = 0; j < 4; j++) d_[first + j] = rows[4 * threadIdx.x + j];                                   \
    }
CP_ASYNC(cp_async_ca_4, "cp.async.ca.shared.global", 4)
CP_ASYNC(cp_async_ca_8, "cp.async.ca.shared.global", 8)
CP_ASYNC(cp_async_ca_16, "cp.async.ca.shared.global", 16)
CP_ASYNC(cp_async_cg_16, "cp.async.cg.shared.global", 16)

// Fragments as the instruction takes them: four words a lane of a, the first two of four of b, four of c and d.
#define MMA(name, Stored)                                                                                        \
    extern "C" __global__ void __launch_bounds__(WARP) name(WORDS) {                                             \
        long long first = 4 * (blockIdx.x * 32LL + threadIdx.x);                                                 \
        unsigned a[4], b[2] = {b_[first], b_[first + 1]}, x[4];                                                  \
        float d[4];                                                                                              \
        for (int j = 0; j < 4; j++) a[j] = a_[first + j], d[j] = __uint_as_float(c_[first + j]);                 \
        multiply(d, a, b, Stored());                                                                             \
        for (int j = 0; j < 4; j++) x[j] = __float_as_uint(d[j]);                                                \
        write_words(d_, x);                                                                                      \
    }
MMA(mma_m16n8k16_f16, f16)
MMA(mma_m16n8k16_bf16, bf16)
