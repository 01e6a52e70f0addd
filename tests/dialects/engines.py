# SPDX-License-Identifier: Apache-2.0
"""Every call of mla_oracle.dialects computed from its own arguments, f64, by loops that share no code with it.

    results = ENGINES["flashmla-dense"](arguments)

`Kernel` is the innermost step; a wrong kernel is a Kernel with another `score`, `value` or `keys`.
"""

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from mla_oracle import formats

LOG2E = 1.0 / math.log(2.0)


@dataclass(frozen=True)
class Kernel:
    """One query head over its keys, in order."""

    def query(self, q, where):
        return q

    def value(self, rows, columns):
        return rows[:, columns]

    def keys(self, rows, where):
        return rows

    def __call__(self, q, rows, scale, columns, where, *, sink=None, cap=0.0, bias=None):
        """(out [V], natural LSE without the sink, with it); (0, None, None) without keys."""
        rows = self.keys(rows.astype(np.float64), where)
        values = self.value(rows, columns)
        if not len(rows):
            return np.zeros(values.shape[1]), None, None
        s = rows @ self.query(q.astype(np.float64), where) * scale
        s = cap * np.tanh(s / cap) if cap else s
        s = s if bias is None else s + bias.astype(np.float64)
        live = s > -np.inf
        if not live.any():
            return np.zeros(values.shape[1]), None, None
        m = s.max()
        w = np.where(live, np.exp(s - m), 0.0)
        alone = m + np.log(w.sum())
        whole = alone if sink is None else np.logaddexp(alone, float(sink))
        out = (w[live] @ values[live]) * np.exp(m - whole)
        return out, alone, whole


RIGHT = Kernel()


def attend(kernel, q, select, scale, columns, *, empty, base="e", with_sink=False, sinks=None, cap=0.0, bias=None):
    """q [rows.., H, D]; select(index) -> (rows [n, D], bias [n] or None): out [rows.., H, V], lse [rows.., H]."""
    width = columns.stop - columns.start
    out, lse = np.empty((*q.shape[:-1], width)), np.empty(q.shape[:-1])
    for index in np.ndindex(*q.shape[:-1]):
        rows = select(index)
        sink = None if sinks is None else sinks[index[-1]]
        extra = None if bias is None else bias(index)
        found = kernel(q[index], rows, scale, columns, index, sink=sink, cap=cap, bias=extra)
        out[index] = found[0]
        own = found[2] if with_sink else found[1]
        lse[index] = empty if own is None else own * (LOG2E if base == "2" else 1.0)
    return out, lse


