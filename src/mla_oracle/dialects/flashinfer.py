# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's BatchMLAPagedAttentionWrapper: backends fa2 and fa3, and cutlass.

Read from flashinfer-ai/flashinfer fb28d72: flashinfer/mla/_core.py (plan and run, whose arguments are taken together),
include/flashinfer/attention/mla*.cuh.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import Array, dtype_name
from ..cases import PagedCase
from ..checks import arguments_named
from ..errors import InputError
from ..spellings.layouts import join, split
from ..spellings.tables import from_csr_pages, to_csr_pages
from . import spelling
from .arguments import Given, tensor, value
from .dialect import Dialect

SOURCE = "flashinfer-ai/flashinfer fb28d72 flashinfer/mla/_core.py"
CSR = {"indptr": "kv_indptr", "indices": "kv_indices", "kv_lens": "kv_len_arr"}


class Wrapper(Dialect):
    """plan, then run, on fa2 or fa3: query and cache in two parts each, CSR pages, a scale without default.

    LSE in base 2 unless return_lse_base_on_e, -inf where a query sees nothing. An fp8 cache has scales beside it:
    ckv_scale, a number, or ckv_scale_arr for each token and 128 columns, and kpe_scale; the query is bf16 then.
    """

    name = "flashinfer"
    call = "BatchMLAPagedAttentionWrapper"
    source = SOURCE
    arguments = {
        "q_nope": tensor("t h ckv", "bf16 f16"),
        "q_pe": tensor("t h kpe", "=q_nope"),
        "ckv_cache": tensor("pages page_size ckv", "bf16 f16 e4m3"),
        "kpe_cache": tensor("pages page_size kpe", "=ckv_cache"),
        "qo_indptr": tensor("b+1", "i32"),
        "kv_indptr": tensor("b+1", "i32"),
        "kv_indices": tensor("entries", "i32"),
        "kv_len_arr": tensor("b", "i32"),
        "causal": value(bool),
        "sm_scale": value(float),
        "return_lse_base_on_e": value(bool, False),
        "ckv_scale": value(float, None),
        "ckv_scale_arr": tensor("pages page_size groups", "f32", None),
        "kpe_scale": value(float, None),
        "num_heads": value(int, None, size="h"),
        "head_dim_ckv": value(int, None, size="ckv"),
        "head_dim_kpe": value(int, None, size="kpe"),
        "page_size": value(int, None, size="page_size"),
    }
    launch = ("q_data_type", "kv_data_type", "use_profiler", "profiler_buffer", "return_lse", "out", "lse")
    called = {"softmax_scale": "sm_scale", "kv_cache": "ckv_cache", "seq_lens": "kv_len_arr"}
    masks = "length; causal bottom-right"
    out_axes = "t h ckv"
    lse, lse_axes, lse_base = "lse", "t h", "2"

    def canonical(self, given: Given) -> dict[str, Any]:
        with arguments_named(**CSR):
            table = from_csr_pages(
                given.kv_indptr,
                given.kv_indices,
                block_size=given.sizes["page_size"],
                kv_lens=given.kv_len_arr,
                num_blocks=given.sizes["pages"],
            )
        fields = {
            "q": join(given.q_nope, given.q_pe),
            "qo_indptr": given.qo_indptr,
            "block_table": table.block_table,
            "seq_lens": table.seq_lens,
            "softmax_scale": given.sm_scale,
            "head_dim_v": given.sizes["ckv"],
            "causal": given.causal,
            "lse_base": "e" if given.return_lse_base_on_e else "2",
        }
        return fields | (_fp8(given) if given.ckv_cache.dtype.itemsize == 1 else _dense(given))

    def spell(self, case: PagedCase) -> dict[str, Any]:
        pages = to_csr_pages(case.block_table, case.seq_lens, block_size=case.kv_cache.shape[1])
        latent, rope = split(spelling.rows_of(case, "N"), case.head_dim_v)
        return {
            "q_nope": latent,
            "q_pe": rope,
            "qo_indptr": spelling.indptr(case),
            "kv_indptr": pages.indptr,
            "kv_indices": pages.indices,
            "kv_len_arr": case.seq_lens,
            "causal": case.causal,
            "sm_scale": case.softmax_scale,
            "return_lse_base_on_e": case.lse_base == "e",
            **_parts(case),
        }


def _dense(given: Given) -> dict[str, Any]:
    for name in ("ckv_scale", "ckv_scale_arr", "kpe_scale"):
        if given[name] is not None:
            raise InputError(f"{name} is given, expected none with a cache of 16 bits")
    return {"kv_cache": join(given.ckv_cache, given.kpe_cache)}


