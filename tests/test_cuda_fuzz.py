# SPDX-License-Identifier: Apache-2.0
"""The interpreted paged kernels under fuzz: any sizes, any lengths, any dtypes, within their bound and no fault met."""

import kernel_cases
import ml_dtypes
import numpy as np
import pytest
from fast_cases import make
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import assert_right

DTYPES = st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16])

pytestmark = pytest.mark.skipif(kernel_cases.missing("ptx") is not None, reason="the extra cuda is not installed")


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    arch=st.sampled_from(kernel_cases.ARCHS),
    lens=st.lists(st.integers(0, 150), min_size=1, max_size=4),
    T=st.integers(1, 4),
    H=st.integers(1, 4),
    D=st.integers(1, 80),
    cut=st.integers(0, 20),
    block_size=st.integers(1, 70),
    split_keys=st.integers(32, 100),
    dtypes=st.tuples(DTYPES, DTYPES),
    causal=st.booleans(),
    q_size=st.sampled_from([0.0, 1.0, 10.0]),
)
def test_any_problem(arch, lens, T, H, D, cut, block_size, split_keys, dtypes, causal, q_size):
    case = make(len(lens), T, H, D, max(1, D - cut), lens, block_size, q_size=q_size, causal=causal)
    case = case.but(q=case.q.astype(dtypes[0]), kv_cache=case.kv_cache.astype(dtypes[1]))
    assert_right(kernel_cases.interpreter(arch), case, split_keys=split_keys)