def paged(cache, table, length):
    """The first `length` rows of one request: cache [P, S, D], table [max_blocks]."""
    S = cache.shape[1]
    return np.array([cache[table[j // S], j % S] for j in range(length)]).reshape(length, cache.shape[2])


def causal_end(length, tokens, t, causal):
    return max(0, length - tokens + t + 1) if causal else length


def packed(cache, slots, bytes_to_rows):
    """Rows of slots, negative ones left out."""
    kept = np.array([s for s in slots if s >= 0], np.int64)
    return bytes_to_rows(cache, kept)


def unpacked(name, reader=None):
    def read(cache, slots):
        cache = cache.view(np.uint8)
        size = cache.shape[1]
        found = formats.read(name, {"kv_cache": cache}, slots // size, slots % size, block_size=size, reader=reader)
        return found.astype(np.float64)

    return read


def dense_slots(cache, slots):
    flat = cache.astype(np.float64)
    return np.array([flat[s // cache.shape[1], s % cache.shape[1]] for s in slots]).reshape(-1, cache.shape[-1])


def flashmla_dense(a, kernel=RIGHT):
    q, V = a["q"], a["head_dim_v"]
    scale = a.get("softmax_scale") or 576 ** (-0.5)
    group = q.shape[2] // a["k_cache"].shape[2]

    def rows(index):
        b, t, h = index
        end = causal_end(a["cache_seqlens"][b], q.shape[1], t, a.get("causal", False) and q.shape[1] > 1)
        return paged(a["k_cache"][:, :, h // group], a["block_table"][b], end)

    out, lse = attend(kernel, q, rows, scale, slice(0, V), empty=np.inf)
    return {"out": out, "lse": lse.transpose(0, 2, 1)}


def flashmla_sparse(a, kernel=RIGHT):
    q, cache = a["q"], a["k_cache"][:, :, 0]
    read = unpacked({656: "fp8_ds_mla", 584: "model1"}[cache.shape[-1]])
    scale = a.get("softmax_scale") or q.shape[-1] ** (-0.5)

    def rows(index):
        b, t, _ = index
        length = a["topk_length"][b] if a.get("topk_length") is not None else None
        found = packed(cache, a["indices"][b, t][:length], read)
        if a.get("extra_k_cache") is None:
            return found
        more = a["extra_topk_length"][b] if a.get("extra_topk_length") is not None else None
        extra = packed(a["extra_k_cache"][:, :, 0], a["extra_indices_in_kvcache"][b, t][:more], read)
        return np.concatenate([found, extra])

    out, lse = attend(kernel, q, rows, scale, slice(0, a["head_dim_v"]), empty=np.inf, sinks=a.get("attn_sink"))
    return {"out": out, "lse": lse.transpose(0, 2, 1)}


def flashmla_prefill(a, kernel=RIGHT):
    def rows(index):
        n = a["topk_length"][index[0]] if a.get("topk_length") is not None else None
        kept = [s for s in a["indices"][index[0], 0][:n] if 0 <= s < len(a["kv"])]
        return a["kv"][kept, 0]

    columns = slice(0, a.get("d_v", 512))
    out, lse = attend(kernel, a["q"], rows, a["sm_scale"], columns, empty=np.inf, sinks=a.get("attn_sink"))
    return {"out": out, "lse": lse}


def owner_of(indptr, row):
    """(request, token, tokens) of a row."""
    b = next(b for b in range(len(indptr) - 1) if indptr[b] <= row < indptr[b + 1])
    return b, row - indptr[b], indptr[b + 1] - indptr[b]


def flashinfer(a, kernel=RIGHT):
    q = np.concatenate([a["q_nope"], a["q_pe"]], axis=-1)
    if a.get("kpe_scale") is None:
        ckv, kpe = a["ckv_cache"].astype(np.float64), a["kpe_cache"].astype(np.float64)
    else:
        bf16 = ml_dtypes.bfloat16
        if a.get("ckv_scale_arr") is None:
            ckv = (a["ckv_cache"].astype(bf16) * bf16(a["ckv_scale"])).astype(np.float64)
        else:
            scale = np.repeat(a["ckv_scale_arr"], 128, axis=-1).astype(bf16)
            ckv = (a["ckv_cache"].astype(bf16) * scale).astype(np.float64)
        kpe = (a["kpe_cache"].astype(bf16) * bf16(a["kpe_scale"])).astype(np.float64)
    cache = np.concatenate([ckv, kpe], axis=-1)

    def rows(index):
        b, t, tokens = owner_of(a["qo_indptr"], index[0])
        end = causal_end(a["kv_len_arr"][b], tokens, t, a["causal"])
        return paged(cache, a["kv_indices"][a["kv_indptr"][b] :], end)

    base = "e" if a.get("return_lse_base_on_e") else "2"
    columns = slice(0, a["q_nope"].shape[-1])
    out, lse = attend(kernel, q, rows, a["sm_scale"], columns, empty=-np.inf, base=base)
    return {"out": out, "lse": lse}


def flashinfer_cutlass(a, kernel=RIGHT):
    q = np.concatenate([a["q_nope"], a["q_pe"]], axis=-1)
    cache = np.concatenate([a["ckv_cache"], a["kpe_cache"]], axis=-1)

    def rows(index):
        return paged(cache, a["page_table"][index[0]], a["kv_len"][index[0]])

    return {"out": attend(kernel, q, rows, 1 / np.sqrt(192), slice(0, 512), empty=0)[0]}


def flashinfer_trtllm(a, kernel=RIGHT):
    q = a["query"]
    cache = a["kv_cache"][:, 0] if a["kv_cache"].ndim == 4 else a["kv_cache"]
    tables = a["block_tables"] if a.get("uses_shared_paged_kv_idx", True) else a["block_tables"][:, 0]

    def rows(index):
        if q.ndim == 3:
            b, t, tokens = owner_of(a["cum_seq_lens_q"], index[0])
        else:
            (b, t), tokens = index[:2], q.shape[1]
        return paged(cache, tables[b], max(0, a["seq_lens"][b] - tokens + t + 1))

    out, lse = attend(
        kernel, q, rows, a.get("bmm1_scale", 1.0), slice(0, a["kv_lora_rank"]), empty=-np.inf, base="2",
        sinks=a.get("sinks"),
    )  # fmt: skip
    found = {"out": out * a.get("bmm2_scale", 1.0)}
    return found if a.get("sinks") is not None else {**found, "lse": lse.reshape(-1, lse.shape[-1])}


def flashinfer_cute_dsl(a, kernel=RIGHT):
    q, cache = a["query"], a["kv_cache"].reshape(-1, *a["kv_cache"].shape[-2:])
    modular = a.get("cute_dsl_impl", "auto") == "modular" or a.get("sinks") is not None

    def rows(index):
        end = causal_end(a["seq_lens"][index[0]], q.shape[1], index[1], not modular)
        return paged(cache, a["block_tables"][index[0]], end)

    columns = slice(0, a["kv_lora_rank"])
    out, lse = attend(kernel, q, rows, a.get("bmm1_scale", 1.0), columns, empty=-np.inf, sinks=a.get("sinks"))
    found = {"out": out * a.get("bmm2_scale", 1.0)}
    return found if modular else {**found, "lse": lse}


def flashinfer_xqa(a, kernel=RIGHT):
    cache = a["kv_cache"].reshape(-1, *a["kv_cache"].shape[-2:])

    def rows(index):
        return paged(cache, a["block_tables"][index[0]], a["seq_lens"][index[0]])

    out, _ = attend(kernel, a["query"], rows, a.get("bmm1_scale", 1.0), slice(0, a["kv_lora_rank"]), empty=0)
    return {"out": out * a.get("bmm2_scale", 1.0)}


def flashinfer_prims_ts(a, kernel=RIGHT):
    q, cache = a["query"], a["kv_cache"].reshape(-1, *a["kv_cache"].shape[-2:])

    def rows(index):
        if q.ndim == 3:
            b, t, tokens = owner_of(a["qo_indptr"], index[0])
        else:
            (b, t), tokens = index[:2], q.shape[1]
        end = causal_end(a["seq_lens"][b], tokens, t, a.get("mask_type", "causal") == "causal")
        return paged(cache, a["block_tables"][b], end)

    out, _ = attend(kernel, q, rows, a.get("bmm1_scale", 1.0), slice(0, a.get("kv_lora_rank", 512)), empty=0)
    return {"out": out * a.get("bmm2_scale", 1.0)}


def flashinfer_trtllm_sparse(a, kernel=RIGHT):
    cache = a["kv_cache"][:, 0] if a["kv_cache"].ndim == 4 else a["kv_cache"]

    def rows(index):
        return packed(cache, a["block_tables"][index[:2]], dense_slots)

    out, lse = attend(
        kernel, a["query"], rows, a.get("bmm1_scale", 1.0), slice(0, a["kv_lora_rank"]), empty=-np.inf, base="2",
        sinks=a.get("sinks"),
    )  # fmt: skip
    found = {"out": out * a.get("bmm2_scale", 1.0)}
    return found if a.get("sinks") is not None else {**found, "lse": lse.reshape(-1, lse.shape[-1])}


def flashinfer_dsv4(a, kernel=RIGHT):
    def rows(index):
        n, slots = a["sparse_topk_lens"][index[:2]], a["sparse_indices"][index[:2]]
        near = packed(a["swa_kv_cache"][:, 0], slots[: min(n, 128)], dense_slots)
        return np.concatenate([near, packed(a["compressed_kv_cache"][:, 0], slots[128:n], dense_slots)])

    scale = a.get("bmm1_scale", 1.0)
    out, _ = attend(kernel, a["query"], rows, scale, slice(0, 512), empty=0, sinks=a.get("sinks"))
    return {"out": out * a.get("bmm2_scale", 1.0)}


def flashinfer_sm120(a, kernel=RIGHT):
    pages = a["kv_cache"]
    pages = pages if pages.ndim == 3 else pages[:, 0] if pages.shape[1] == 1 else pages[:, :, 0]
    if pages.shape[-1] == 656:
        rule = "f32_bf16" if a.get("kv_scale_format") == "arbitrary_fp32" else "exponent"
        read = unpacked("fp8_ds_mla", rule)
    else:
        read = unpacked("model1")

    def rows(index):
        t = index[0]
        n = a["topk_length"][t] if a.get("topk_length") is not None else None
        found = packed(pages, a["indices"][t][:n], read)
        if a.get("extra_kv_cache") is None:
            return found
        n = a["extra_topk_length"][t] if a.get("extra_topk_length") is not None else None
        return np.concatenate([found, packed(a["extra_kv_cache"], a["extra_indices"][t][:n], read)])

    columns = slice(0, a.get("d_v", 512))
    out, lse = attend(
        kernel, a["q"], rows, a["sm_scale"], columns, empty=-1e30, base="2", with_sink=True, sinks=a.get("attn_sink")
    )
    return {"output": out, "out_lse": lse}


def vllm_triton(a, kernel=RIGHT):
    keys = a["k_buffer"]
    if a.get("k_scale") is not None:
        keys = (keys.astype(np.float32) * a["k_scale"]).astype(a["q"].dtype)
    group = a["q"].shape[1] // keys.shape[2]

    def rows(index):
        b, h = index
        return paged(keys[:, :, h // group], a["req_to_token"][b], a["b_seq_len"][b])

    columns = slice(0, a["v_buffer"].shape[-1])
    out, lse = attend(kernel, a["q"], rows, a["sm_scale"], columns, empty=-np.inf, cap=a.get("logit_cap", 0.0))
    out[a["b_seq_len"] == 0] = np.nan
    return {"o": out, "lse": lse}


def vllm_cpu(a, kernel=RIGHT):
    def rows(index):
        return paged(a["kv_cache"], a["block_tables"][index[0]], a["seq_lens"][index[0]])

    return {"out": attend(kernel, a["query"], rows, a["scale"], slice(0, 512), empty=0)[0]}


def sglang_triton(a, kernel=RIGHT):
    group = a["q"].shape[1] // a["k_buffer"].shape[1]

    def rows(index):
        b, h = index
        tokens = a["kv_indices"][a["kv_indptr"][b] : a["kv_indptr"][b + 1]]
        return a["k_buffer"][tokens, h // group]

    columns = slice(0, a["v_buffer"].shape[-1])
    cap = a.get("logit_cap", 0.0)
    out, _ = attend(kernel, a["q"], rows, a["sm_scale"], columns, empty=0, cap=cap, sinks=a.get("sinks"))
    out[np.diff(a["kv_indptr"]) == 0] = np.nan
    return {"o": out}


def sglang_cpu(a, kernel=RIGHT, writes=True):
    keys = a["k_buffer"].copy()
    if writes:
        keys[a["loc"]] = a["key"]
    group = a["query"].shape[1] // keys.shape[1]

    def rows(index):
        b, h = index
        return keys[a["req_to_token"][a["req_pool_indices"][b], : a["seq_lens"][b]], h // group]

    columns = slice(0, a["v_buffer"].shape[-1])
    return {"output": attend(kernel, a["query"], rows, a["sm_scale"], columns, empty=0, cap=a["logit_cap"])[0]}


def sglang_cutlass(a, kernel=RIGHT):
    def rows(index):
        return paged(a["kv_c_and_k_pe_cache"], a["page_table"][index[0]], a["seq_lens"][index[0]])

    return {"out": attend(kernel, a["q_nope_and_q_pe"], rows, 1 / np.sqrt(192), slice(0, 512), empty=0)[0]}


def sglang_cpu_flashmla(a, kernel=RIGHT):
    packed_rows = {1: unpacked("fp8_ds_mla"), 2: unpacked("model1", "guarded")}.get(a["fp8_layout"])
    read = packed_rows if a["is_fp8_kvcache"] else dense_slots

    def listed(index, cache, indices, length):
        b, t = index[:2]
        slots = a[indices][b, t][: None if a.get(length) is None else a[length][b]]
        pages = a[cache][:, :, 0]
        return packed(pages, slots[slots < pages.shape[0] * pages.shape[1]], read)

    def rows(index):
        found = listed(index, "k_cache", "indices", "topk_length")
        if a.get("extra_k_cache") is None:
            return found
        return np.concatenate([found, listed(index, "extra_k_cache", "extra_indices", "extra_topk_length")])

    columns = slice(0, a["head_dim_v"])
    out, lse = attend(kernel, a["q"], rows, a["softmax_scale"], columns, empty=np.inf, sinks=a.get("attn_sink"))
    return {"out": out, "lse": lse.transpose(0, 2, 1)}


def tensorrt_llm_fp8(a, kernel=RIGHT):
    scale, out_scale = float(a["mla_bmm1_scale"][0]), float(a["mla_bmm2_scale"][0])
    return trtllm_attention(a, a["quant_q_buffer"].view(ml_dtypes.float8_e4m3fn), scale, out_scale, kernel)


def tensorrt_llm(a, kernel=RIGHT):
    width = a["qk_nope_head_dim"] + a["qk_rope_head_dim"]
    return trtllm_attention(a, a["q"], 1 / (a.get("q_scaling", 1.0) * np.sqrt(width)), 1.0, kernel)


def trtllm_attention(a, folded, scale, out_scale, kernel):
    q = folded.reshape(len(folded), a["num_heads"], -1)
    T = a.get("predicted_tokens_per_seq", 1)
    pool = a["kv_cache_pool"][:, 0, :, 0]

    def rows(index):
        b, t = divmod(index[0], T)
        end = max(0, a["sequence_length"][b] - T + t + 1)
        return paged(pool, a["kv_cache_block_offsets"][b, 0], end)

    out, _ = attend(kernel, q, rows, scale, slice(0, a["kv_lora_rank"]), empty=0)
    return {"output": out.reshape(len(out), -1) * out_scale}


def aiter(a, kernel=RIGHT):
    cache = a["kv_buffer"][:, :, 0].astype(np.float64)
    if a["kv_buffer"].dtype.itemsize == 1:
        cache = cache * (1.0 if a.get("kv_scale") is None else float(a["kv_scale"][0]))
    size = cache.shape[1]
    scale = a.get("sm_scale") or 1 / np.sqrt(a["q"].shape[-1])
    if a.get("q_scale") is not None:
        scale = scale * float(a["q_scale"][0])

    def rows(index):
        b, t, tokens = owner_of(a["qo_indptr"], index[0])
        pages = a["kv_indices"][a["kv_indptr"][b] : a["kv_indptr"][b + 1]]
        length = (len(pages) - 1) * size + a["kv_last_page_lens"][b] if len(pages) else 0
        return paged(cache, pages, max(0, length - tokens + t + 1))

    width = 512 if a.get("o") is None else a["o"].shape[-1]
    out, lse = attend(kernel, a["q"], rows, scale, slice(0, width), empty=-np.inf)
    out[np.isneginf(lse)] = np.nan
    return {"o": out, "lse": lse}


def lmdeploy(a, kernel=RIGHT):
    q, scale = a["query"], a.get("softmax_scale") or 576 ** (-0.5)
    T = len(q) // len(a["kv_seqlens"])

    def rows(index):
        b, t = divmod(index[0], T)
        end = causal_end(a["kv_seqlens"][b], T, t, a.get("causal", True))
        return paged(a["k_cache"][:, :, 0], a["block_offsets"][b], end)

    return {"attn_output": attend(kernel, q, rows, scale, slice(0, a.get("v_head_size", 512)), empty=0)[0]}


def tvm(a, kernel=RIGHT):
    size, info = a["pages"].shape[1], a["length_info"]

    def rows(index):
        b, t, tokens = owner_of(a["q_indptr"], index[0])
        pages = a["page_values"][a["page_indptr"][b] : a["page_indptr"][b + 1]]
        last = info[b] if info.ndim == 1 else info[0, b]
        length = (len(pages) - 1) * size + last if len(pages) else 0
        held = list(range(length))
        if info.ndim == 2:
            held = held[: info[2, b]] + held[info[1, b] :]
        held = held[: causal_end(len(held), tokens, t, a["causal"])]
        return np.array([a["pages"][pages[j // size], j % size] for j in held]).reshape(len(held), a["q"].shape[-1])

    out, lse = attend(kernel, a["q"], rows, a["sm_scale"], slice(0, a["d_latent"]), empty=-5e4, base="2")
    return {"output": out, "lse": lse}


def tokenspeed(a, kernel=RIGHT):
    q = a["query"]

    def rows(index):
        end = causal_end(a["seq_lens"][index[0]], q.shape[1], index[1], a.get("causal_mask", True))
        return paged(a["kv_cache"], a["block_tables"][index[0]], end)

    out, _ = attend(kernel, q, rows, a["softmax_scale"], slice(0, 512), empty=0)
    return {"out": out * a.get("output_scale", 1.0)}


def sixes(data):
    """[.., 8 + 16] bytes -> [.., 32]: column by column, by ggml's struct block_q6_0."""
    found = np.empty((*data.shape[:-1], 32), np.int64)
    for j in range(16):
        high = data[..., j % 8] >> (4 * (j // 8))
        found[..., j] = (data[..., 8 + j] & 15) | (high & 3) << 4
        found[..., j + 16] = (data[..., 8 + j] >> 4) | (high & 12) << 2
    return found - 32


def ggml(first):
    def engine(a, kernel=RIGHT):
        q = a["q"].transpose(0, 2, 1, 3)
        keys, width = a["k"][:, 0], a["v"].shape[-1]
        if keys.dtype == np.uint8:  # blocks of an f16 and 32 int8 (q8_0), or 8 + 16 bytes of six bits a column (q6_0)
            size = keys.shape[-1] // (q.shape[-1] // 32)
            blocks = keys.reshape(*keys.shape[:2], -1, size)
            scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float64)
            quants = blocks[..., 2:].view(np.int8) if size == 34 else sixes(blocks[..., 2:])
            keys = (quants * scale).reshape(*keys.shape[:2], -1)
            width = width // size * 32
        mask = a.get("mask")
        wide = None if mask is None else np.broadcast_to(mask, (len(q), q.shape[2], *mask.shape[2:]))

        def bias(index):
            s, t, h = index
            return wide[s, h, t]

        columns = slice(first, first + width)
        out, _ = attend(
            kernel, q, lambda index: keys[index[0]], a["scale"], columns, empty=0, sinks=a.get("sinks"),
            cap=a.get("logit_softcap", 0.0), bias=None if mask is None else bias,
        )  # fmt: skip
        return {"dst": out}

    return engine


def memra(a, kernel=RIGHT):
    names = ("q_nope", "q_pe", "c_kv", "k_pe", "w_uk", "w_uv")
    q_nope, q_pe, c_kv, k_pe, w_uk, w_uv = (a[name].astype(np.float64) for name in names)
    t_q, t_kv, scale = len(q_nope), len(c_kv), 1 / np.sqrt(q_nope.shape[-1] + q_pe.shape[-1])
    out = np.empty((t_q, q_nope.shape[1], w_uv.shape[1]))
    for i, h in np.ndindex(*out.shape[:2]):
        n = t_kv - t_q + i + 1
        q = np.concatenate([q_nope[i, h] @ w_uk[h], q_pe[i, h]])
        rows = np.concatenate([c_kv[:n], k_pe[:n]], axis=1)
        out[i, h] = w_uv[h] @ kernel(q, rows, scale, slice(0, c_kv.shape[1]), (i, h))[0]
    return {"out": out}


def vllm_cpp(a, kernel=RIGHT):
    def rows(index):
        return paged(a["kv_cache"], a["block_table"][index[0]], a["seq_lens"][index[0]])

    columns = slice(0, a["v_head_dim"])
    out, lse = attend(kernel, a["query"], rows, a["scale"], columns, empty=-np.inf)
    return {"out": out, "lse": lse}


ENGINES: dict[str, Any] = {
    "flashmla-dense": flashmla_dense,
    "flashmla-sparse": flashmla_sparse,
    "flashmla-prefill": flashmla_prefill,
    "flashinfer": flashinfer,
    "flashinfer-cutlass": flashinfer_cutlass,
    "flashinfer-trtllm": flashinfer_trtllm,
    "flashinfer-trtllm-sparse": flashinfer_trtllm_sparse,
    "flashinfer-cute-dsl": flashinfer_cute_dsl,
    "flashinfer-xqa": flashinfer_xqa,
    "flashinfer-prims-ts": flashinfer_prims_ts,
    "flashinfer-dsv4": flashinfer_dsv4,
    "flashinfer-sm120": flashinfer_sm120,
    "vllm-triton": vllm_triton,
    "vllm-cpu": vllm_cpu,
    "sglang-triton": sglang_triton,
    "sglang-cpu": sglang_cpu,
    "sglang-cutlass": sglang_cutlass,
    "sglang-cpu-flashmla": sglang_cpu_flashmla,
    "tensorrt-llm": tensorrt_llm,
    "tensorrt-llm-fp8": tensorrt_llm_fp8,
    "aiter": aiter,
    "lmdeploy": lmdeploy,
    "tvm": tvm,
    "tokenspeed": tokenspeed,
    "llama.cpp": ggml(0),
    "ik_llama.cpp": ggml(64),
    "memra": memra,
    "vllm.cpp": vllm_cpp,
}