def _fp8(given: Given) -> dict[str, Any]:
    if (kind := dtype_name("q_nope", given.q_nope)) != "bf16":
        raise InputError(f"q_nope is {kind}, expected bf16 with a cache of e4m3")
    if (given.ckv_scale is None) == (given.ckv_scale_arr is None):
        many = "none" if given.ckv_scale is None else "both"
        raise InputError(f"{many} of ckv_scale and ckv_scale_arr given, expected one of them")
    if given.kpe_scale is None:
        raise InputError("kpe_scale is missing, expected it with a cache of e4m3")
    fields = {
        "kv_cache": given.ckv_cache,
        "kpe_cache": given.kpe_cache,
        "kpe_scale": np.array([given.kpe_scale], np.float32),
        "cache_format": "flashinfer_fp8" if given.ckv_scale_arr is None else "flashinfer_fp8_grouped",
        "ckv_scale": given.ckv_scale_arr,
    }
    return fields | ({} if given.ckv_scale is None else {"kv_scale": np.array([given.ckv_scale], np.float32)})


def _parts(case: PagedCase) -> dict[str, Any]:
    """The arguments of the cache."""
    if case.cache_format is None:
        ckv, kpe = split(spelling.one_head(spelling.joined(case)), case.head_dim_v)
        return {"ckv_cache": ckv, "kpe_cache": kpe}
    if case.cache_format not in ("flashinfer_fp8", "flashinfer_fp8_grouped"):
        raise InputError(f"cache_format is {case.cache_format}, expected flashinfer_fp8 or flashinfer_fp8_grouped")
    return {
        "ckv_cache": case.kv_cache,
        "kpe_cache": case.kpe_cache,
        "ckv_scale": spelling.number_of("kv_scale", case.kv_scale),
        "ckv_scale_arr": case.ckv_scale,
        "kpe_scale": spelling.number_of("kpe_scale", case.kpe_scale),
    }


class Cutlass(Dialect):
    """run on the backend cutlass (SM100): 128 heads, one token a request, and the scale 1/sqrt(192) in the kernel.

    The blocks of a table fill tiles of 128 rows. No LSE.
    """

    name = "flashinfer-cutlass"
    call = "BatchMLAPagedAttentionWrapper"
    source = SOURCE
    arguments = {
        "q_nope": tensor("b 128 512", "bf16 f16"),
        "q_pe": tensor("b 128 64", "=q_nope"),
        "ckv_cache": tensor("pages page_size 512", "=q_nope"),
        "kpe_cache": tensor("pages page_size 64", "=q_nope"),
        "kv_len": tensor("b", "i32"),
        "page_table": tensor("b blocks", "i32"),
    }
    launch = ("out", "return_lse", "profiler_buffer")
    limits = {"page_size": (16, 32, 64, 128)}
    itself = "scale 1/sqrt(192)"
    called = {"kv_cache": "ckv_cache", "seq_lens": "kv_len", "block_table": "page_table"}
    masks = "length"
    out_axes = "b 128 512"

    def canonical(self, given: Given) -> dict[str, Any]:
        if given.sizes["blocks"] * given.sizes["page_size"] % 128:
            count, page = given.sizes["blocks"], given.sizes["page_size"]
            raise InputError(f"page_table has {count} blocks of {page}, expected tiles of 128 rows to be full")
        return {
            "q": join(given.q_nope, given.q_pe),
            "kv_cache": join(given.ckv_cache, given.kpe_cache),
            "block_table": given.page_table,
            "seq_lens": given.kv_len,
            "softmax_scale": spelling.inverse_root(192),
            "head_dim_v": 512,
            "causal": False,
        }

    def spell(self, case: PagedCase) -> dict[str, Any]:
        q_nope, q_pe = split(spelling.rows_of(case, "B"), 512)
        ckv, kpe = split(spelling.one_head(spelling.joined(case)), 512)
        return {
            "q_nope": q_nope,
            "q_pe": q_pe,
            "ckv_cache": ckv,
            "kpe_cache": kpe,
            "kv_len": case.seq_lens,
            "page_table": _whole_tiles(case.block_table, case.kv_cache.shape[1]),
        }


def _whole_tiles(table: Array, page_size: int) -> Array:
    """A table with as many columns more as fill a tile of 128 rows, of entries that nobody reads."""
    spare = -table.shape[1] % max(1, 128 // page_size)
    return np.pad(table, ((0, 0), (0, spare)), constant_values=-1)


DIALECTS = (Wrapper(), Cutlass())
