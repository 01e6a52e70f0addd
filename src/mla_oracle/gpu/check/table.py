# SPDX-License-Identifier: Apache-2.0
"""The instructions of cuda/check/instructions.cu: what they are given, and how near to the interpreter's they must be.

Of the approximations the ISA says how far they may be from the truth, and the interpreter rounds the truth once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mla_oracle.arrays import Array
from mla_oracle.gpu.check import operands
from mla_oracle.gpu.check.operands import Operands

# (operands a and b, the interpreter's result), all f64 -> how far another result may be, inf where nothing is promised.
Allowed = Callable[[Array, Array, Array], Array]
FILE = "check/instructions.cu"
ULP, LEAST = 2.0**-23, 2.0**-149


@dataclass(frozen=True)
class Instruction:
    """`result`: the numbers in a word of the result, "" for bits. `words`: of a lane; `threads`: of a block."""

    name: str
    result: str = ""
    operands: Operands = operands.any_three
    allowed: Allowed | None = None  # None: bit for bit, whatever the bits of a NaN
    arch: int = 80
    words: int = 1
    threads: int = 128
    file: str = FILE

    def __str__(self) -> str:
        """What the ISA calls it: a kernel has _ for its dots."""
        text = self.name.replace("_", ".")
        for word in ("test_wait", "try_wait", "expect_tx"):
            text = text.replace(word.replace("_", "."), word)
        return text


def _relative(error: float, least: float = 0.0) -> Allowed:
    """An error of the result, relative; `least` of the smallest numbers at least."""
    return lambda a, b, result: np.maximum(error * np.abs(result), least * LEAST) + ULP / 2 * np.abs(result)


def _logarithm(a: Array, b: Array, result: Array) -> Array:
    """2^-22: absolute between 1/2 and 2, relative elsewhere."""
    return 2.0**-22 * np.where((a > 0.5) & (a < 2), 1, np.abs(result)) + ULP / 2 * np.abs(result)


def _angle(a: Array, b: Array, result: Array) -> Array:
    return np.where(np.abs(a) <= np.pi, 2.0**-20.5 + ULP / 2, np.inf)


def _quotient(a: Array, b: Array, result: Array) -> Array:
    """2 ulp for a divisor from 2^-126 to 2^126."""
    return np.where((np.abs(b) >= 2.0**-126) & (np.abs(b) <= 2.0**126), _relative(2 * ULP, 2)(a, b, result), np.inf)


def _exact(names: str, result: str, given: Operands, arch: int = 80) -> list[Instruction]:
    return [Instruction(name, result, given, arch=arch) for name in names.split()]


def _near(
    names: str, allowed: Allowed, given: Operands = operands.three_floats, result: str = "f32"
) -> list[Instruction]:
    return [Instruction(name, result, given, allowed) for name in names.split()]


INSTRUCTIONS = [
    *_exact("add_rn_f32 add_rn_ftz_f32 sub_rn_f32 mul_rn_f32 mul_rn_ftz_f32", "f32", operands.three_floats),
    *_exact("fma_rn_f32 fma_rn_ftz_f32 fma_rz_f32 fma_rm_f32 fma_rp_f32", "f32", operands.three_floats),
    *_exact("div_rn_f32 rcp_rn_f32 sqrt_rn_f32", "f32", operands.three_floats),
    *_exact("min_f32 max_f32 min_NaN_f32 max_NaN_f32 neg_f32 abs_f32", "f32", operands.three_floats),
    *_exact("setp_eq_f32 setp_neu_f32 setp_lt_f32 setp_geu_f32 setp_num_f32", "", operands.three_floats),
    *_near("ex2_approx_f32 ex2_approx_ftz_f32", _relative(2 * ULP, 2)),
    *_near("lg2_approx_f32 lg2_approx_ftz_f32", _logarithm),
    *_near("rcp_approx_f32 rcp_approx_ftz_f32", _relative(ULP, 1)),
    *_near("rsqrt_approx_f32 rsqrt_approx_ftz_f32", _relative(2.0**-22.9)),
    *_near("sqrt_approx_f32 sqrt_approx_ftz_f32", _relative(2.0**-23, 1)),
    *_near("div_full_f32", _quotient),
    *_near("div_approx_f32", _quotient, operands.quotients),
    *_near("sin_approx_f32 cos_approx_f32", _angle, operands.angles),
    *_near("tanh_approx_f32", _relative(2.0**-11, 1)),
    *_exact("cvt_f32_f16", "f32", operands.three_halves),
    *_exact("cvt_f32_bf16", "f32", operands.three_halves, arch=90),
    *_exact("cvt_rn_f16_f32 cvt_rz_f16_f32", "f16", operands.three_floats),
    *_exact("cvt_rn_bf16_f32 cvt_rz_bf16_f32", "bf16", operands.three_floats),
    *_exact("cvt_rn_f16x2_f32", "f16", operands.three_floats),
    *_exact("cvt_rn_bf16x2_f32", "bf16", operands.three_floats),
    *_exact("cvt_rni_s32_f32 cvt_rzi_s32_f32 cvt_rzi_u32_f32", "", operands.three_floats),
    *_exact("cvt_rn_f32_s32 cvt_rn_f32_u32", "f32", operands.few_bits),
    *_exact("cvt_rni_f32_f32 cvt_rmi_f32_f32 cvt_rzi_f32_f32 cvt_sat_f32_f32", "f32", operands.three_floats),
    *_exact("cvt_rn_satfinite_e4m3x2_f32 cvt_rn_satfinite_e5m2x2_f32", "", operands.three_floats, arch=89),
    *_exact("cvt_rn_f16x2_e4m3x2 cvt_rn_f16x2_e5m2x2", "f16", operands.three_halves, arch=89),
    *_exact("add_rn_f16x2 mul_rn_f16x2 fma_rn_f16x2 min_f16x2 max_NaN_f16x2", "f16", operands.three_halves),
    *_exact("fma_rn_bf16x2 min_bf16x2 max_NaN_bf16x2", "bf16", operands.three_halves),
    *_near("ex2_approx_f16", _relative(2.0**-9.9, 2.0**126), operands.three_halves, "f16"),
    *_near("tanh_approx_f16", lambda a, b, result: 2.0**-10.987 + 0 * result, operands.three_halves, "f16"),
    *_exact("div_u32 rem_u32 div_s32 rem_s32", "", operands.few_bits),
    *_exact("mul_wide_s32 mad_wide_u32 mul_lo_s64 div_s64 bfi_b64 mul_rn_f64 cvt_rn_f64_s64", "", operands.any_three),
    *_exact("cvt_rn_f32_s64 cvt_rn_f32_f64", "f32", operands.any_three),
    *_exact("mad_lo_u32 mul_hi_s32 mul_hi_u32 min_s32 max_u32", "", operands.any_three),
    *_exact("shl_b32 shr_u32 shr_s32 bfe_u32 bfe_s32", "", operands.small_counts),
    *_exact("shf_l_wrap_b32 shf_r_clamp_b32", "", operands.small_counts),
    *_exact("bfi_b32", "", operands.fields),
    *_exact("prmt_b32 prmt_b32_f4e prmt_b32_rc16 lop3_b32_96 lop3_b32_ca lop3_b32_1d", "", operands.any_three),
    *_exact("popc_b32 clz_b32 brev_b32 bfind_u32 bfind_s32", "", operands.few_bits),
    *_exact("shfl_sync_idx_b32 shfl_sync_up_b32 shfl_sync_down_b32 shfl_sync_bfly_b32", "", operands.lanes),
    *_exact("vote_sync_ballot_b32 redux_sync_add_u32 redux_sync_min_s32 redux_sync_max_u32", "", operands.any_three),
    *_exact("redux_sync_xor_b32 match_any_sync_b32", "", operands.any_three),
    *_exact("movmatrix_sync_aligned_m8n8_trans_b16", "", operands.any_three),
    *(Instruction(f"ldmatrix_x{n}{trans}", words=4, threads=32) for n in (1, 2, 4) for trans in ("", "_trans")),
    *(Instruction(f"cp_async_{name}", words=4, threads=32) for name in ("ca_4", "ca_8", "ca_16", "cg_16")),
]
