# SPDX-License-Identifier: Apache-2.0
"""Problems with any valid combination of the options, as arguments of mla_oracle.decode, drawn by hypothesis.

What nobody may read is NaN or garbage: rows, entries of tables, bias columns, indices past topk_length.
"""

import math

import dictionary
import ml_dtypes
import numpy as np
import stored
from hypothesis import strategies as st

GARBAGE = (2**31 - 1, -(2**31), 2147480000, -1)
DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn}


@st.composite
def problems(draw, precision="f32", form=None):
    """A valid problem whose dtypes `precision` takes; `form`: a cache format that one of its caches has."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtypes = [*DTYPES.values(), *([np.float64] if precision == "f64" else [])]
    maybe = st.booleans()
    by_slot = draw(maybe)
    causal = not by_slot and draw(maybe)
    B, T = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    kv_heads = draw(st.sampled_from([1, 2, 3])) if form is None else 1
    H = kv_heads * draw(st.integers(1, 2))
    prefixes = ("", "extra_") if draw(maybe) else ("",)
    forms, D = ({}, draw(st.integers(3, 7))) if form is None else stored.choose(draw, form, len(prefixes) == 2)
    block = draw(st.integers(1, 4))
    R = draw(st.integers(1, D - 1)) if not forms.get("") and draw(maybe) else 0
    V = draw(st.integers(1, D))
    shape = draw(st.sampled_from(["BTHD", "BHD", "ragged"]))
    p = {
        "softmax_scale": draw(st.sampled_from([0.5, 0.1, 1.0])) / (1 if D < 64 else 16),
        "head_dim_v": V,
        "causal": causal,
        "lse_base": draw(st.sampled_from("e2")),
        "empty_lse": draw(st.sampled_from([-math.inf, math.inf, -1e30, math.nan])),
    }
    rows = {"BTHD": (B, T), "BHD": (B,), "ragged": (0,)}[shape]
    if shape == "ragged":
        ends = np.concatenate([[0], np.cumsum(rng.integers(0, T + 1, B))])
        p["qo_indptr"] = ends.astype(np.int32)
        rows = (int(ends[-1]),)
    amplitude = draw(st.sampled_from([1.0, 3.0]))
    q = amplitude * rng.standard_normal((*rows, H, D))
    p["q"] = np.clip(q, -16, 16).astype(draw(st.sampled_from(dtypes)))
    axis = (kv_heads,) if kv_heads > 1 or (form is None and draw(maybe)) else ()
    for prefix in prefixes:
        page = block if not prefix else draw(st.integers(1, 4))
        lens = rng.integers(0, 10, B) * rng.integers(0, 2 + (rng.random() < 0.8), B).clip(0, 1)
        used = -(-lens // page)
        count = int(used.sum()) + 2
        width = D - (R if not prefix else 0)
        kind = np.float32 if forms.get(prefix) is not None else draw(st.sampled_from(dtypes))
        p[prefix + "kv_cache"] = np.full((count, page, *axis, width), np.nan, kind)
        if R and not prefix:
            p["kpe_cache"] = np.full((count, page, *axis, R), np.nan, draw(st.sampled_from(dtypes)))
        if not by_slot:
            ids = rng.permutation(count)
            table = rng.choice(GARBAGE, (B, max([*used, 0]) + 1)).astype(np.int32)
            for b in range(B):
                table[b, : used[b]], ids = ids[: used[b]], ids[used[b] :]
            p |= {prefix + "block_table": table, prefix + "seq_lens": lens.astype(np.int32)}
        if by_slot or prefix or draw(maybe):
            select(draw, rng, p, prefix, rows, B, lens, count * page)
    options(draw, rng, p, by_slot, causal, H, D, V)
    if not by_slot and draw(maybe):
        columns = int(p["seq_lens"].max(initial=0)) + draw(st.integers(0, 2))
        per_head = (H,) if draw(maybe) else ()
        bias = rng.standard_normal((*rows, *per_head, columns)) * 2
        bias[rng.random(bias.shape) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = -np.inf
        p["bias"] = bias.astype(draw(st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16])))
    fill(p, rng, amplitude)
    stored.store(draw, rng, p, forms)
    return p


def select(draw, rng, p, prefix, rows, B, lens, slots):
    """topk_indices and perhaps topk_length."""
    K = draw(st.integers(0, 6))
    wide = draw(st.booleans())
    indices = np.empty((*rows, K), np.int64 if wide else np.int32)
    by_slot = "block_table" not in p
    outside = draw(st.booleans())
    if outside:
        p["topk_outside"] = "skip"
    else:
        outside = p.get("topk_outside") == "skip"
    for _, b, row in requests(p, rows):
        capacity = slots if by_slot else int(lens[b])
        choice = rng.integers(0, max(capacity, 1), K) if capacity else np.full(K, -1)
        choice = np.where(rng.random(K) < 0.2, rng.choice([-1, -7, -(2**31)], K), choice)
        if outside:
            choice = np.where(rng.random(K) < 0.2, capacity + rng.choice([0, 1, 2**20], K), choice)
        indices[row] = choice
    if draw(st.booleans()):
        per_request = len(rows) == 2 and draw(st.booleans())
        length = rng.integers(0, K + 1, B if per_request else rows).astype(np.int32)
        for _, b, row in requests(p, rows):
            used = length[b] if per_request else length[row]
            indices[row][used:] = rng.choice(GARBAGE, K - used)
        p[prefix + "topk_length"] = length
    p[prefix + "topk_indices"] = indices
    p["topk_by"] = "slot" if by_slot else "position"


def requests(p, rows):
    full = {**dictionary.DEFAULTS, **p}
    for b, t, row, _ in dictionary.queries(full):
        yield t, b, row


def options(draw, rng, p, by_slot, causal, H, D, V):
    maybe = st.booleans()
    if not by_slot and draw(maybe):
        p["window_left"] = draw(st.sampled_from([None, -1, 0, 1, 3]))
        p["window_right"] = draw(st.sampled_from([None, -1, 0] if causal else [None, -1, 0, 1, 2]))
        p["window_first"] = draw(st.integers(0, 3))
    if draw(maybe):
        p["softcap"] = draw(st.sampled_from([0.7, 5.0, 50.0]))
    if draw(maybe):
        p["sinks"] = (2 * rng.standard_normal(H)).astype(np.float32)
        p["sinks"][rng.random(H) < 0.2] = draw(st.sampled_from([np.inf, -np.inf, 60.0, -60.0]))
        p["sinks_in_lse"] = draw(maybe)
    p["value_offset"] = draw(st.integers(0, D - V))
    for name in ("q_scale", "output_scale"):
        if draw(maybe):
            p[name] = draw(st.sampled_from([0.25, 1.7, 3e-3]))
    if p["q"].ndim == 4:
        p["lse_axes"] = draw(st.sampled_from(["BTH", "BHT"]))


def fill(p, rng, amplitude):
    """Numbers in what the definition reads; NaN, or ids that no cache has, in the rest."""
    full = {**dictionary.DEFAULTS, **p}
    H = p["q"].shape[-2]
    kv_heads = p["kv_cache"].shape[2] if p["kv_cache"].ndim == 4 else 1
    bias = None if full["bias"] is None else np.full(p["bias"].shape, np.nan, p["bias"].dtype)
    used_blocks = set()
    for b, t, row, T in dictionary.queries(full):
        for source, place in dictionary.seen(full, b, t, T, row):
            heads = range(H)
            if bias is not None and source == 0:
                at = [dictionary.bias_index(full, source, place, row, h) for h in range(H)]
                for index in at:
                    bias[index] = p["bias"][index]
                heads = [h for h in range(H) if not np.isneginf(p["bias"][at[h]])]
            for h in heads:
                where = dictionary.address(full, source, b, place)
                used_blocks.add((source, b, place // p[("", "extra_")[source] + "kv_cache"].shape[1]))
                for name in ("extra_kv_cache",) if source else ("kv_cache", "kpe_cache"):
                    cache = p.get(name)
                    if cache is not None:
                        index = (*where, h // (H // kv_heads)) if cache.ndim == 4 else where
                        cache[index] = np.clip(amplitude * rng.standard_normal(cache.shape[-1]), -16, 16)
    if bias is not None:
        p["bias"] = bias
    for source, prefix in enumerate(("", "extra_")):
        table = p.get(prefix + "block_table")
        if table is not None:
            for b, column in np.ndindex(table.shape):
                if (source, b, column) not in used_blocks:
                    table[b, column] = rng.choice(GARBAGE)
