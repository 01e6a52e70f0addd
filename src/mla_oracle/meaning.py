# SPDX-License-Identifier: Apache-2.0
"""What a case means, in words and shapes: its conventions as sentences, and the shape of every result."""

from __future__ import annotations

import math

from .cases import Case, PagedCase
from .formats import get


def result_shapes(case: Case) -> dict[str, list[int]]:
    """The shape of every result of `case`."""
    match case:
        case PagedCase():
            rows = list(case.q.shape[:-1])
            turned = [rows[0], rows[2], rows[1]] if case.lse_axes == "BHT" and len(rows) == 3 else rows
            shapes = {"out": [*rows, case.head_dim_v], "lse": turned}
            if case.shards > 1:
                shapes |= {f"partial_{name}": [case.shards, *shape] for name, shape in shapes.items()}
            return shapes
        case _ if case.kind in ("naive", "absorbed"):
            tensors = case.tensors()
            return {"out": [*tensors["q_nope"].shape[:2], tensors["w_uv"].shape[1]]}
        case _ if case.kind == "merge":
            return {name: list(case.tensors()[f"partial_{name}"].shape[1:]) for name in ("out", "lse")}
        case _ if case.kind == "rope":
            return {"out": list(case.tensors()["x"].shape)}
    return {"kv_cache": list(case.tensors()["kv_cache"].shape)}


def meaning(case: Case) -> list[str]:
    """The conventions of `case` as sentences."""
    match case:
        case PagedCase() if case.extensions():
            return [*_rows(case), *_scores(case), *_keys(case), *_results(case)]
        case PagedCase():
            return _plain(case)
        case _ if case.kind in ("naive", "absorbed"):
            t_q, t_kv = len(case.tensors()["q_nope"]), len(case.tensors()["c_kv"])
            scale = case.conventions().get("softmax_scale", "1/sqrt(P + R)")
            return [
                f"query i of {t_q} sees rows 0 .. {t_kv - t_q} + i of {t_kv}",
                f"score = (q_nope . k_nope + q_pe . k_pe) * {scale}",
            ]
    return []


def _plain(case: PagedCase) -> list[str]:
    sentences = [
        f"key: all {case.q.shape[-1]} elements of a row; value: its first {case.head_dim_v}",
        f"score = (q . key) * {case.softmax_scale!r}",
        _visible(case),
        f"lse is in base {case.lse_base}; a row that sees nothing has out 0 and lse {case.empty_lse}",
    ]
    if case.page_ids is not None:
        sentences.append(f"page i lies at block page_ids[i] of {case.num_blocks}, {case.block_stride} bytes apart")
    if case.shards > 1:
        sentences.append(f"tokens are owned by {case.shards} ranks, {case.shard_layout}; out is their merge")
    return sentences


def _visible(case: PagedCase) -> str:
    tokens = case.q.shape[1] if case.q.ndim == 4 else 1
    if not case.causal:
        return "every query sees all seq_len tokens"
    if case.qo_indptr is not None:
        return "query t of the T of its request sees the first seq_len - T + t + 1 tokens"
    return f"query t of {tokens} sees the first seq_len - {tokens} + t + 1 tokens"


def _rows(case: PagedCase) -> list[str]:
    """What a row is, and which of it is the value."""
    D, first, width = case.q.shape[-1], case.value_offset, case.head_dim_v
    sentences = [f"key: all {D} elements of a row", f"values: columns {first} to {first + width - 1} of each row"]
    if case.cache_format is not None:
        rule = get(case.cache_format).reader_of(case.cache_reader)
        sentences.append(f"rows: bytes of format {case.cache_format}, read by rule {rule!r}")
        names = ("kv_scale", "kpe_scale", "ckv_scale", "extra_kv_scale")
        scales = [name for name in names if getattr(case, name) is not None]
        if scales:
            sentences.append(f"the format's scales outside the rows: {', '.join(scales)}")
    if case.extra_cache_format is not None:
        rule = get(case.extra_cache_format).reader_of(None)
        sentences.append(f"rows of the extra cache: bytes of format {case.extra_cache_format}, read by rule {rule!r}")
    if case.kpe_cache is not None:
        R = case.kpe_cache.shape[-1]
        sentences.append(f"storage: columns 0 to {D - R - 1} of a row in kv_cache, {D - R} to {D - 1} in kpe_cache")
    if case.cache_format is None and case.kv_cache.ndim == 4:
        heads, H = case.kv_cache.shape[2], case.q.shape[-2]
        sentences.append(f"{heads} key/value heads: head h of {H} reads head h // {H // max(1, heads)}")
    if case.qo_indptr is not None:
        sentences.append("q is ragged: request b has its rows qo_indptr[b] to qo_indptr[b + 1] - 1")
    return sentences


