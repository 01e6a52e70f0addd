# SPDX-License-Identifier: Apache-2.0
"""A case whose fp8 scales are folded: what calls take that have one scale for scores and one for the output.

Of a cache of fp8_e4m3 with one scale, read exactly (reader "fold"), a row is its codes times kv_scale, so that

    softmax_scale * q_scale * kv_scale   multiplies q . codes              bmm1_scale, softmax_scale of tokenspeed
    output_scale * kv_scale              multiplies the weighted codes     bmm2_scale, output_scale

as f64 products. In real numbers the case is the same; in f32 it is where the scales are powers of two.
"""

from __future__ import annotations

import dataclasses

from ..cases import PagedCase
from ..dtypes import dtype
from . import spelling


def folded(case: PagedCase) -> PagedCase:
    """`case` with dense rows of e4m3 and no q_scale, or as it is where there is nothing to fold."""
    scale = case.softmax_scale if case.q_scale is None else case.softmax_scale * case.q_scale
    one = case.kv_scale is not None and case.kv_scale.size == 1 and case.kpe_scale is None
    if case.cache_format != "fp8_e4m3" or case.cache_reader not in (None, "fold") or not one:
        return dataclasses.replace(case, q_scale=None, softmax_scale=scale)
    of_rows = spelling.number_of("kv_scale", case.kv_scale)
    assert of_rows is not None
    split = case.kpe_cache
    return dataclasses.replace(
        case,
        q_scale=None,
        softmax_scale=scale * of_rows,
        output_scale=of_rows if case.output_scale is None else case.output_scale * of_rows,
        kv_cache=case.kv_cache.view(dtype("e4m3")),
        kpe_cache=None if split is None else split.view(dtype("e4m3")),
        cache_format=None,
        cache_reader=None,
        kv_scale=None,
    )
