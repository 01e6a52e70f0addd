# SPDX-License-Identifier: Apache-2.0
"""The choice of an instruction set, and what every build of the kernels has alone: its exp and its tanh."""

import numpy as np
import pytest

from mla_oracle.errors import InputError, UnsupportedError
from mla_oracle.fast import isa as isas
from mla_oracle.fast import threads


def test_the_best_is_chosen_unless_one_is_named(monkeypatch):
    monkeypatch.delenv("MLA_ORACLE_ISA", raising=False)
    assert isas.chosen() == isas.available()[-1]
    for name in isas.available():
        assert isas.chosen(name) == name
        monkeypatch.setenv("MLA_ORACLE_ISA", name)
        assert isas.chosen() == name
    assert isas.chosen(isas.available()[-1]) == isas.available()[-1]


def test_an_unknown_name_is_an_input_error(monkeypatch):
    monkeypatch.setenv("MLA_ORACLE_ISA", "avx9")
    with pytest.raises(InputError, match=r"MLA_ORACLE_ISA is 'avx9', expected one of generic, v2, v3, v4, amx"):
        isas.chosen()


def test_a_missing_instruction_set_is_unsupported_not_a_crash(monkeypatch):
    monkeypatch.setattr(isas, "available", lambda: ("v2",))
    with pytest.raises(UnsupportedError, match=r"isa is 'v4', this machine has v2"):
        isas.chosen("v4")


@pytest.mark.skipif("amx" not in isas.available(), reason="no AMX here")
def test_amx_is_for_paged_decode_of_bf16_caches_in_f32_and_v4_for_the_rest():
    assert isas.kernels("paged", "f32", "amx", 2).__name__.endswith("_paged_amx_f32")
    for form, precision, kv_dtype in [
        ("paged", "f32", 0), ("paged", "f32", 1), ("paged", "f32", 3), ("paged", "f64", 2), ("naive", "f32", None),
    ]:  # fmt: skip
        v4 = isas.kernels(form, precision, "v4")
        assert isas.kernels(form, precision, "amx", kv_dtype) is v4
    assert isas.kernels("paged", "f32", "v4", 2) is isas.kernels("paged", "f32", "v4")


@pytest.mark.parametrize("count", [0, -1, 2.0, True, 5000])
def test_a_wrong_number_of_threads_is_an_input_error(count):
    with pytest.raises(InputError, match="threads is"):
        threads.count(count)


@pytest.mark.parametrize("isa", isas.available())
def test_exp_is_within_2_ulp_over_the_whole_range_f32(isa):
    # Every 97th float from the smallest to where e^x underflows or overflows, both signs.
    bits = np.arange(0, 0x42D20000, 97, dtype=np.uint32)
    x = np.concatenate([-bits.view(np.float32), bits.view(np.float32)])
    x = x[x <= 88][: len(x) // 64 * 64]
    x = x[: len(x) // 64 * 64].copy()
    true = np.exp(x.astype(np.float64))
    isas.kernels("paged", "f32", isa).exp_lanes(x)
    ulp = np.maximum(np.spacing(true.astype(np.float32)).astype(np.float64), 2.0**-149)
    assert (np.abs(x - true) / ulp).max() <= 2


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="no wider float to compare with")
@pytest.mark.parametrize("isa", isas.available())
def test_exp_is_within_2_ulp_over_the_whole_range_f64(isa):
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [rng.uniform(-750, 709, 300032), rng.uniform(-1, 1, 100032), -rng.uniform(708, 746, 64000)]
    )
    true = np.exp(x.astype(np.longdouble))
    isas.kernels("paged", "f64", isa).exp_lanes(x)
    ulp = np.maximum(np.spacing(true.astype(np.float64)).astype(np.longdouble), np.longdouble(2.0) ** -1074)
    assert (np.abs(x - true) / ulp).max() <= 2


@pytest.mark.parametrize("isa", isas.available())
@pytest.mark.parametrize("precision", ["f32", "f64"])
def test_exp_of_the_ends(isa, precision):
    x = np.zeros(64, np.float32 if precision == "f32" else np.float64)
    x[:6] = [-np.inf, np.nan, 0.0, -0.0, -1e30, -np.finfo(x.dtype).max]
    isas.kernels("paged", precision, isa).exp_lanes(x)
    assert np.isnan(x[1]) and x[[0, 2, 3, 4, 5]].tolist() == [0, 1, 1, 0, 0]


def off_tanh(kernels, x, wide):
    """(ULP, eps of the true value) that tanh of x is off by at most, against `wide`, a wider type."""
    true, eps = np.tanh(x.astype(wide)), wide(np.finfo(x.dtype).eps)
    found, least = x.copy(), wide(np.finfo(x.dtype).smallest_subnormal)
    kernels.tanh_lanes(found)
    error, ulp = np.abs(found - true), np.spacing(np.abs(true).astype(x.dtype)).astype(wide)
    assert np.array_equal(np.sign(found), np.sign(x)) and np.abs(found).max() <= 1
    normal = np.abs(true) >= np.finfo(x.dtype).smallest_normal
    return (error / np.maximum(ulp, least)).max(), (error[normal] / (eps * np.abs(true[normal]))).max()


@pytest.mark.parametrize("isa", isas.available())
def test_tanh_is_within_3_ulp_and_2_eps_over_the_whole_range_f32(isa):
    # Every 397th float from the smallest to the largest, both signs.
    bits = np.arange(0, 0x7F800000, 397, dtype=np.uint32)
    x = np.concatenate([-bits.view(np.float32), bits.view(np.float32)])
    ulp, eps = off_tanh(isas.kernels("paged", "f32", isa), x[len(x) % 64 :], np.float64)
    assert ulp <= 3 and eps <= 2


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="no wider float to compare with")
@pytest.mark.parametrize("isa", isas.available())
def test_tanh_is_within_3_ulp_and_2_eps_over_the_whole_range_f64(isa):
    rng = np.random.default_rng(0)
    ends = -np.exp(rng.uniform(-744, 709, 64000))
    x = np.concatenate([rng.uniform(-2, 2, 300032), rng.uniform(-21, 21, 100032), ends])
    ulp, eps = off_tanh(isas.kernels("paged", "f64", isa), x, np.longdouble)
    assert ulp <= 3 and eps <= 2


@pytest.mark.parametrize("isa", isas.available())
@pytest.mark.parametrize("precision", ["f32", "f64"])
def test_tanh_of_the_ends_and_of_numbers_below_the_normal_range(isa, precision):
    x = np.zeros(64, np.float32 if precision == "f32" else np.float64)
    least, most = np.finfo(x.dtype).smallest_subnormal, np.finfo(x.dtype).max
    x[:8] = [-np.inf, np.inf, 0.0, -0.0, -most, least, -3 * least, np.nan]
    isas.kernels("paged", precision, isa).tanh_lanes(x)
    assert x[:7].tolist() == [-1, 1, 0, 0, -1, least, -3 * least] and np.isnan(x[7])
    assert np.signbit(x[:7]).tolist() == [True, False, False, True, True, False, True]
