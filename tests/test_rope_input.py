# SPDX-License-Identifier: Apache-2.0
"""rope: arguments refused in one line, and extreme ones that are not."""

import math

import numpy as np
import pytest
from ropes import F32, at, turned, yarn

from mla_oracle.errors import InputError
from mla_oracle.rope import ANGLES, interleaved_to_neox, rope_interleaved, to_neox

X = np.ones((2, 3, 8), np.float32)
P = np.array([0, 1])


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"x": np.ones(8, np.float32)}, "x has 1 axes [8], expected 3: [T, H, R]"),
        ({"x": [[1.0]]}, "x is a list, expected an array (numpy, DLPack or the array interface)"),
        ({"x": X.astype(np.int32)}, "x is i32, expected f32 or f16 or bf16"),
        ({"x": X.astype(np.float64)}, "x is f64, expected f32 or f16 or bf16"),
        (
            {"positions": [0, 1]},
            "positions is a list, expected an array (numpy, DLPack or the array interface)",
        ),
        ({"positions": np.arange(3)}, "positions is [3], expected [T] with T = 2 on axis 0"),
        ({"positions": P[:, None]}, "positions has 2 axes [2, 1], expected 1: [T]"),
        (
            {"positions": P.astype(np.float32)},
            "positions is f32, expected i64 or i32 or i16 or i8 or u64 or u32 or u16 or u8",
        ),
        (
            {"positions": P.astype(bool)},
            "positions is bool, expected i64 or i32 or i16 or i8 or u64 or u32 or u16 or u8",
        ),
        ({"positions": np.uint64([0, 2**63])}, "positions[1] is 9223372036854775808, expected below 2^63"),
        ({"base": 0}, "base is 0, expected a number from 1e-06 to 2^53"),
        ({"base": -1e4}, "base is -10000.0, expected a number from 1e-06 to 2^53"),
        ({"base": math.nan}, "base is nan, expected a number from 1e-06 to 2^53"),
        ({"base": math.inf}, "base is inf, expected a number from 1e-06 to 2^53"),
        ({"base": "1e4"}, "base is '1e4', expected a number from 1e-06 to 2^53"),
        ({"base": None}, "base is None, expected a number from 1e-06 to 2^53"),
        ({"rotary_dim": 9}, "rotary_dim is 9, expected 0 to 8, the width of x"),
        ({"rotary_dim": -2}, "rotary_dim is -2, expected 0 to 8, the width of x"),
        ({"rotary_dim": 8.0}, "rotary_dim is 8.0, expected an integer"),
        ({"rotary_dim": True}, "rotary_dim is True, expected an integer"),
        ({"angles": "exact"}, "angles is 'exact', expected recurrence or power or closed or table"),
        ({"angles": np.ones(2)}, "angles is a ndarray, expected recurrence or power or closed or table"),
        ({"precision": "f16"}, "precision is 'f16', expected f32 or f64"),
        ({"yarn": {"factor": 40}}, "yarn.factor is None, expected a number from 1 to 2^53"),
        ({"yarn": yarn(factor=0.5)}, "yarn.factor is 0.5, expected a number from 1 to 2^53"),
        ({"yarn": yarn(factor=math.nan)}, "yarn.factor is nan, expected a number from 1 to 2^53"),
        (
            {"yarn": yarn(original_max_position_embeddings=1e300)},
            "yarn.original_max_position_embeddings is 1e+300, expected a number from 1 to 2^53",
        ),
        ({"yarn": yarn(beta_slow=0)}, "yarn.beta_slow is 0, expected a number from 1e-06 to 2^53"),
        ({"yarn": yarn(beta_fast=-1)}, "yarn.beta_fast is -1, expected a number from 1e-06 to 2^53"),
        ({"yarn": yarn(mscale=-1)}, "yarn.mscale is -1, expected a number from 0 to 2^53"),
        ({"yarn": yarn(mscale_all_dim=-1)}, "yarn.mscale_all_dim is -1, expected a number from 0 to 2^53"),
        ({"yarn": yarn(), "base": 1}, "base is 1, expected above 1 with yarn"),
        (
            {"yarn": yarn(original_max_position_embeddings=2, beta_slow=8)},
            "yarn goes from pair 0 to -1, expected a range: engines differ without one",
        ),
        (
            {"yarn": yarn(original_max_position_embeddings=2**50)},
            "yarn goes from pair 12 to 7, expected a range: engines differ without one",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(changed, line):
    arguments = {"x": X, "positions": P, "base": 1e4, **changed}
    with pytest.raises(InputError) as error:
        rope_interleaved(arguments.pop("x"), arguments.pop("positions"), **arguments)
    assert str(error.value) == line


@pytest.mark.parametrize("angles", ANGLES)
@pytest.mark.parametrize("base", [1e-6, 2.0**53])
@pytest.mark.parametrize("position", [-(2**63), 2**63 - 1])
def test_no_angle_overflows(position, base, angles):
    assert np.abs(np.abs(turned(position, base=base, angles=angles)) - 1).max() < 4 * F32


def test_a_signalling_nan_is_widened_without_a_warning():
    x = np.uint16([[0x7D01, 0x3C00]]).view(np.float16)
    assert np.isnan(rope_interleaved(x, at(1), base=1e4)).all()


def test_the_permutation_needs_an_axis():
    with pytest.raises(InputError, match=r"^x has 0 axes \[\], expected 1 or more: \[\.\.\., R\]$"):
        to_neox(np.float32(1))


@pytest.mark.parametrize("n", [-1, 2.0, "8", None])
def test_the_permutation_refuses_what_is_not_a_size(n):
    with pytest.raises(InputError, match=r"^n is .*, expected an integer from 0 to 2147483647$"):
        interleaved_to_neox(n)
