# SPDX-License-Identifier: Apache-2.0
"""The canonical problem on the interpreted tensor-core kernel and on a GPU: what it takes, and what it refuses by name.

tests/test_cuda_selected.py has the kernel itself; here the fields of a case reach it.
"""

import dataclasses

import kernel_cases
import numpy as np
import pytest
from canonical_cases import BF16, assert_right, make, packed, topk

from mla_oracle import canonical
from mla_oracle.errors import InputError, UnsupportedError
from mla_oracle.oracle import backend_of, expected, kernel_of


@pytest.fixture(params=kernel_cases.BACKENDS)
def backend(request):
    if reason := kernel_cases.missing(request.param):
        pytest.skip(reason)
    return request.param


def slots(case):
    """The selection of `topk` by slot."""
    indices, block = topk(case, 40), case.kv_cache.shape[1]
    for b in range(len(indices)):
        found = case.block_table[b, np.maximum(indices[b], 0) // block] * block + np.maximum(indices[b], 0) % block
        indices[b] = np.where(indices[b] < 0, -1, found)
    return indices


OPTIONS = {
    "selection": lambda case: {"topk_indices": topk(case, 40)},
    "selection by slot": lambda case: {
        "topk_indices": slots(case), "topk_by": "slot", "block_table": None, "seq_lens": None,
    },
    "beyond the lengths": lambda case: {
        "topk_indices": topk(case, 40) * 3 + 5, "topk_outside": "skip", "topk_length": np.array([40, 3, 17], np.int32),
    },
    "lengths of tokens": lambda case: {
        "topk_indices": topk(case, 40), "topk_length": np.array([[40, 0], [3, 1], [17, 40]], np.int32),
    },
    "window": lambda case: {"window_left": 9, "window_first": 3, "causal": True},
    "window and selection": lambda case: {"window_right": 0, "topk_indices": topk(case, 40)},
    "sinks": lambda case: {"sinks": np.array([0, -np.inf, 80, -80, 3], np.float32)},
    "sinks in lse": lambda case: {"sinks": np.arange(5, dtype=np.float32), "sinks_in_lse": True, "lse_base": "2"},
    "other axes": lambda case: {"lse_axes": "BHT", "empty_lse": np.inf},
    "scales": lambda case: {"q_scale": 0.5, "output_scale": 3.0},
}  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
def test_options(option, backend):
    case = make(dtype=BF16)
    case = dataclasses.replace(case, **OPTIONS[option](case))
    assert_right(case, backend=backend)
    assert kernel_of(case, backend) == "paged_mma_bf16" and backend_of(case, backend) == backend


def test_a_kernel_that_is_named_attends_or_is_refused():
    """Rows of 192 and a value of 128: wgmma takes them where pages hold all keys of a query."""
    if reason := kernel_cases.missing("ptx"):
        pytest.skip(reason)
    case = make(D=192, V=128, H=3, lens=(40, 0, 21), dtype=BF16)
    with_sinks = dataclasses.replace(case, sinks=np.arange(3, dtype=np.float32))
    results = {}
    for kernel, name in (("scalar", "paged_decode_bf16"), ("mma", "paged_mma_bf16"), ("wgmma", "paged_wgmma_bf16")):
        assert kernel_of(with_sinks, "ptx", kernel) == name
        results[kernel] = expected(with_sinks, precision="f32", backend="ptx", kernel=kernel)["out"].tobytes()
        arrays = with_sinks.q, with_sinks.kv_cache, with_sinks.block_table, with_sinks.seq_lens
        conventions = {"softmax_scale": case.softmax_scale, "head_dim_v": 128, "sinks": with_sinks.sinks}
        found = canonical.decode(*arrays, **conventions, causal=case.causal, backend="ptx", kernel=kernel)
        assert found.out.tobytes() == results[kernel]
    assert results["scalar"] != results["mma"] != results["wgmma"]
    windowed = dataclasses.replace(case, window_left=3)
    assert kernel_of(windowed, "ptx", "mma") == "paged_mma_bf16"
    for kernel in ("scalar", "wgmma"):
        said = f"^kernel '{kernel}' takes neither packed rows nor a selection$"
        with pytest.raises(UnsupportedError, match=said):
            kernel_of(windowed, "ptx", kernel)
        with pytest.raises(UnsupportedError, match=said):
            expected(windowed, precision="f32", backend="ptx", kernel=kernel)
    with pytest.raises(InputError, match=r"^kernel is 'mma', expected None with backend 'strict'$"):
        canonical.attend(with_sinks, backend="strict", kernel="mma")


def test_an_index_below_32_bits_is_skipped(backend):
    case = make(dtype=BF16)
    indices = topk(case, 40).astype(np.int64)
    indices[..., ::3] -= 1 << 32
    assert_right(dataclasses.replace(case, topk_indices=indices), backend=backend)


@pytest.mark.parametrize(
    ("name", "reader"),
    [("fp8_e4m3", "fold"), ("fp8_ds_mla", "f32_bf16"), ("fp8_ds_mla", "bf16"), ("fp8_ds_mla", "exponent")],
)
def test_packed_rows(name, reader, backend):
    D = 576 if name == "fp8_ds_mla" else 64
    options = {"writer": "vllm"} if name == "fp8_ds_mla" else {}
    case = packed(make(D=D, V=D - 64 or 64, H=3, lens=(40, 0, 21), dtype=BF16), name, reader, **options)
    assert_right(case, backend=backend)
    assert_right(dataclasses.replace(case, topk_indices=topk(case, 30)), backend=backend)


@pytest.mark.parametrize("ratio", [1.0, 4.0, 2.0**-3])
def test_a_scale_of_the_rope_is_folded_into_the_queries(ratio, backend):
    case = make(D=96, V=32, H=3, lens=(40, 0, 21), dtype=BF16)
    case = packed(case, "fp8_e4m3", "fold", kv_scale=0.013, kpe_scale=float(np.float32(0.013)) * ratio)
    assert_right(case, backend=backend)
    assert_right(dataclasses.replace(case, topk_indices=topk(case, 30)), backend=backend)


def test_a_scale_of_the_rope_that_would_round_the_queries_or_scale_a_value_is_refused(backend):
    case = make(D=96, V=32, H=3, lens=(40, 0, 21), dtype=BF16)
    for kpe, V, line in (
        (0.03, 32, f"kpe_scale of 0.03 beside a kv_scale of 0.02 is not supported by backend '{backend}': q bfloat16 "),
        (0.04, 33, f"kpe_scale of columns of the value is not supported by backend '{backend}'"),
        (np.full(case.kv_cache.shape[:2], 0.1, np.float32), 32, "kpe_scale of every token is not supported"),
    ):
        other = packed(dataclasses.replace(case, head_dim_v=V), "fp8_e4m3", "fold", kv_scale=0.02, kpe_scale=kpe)
        with pytest.raises(UnsupportedError, match=f"^{line}"):
            canonical.attend(other, precision="f32", backend=backend)


def test_what_it_does_not_take_is_refused_by_name(backend):
    case = make(dtype=BF16)
    refused = {
        "softcap": 3.0, "bias": np.zeros((3, 2, 70), np.float32), "value_offset": 4,
        "kpe_cache": case.kv_cache, "qo_indptr": np.array([0, 2, 2, 2], np.int32),
    }  # fmt: skip
    for name, value in refused.items():
        other = dataclasses.replace(case, **{name: value})
        if name == "kpe_cache":
            other = dataclasses.replace(other, kv_cache=case.kv_cache[..., :16], kpe_cache=case.kv_cache[..., 16:])
        if name == "qo_indptr":
            other = dataclasses.replace(other, q=case.q[0])
        with pytest.raises(UnsupportedError, match=f"^{name} is not supported by backend '{backend}'$"):
            expected(other, precision="f32", backend=backend)
    many = dataclasses.replace(case, kv_cache=np.repeat(case.kv_cache[:, :, None], 5, 2), window_left=3)
    with pytest.raises(UnsupportedError, match=f"^num_kv_heads is not supported by backend '{backend}'$"):
        canonical.attend(many, precision="f32", backend=backend)
    row = packed(make(D=576, V=512, dtype=BF16), "fp8_ds_mla", "f32")
    with pytest.raises(UnsupportedError, match=r"^cache_format 'fp8_ds_mla' with cache_reader 'f32' and q bfloat16"):
        canonical.attend(row, precision="f32", backend=backend)
    with pytest.raises(UnsupportedError, match=r"q is f32 and kv_cache f32, expected both f16 or both bf16$"):
        canonical.attend(dataclasses.replace(make(), window_left=3), precision="f32", backend=backend)