def _scores(case: PagedCase) -> list[str]:
    """What is done to a score, in order."""
    scale = repr(case.softmax_scale) if case.q_scale is None else f"({case.softmax_scale!r} * {case.q_scale!r})"
    sentences = [f"score = (q . key) * {scale}"]
    if case.q_scale is not None:
        sentences.append(f"q stands for q * {case.q_scale!r}")
    if case.softcap is not None:
        sentences.append(f"softcap: score becomes {case.softcap!r} * tanh(score / {case.softcap!r}), before any bias")
    if case.bias is not None:
        of = "of the query and the head" if case.bias.ndim == case.q.ndim else "of the query, the same for all heads,"
        sentences.append(f"bias: that {of} at the key's position is added to the score; -inf skips the key")
    if case.sinks is not None:
        sentences.append("sinks: a logit a head in the softmax's denominator, without a value")
    return sentences


def _keys(case: PagedCase) -> list[str]:
    """Which keys a query sees."""
    by_slot = case.topk_by == "slot"
    sentences = [] if by_slot else [_visible(case)]
    bounds = [None if bound in (None, -1) else bound for bound in (case.window_left, case.window_right)]
    if bounds != [None, None]:
        left = "token 0" if bounds[0] is None else f"i - {bounds[0]}"
        end = "i" if case.causal else "the end"
        right = end if bounds[1] is None else f"i + {bounds[1]}" if bounds[1] else "i"
        kept = f", and the first {case.window_first} tokens" if case.window_first else ""
        sentences.append(f"window: a query at position i sees {left} to {right}{kept}")
    for prefix, cache in (("", "kv_cache"), ("extra_", "extra_kv_cache")):
        indices, length = getattr(case, f"{prefix}topk_indices"), getattr(case, f"{prefix}topk_length")
        if indices is None:
            continue
        what = f"slots (block * block_size + offset) of {cache}" if by_slot else f"positions of tokens in {cache}"
        limit = f"the slots of {cache}" if by_slot else f"{prefix}seq_lens"
        outside = "skipped" if case.topk_outside == "skip" else "refused"
        sentences.append(
            f"selection: {prefix}topk_indices are {what}, {indices.shape[-1]} a query, in their order, one named twice"
            f" counted twice; negative ones are skipped, those at or above {limit} {outside}"
        )
        if length is not None:
            whose = "query" if length.shape == indices.shape[:-1] else "request"
            sentences.append(f"entries from {prefix}topk_length of the {whose} on may be anything")
    if case.extra_kv_cache is not None:
        sentences.append("the keys of extra_kv_cache follow those of kv_cache in one softmax, whatever their position")
    if by_slot:
        sentences.append("by slot there is no table, no length, no causality and no window")
    return sentences


def _results(case: PagedCase) -> list[str]:
    """What out and lse hold."""
    empty = {math.inf: "+inf", -math.inf: "-inf"}.get(case.empty_lse, repr(case.empty_lse))
    axes = " ".join(case.lse_axes if case.q.ndim == 4 else "NH" if case.qo_indptr is not None else "BH")
    sink = "" if case.sinks is None else f" the sink {'counted' if case.sinks_in_lse else 'not counted'},"
    sentences = [
        f"lse: base {case.lse_base}, axes {axes},{sink} {empty} where a row sees no key",
        "out: 0 where a row sees no key",
    ]
    if case.output_scale is not None:
        sentences.append(f"out is multiplied by {case.output_scale!r} before it is stored")
    return sentences
