# SPDX-License-Identifier: Apache-2.0
"""Attention by its definition: a dictionary of the keys of one query, their counts, and sums by math.fsum.

Plain Python over the fields of a problem, the arguments of mla_oracle.decode; slow, and it shares nothing with the
package. `seen` says which keys count, so that a test can put NaN into all others. What the bytes of a cache format
stand for is what tests/formats/slow_reader.py reads, byte by byte.
"""

import math
import struct
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "formats"))
import slow_reader

DEFAULTS = {
    "causal": True, "lse_base": "e", "empty_lse": -math.inf, "topk_by": "position", "topk_outside": "error",
    "window_left": None, "window_right": None, "window_first": 0, "softcap": None, "sinks_in_lse": False,
    "value_offset": 0, "q_scale": None, "output_scale": None, "lse_axes": "BTH", "block_table": None, "seq_lens": None,
    "qo_indptr": None, "kpe_cache": None, "topk_indices": None, "topk_length": None, "extra_kv_cache": None,
    "extra_block_table": None, "extra_seq_lens": None, "extra_topk_indices": None, "extra_topk_length": None,
    "bias": None, "sinks": None, "cache_format": None, "cache_reader": None, "extra_cache_format": None,
}  # fmt: skip
# The reader that counts where a case names none.
FIRST_READER = {
    "fp8_e4m3": "fold", "fp8_e4m3fnuz": "fold", "fp8_e5m2": "fold", "flashinfer_fp8": "bf16",
    "flashinfer_fp8_grouped": "f32_bf16", "fp8_ds_mla": "f32_bf16", "aiter_v4": "shift", "model1": "bf16",
    "v4.1": "bf16", "v4.1_fp4": "bf16", "nvfp4_ds_mla": "f16_bf16", "nvfp4_sglang": "f32_bf16", "q8_0": "f32",
    "q6_0": "f32", "q8_KV": "f32",
}  # fmt: skip


class Row(NamedTuple):
    """One query of one head, and what its error is bounded by."""

    out: list  # [V]
    lse: float
    scores: list  # [n] of every key, as often as it counts
    sizes: list  # [n] scale * sum |q| |key|
    scaled: list  # [n] before the softcap
    capped: list  # [n] before the bias
    values: list  # [n][V]
    sink: float


def queries(p):
    """(request, token, index of the query's row in q) of every query, and how many tokens each request has."""
    if p["qo_indptr"] is not None:
        ends = [int(end) for end in p["qo_indptr"]]
        for b in range(len(ends) - 1):
            yield from ((b, t, (ends[b] + t,), ends[b + 1] - ends[b]) for t in range(ends[b + 1] - ends[b]))
    elif p["q"].ndim == 3:
        yield from ((b, 0, (b,), 1) for b in range(len(p["q"])))
    else:
        B, T = p["q"].shape[:2]
        yield from ((b, t, (b, t), T) for b in range(B) for t in range(T))


def listed(p, prefix, b, row):
    """The places that the selection names, negative ones and those outside left out."""
    indices = p[prefix + "topk_indices"]
    by_slot = p["topk_by"] == "slot"
    cache = p[prefix + "kv_cache"]
    capacity = cache.shape[0] * cache.shape[1] if by_slot else int(p[prefix + "seq_lens"][b])
    if indices is None:
        return list(range(capacity))
    length = p[prefix + "topk_length"]
    count = indices.shape[-1]
    if length is not None:
        count = int(length[row] if length.ndim == len(row) else length[b])
    return [int(i) for i in indices[row][:count] if 0 <= i < capacity]


def seen(p, b, t, T, row):
    """{(source, place): count} of the keys of a query that every head may see."""
    keys = {}
    for place in listed(p, "", b, row):
        if p["topk_by"] == "position":
            i = int(p["seq_lens"][b]) - T + t
            left, right = p["window_left"], p["window_right"]
            near = (left in (None, -1) or place >= i - left) and (right in (None, -1) or place <= i + right)
            if (p["causal"] and place > i) or not (near or place < p["window_first"]):
                continue
        keys[0, place] = keys.get((0, place), 0) + 1
    if p["extra_kv_cache"] is not None:
        for place in listed(p, "extra_", b, row):
            keys[1, place] = keys.get((1, place), 0) + 1
    return keys


def bias_index(p, source, place, row, h):
    """Where the bias of a key lies; None: it has none."""
    if p["bias"] is None or source == 1:
        return None
    return (*row, h, place) if p["bias"].ndim == len(row) + 2 else (*row, place)


def address(p, source, b, place):
    """(block, offset) in the cache of the source."""
    prefix = ("", "extra_")[source]
    block_size = p[prefix + "kv_cache"].shape[1]
    table = p[prefix + "block_table"]
    block, offset = divmod(place, block_size)
    return (block if table is None else int(table[b, block])), offset


def cache_row(p, source, b, place, kv_head):
    block, offset = address(p, source, b, place)
    if source and p["extra_cache_format"]:
        return packed_row(p, source, p["extra_cache_format"], None, block, offset)
    if p["cache_format"]:
        return packed_row(p, source, p["cache_format"], p["cache_reader"], block, offset)
    row = []
    for cache in (p["extra_kv_cache"],) if source else (p["kv_cache"], p["kpe_cache"]):
        if cache is not None:
            stored = cache[block, offset] if cache.ndim == 3 else cache[block, offset, kv_head]
            row += [float(x) for x in stored]
    return row


def packed_row(p, source, name, reader, block, offset):
    """What a reader makes of the row, each row decoded once; f32 where that is the precision."""
    if (source, block, offset) not in p["decoded"]:
        prefix = ("", "extra_")[source]
        names = ("kv_cache", "kv_scale") if source else ("kv_cache", "kpe_cache", "kv_scale", "kpe_scale", "ckv_scale")
        tensors = {tensor: p[prefix + tensor] for tensor in names if p.get(prefix + tensor) is not None}
        row = [float(x) for x in slow_reader.row(name, reader or FIRST_READER[name], tensors, block, offset)]
        if p["precision"] == "f32":
            row = [struct.unpack("<f", struct.pack("<f", x))[0] for x in row]
        p["decoded"][source, block, offset] = row
    return p["decoded"][source, block, offset]


def attend(p, precision="f64"):
    """{index of a query's row in q, then head: Row}"""
    p = {**DEFAULTS, **p, "precision": precision, "decoded": {}}
    H = p["q"].shape[-2]
    kv_heads = p["kv_cache"].shape[2] if p["kv_cache"].ndim == 4 else 1
    found = {}
    for b, t, row, T in queries(p):
        keys = seen(p, b, t, T, row)
        for h in range(H):
            found[(*row, h)] = attend_row(p, b, row, h, keys, h // (H // kv_heads))
    return found


def attend_row(p, b, row, h, keys, kv_head):
    scale = float(p["softmax_scale"]) * (1.0 if p["q_scale"] is None else float(p["q_scale"]))
    query = [float(x) for x in p["q"][row][h]]
    value = slice(p["value_offset"], p["value_offset"] + p["head_dim_v"])
    terms = []
    for (source, place), count in keys.items():
        index = bias_index(p, source, place, row, h)
        bias = 0.0 if index is None else float(p["bias"][index])
        if bias == -math.inf:
            continue
        key = cache_row(p, source, b, place, kv_head)
        size = scale * math.fsum(abs(x * y) for x, y in zip(query, key, strict=True))
        scaled = scale * math.fsum(x * y for x, y in zip(query, key, strict=True))
        capped = scaled if p["softcap"] is None else p["softcap"] * math.tanh(scaled / p["softcap"])
        terms += [(capped + bias, size, scaled, capped, key[value])] * count
    sink = -math.inf if p["sinks"] is None else float(p["sinks"][h])
    if not terms:
        return Row([0.0] * p["head_dim_v"], p["empty_lse"], [], [], [], [], [], sink)
    scores, sizes, scaled, capped, values = (list(column) for column in zip(*terms, strict=True))
    top = max(scores)
    keys_only = top + math.log(math.fsum(math.exp(s - top) for s in scores))
    weights, with_sink = [0.0] * len(scores), math.inf
    if sink < math.inf:
        top = max(top, sink)
        total = math.fsum([*(math.exp(s - top) for s in scores), math.exp(sink - top)])
        weights, with_sink = [math.exp(s - top) / total for s in scores], top + math.log(total)
    lse = with_sink if p["sinks_in_lse"] else keys_only
    out = [math.fsum(w * x for w, x in zip(weights, column, strict=True)) for column in zip(*values, strict=True)]
    factor = 1.0 if p["output_scale"] is None else p["output_scale"]
    lse /= math.log(2) if p["lse_base"] == "2" else 1.0
    return Row([x * factor for x in out], lse, scores, sizes, scaled, capped, values, sink)
