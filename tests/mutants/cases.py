# SPDX-License-Identifier: Apache-2.0
"""Small cases that between them show every mutant of attention; the first that shows one is the one it is tested on.

In a `filled` case the slots nobody may read hold numbers and the spare table entries pages that exist, so that a wrong
kernel's reads have an answer. A `far` case lies at page ids whose offsets do not fit in 32 bits.
"""

from dataclasses import replace
from functools import cache

import numpy as np

from mla_oracle.cases import PagedCase
from mla_oracle.cases.inputs import generate

SMALL = "paged:heads=3,row=20,value=12,scale=0.3,seed=5,block=4"
IDS = (
    f"{SMALL},lens=7+0+1+18+6,tokens=3",
    f"{SMALL},lens=7+5+18+6+9,tokens=2,causal=false,lse_base=2",
    f"{SMALL},lens=1+9+7,empty_lse=0",
    "paged:heads=3,row=20,value=12,scale=0.3,seed=5,block=1,lens=9+4+1",
    "paged:heads=18,row=192,value=128,lens=150+37,block=32,tokens=4,scale=0.1,dtype=f16",
    "paged:heads=2,row=8,value=4,lens=300+70,block=128,scale=0.7",
    "paged:heads=2,row=8,value=4,lens=2100,block=512,scale=0.7",
    "paged:heads=4,row=20,value=12,scale=0.3,seed=5,block=4,lens=64+8+90,tokens=2",
    f"{SMALL},lens=2+40,inputs=rising",
    f"{SMALL},lens=2+40,inputs=peaked,tokens=2",
    "paged:heads=2,row=20,value=12,scale=900,seed=5,block=4,lens=2+9,dtype=f16",
    "paged:heads=3,row=20,value=12,scale=30000,block=4,lens=1+1+2+1",
    f"{SMALL},lens=7+0+19+2,tokens=3,shards=3",
    f"{SMALL},lens=7+0+19+2,tokens=3,shards=3,shard_layout=interleaved",
    f"{SMALL},lens=9+30,pages=huge",
)


def filled(case: PagedCase, wider: int = 2) -> PagedCase:
    """Junk that is numbers, in a table `wider` columns wider."""
    rng = np.random.default_rng(3)
    cache = case.kv_cache.astype(np.float64)
    cache = np.where(np.isnan(cache), rng.standard_normal(cache.shape), cache).astype(case.kv_cache.dtype)
    pages = len(cache)
    table = np.pad(case.block_table, ((0, 0), (0, wider)), constant_values=-1)
    used = np.arange(table.shape[1]) < -(-case.seq_lens // cache.shape[1])[:, None]
    ids = np.arange(pages) if case.page_ids is None else case.page_ids
    table = np.where(used, table, ids[rng.integers(0, pages, table.shape)]).astype(np.int32)
    return replace(case, kv_cache=cache, block_table=table, id=None)


def far(ids: list[int], stride: int) -> PagedCase:
    """Two requests of two pages of 4 rows, at these page ids; what is not in the table holds numbers, too."""
    case = filled(generate(f"{SMALL},lens=7+8"), wider=0)
    pages = len(case.kv_cache)
    at = np.array([*ids, *range(5, 5 + pages)])[:pages]
    return replace(case, block_table=at[case.block_table].astype(np.int32), page_ids=at.astype(np.int64),
                   num_blocks=1 << 26, block_stride=stride)


@cache
def attention() -> tuple[tuple[str, PagedCase], ...]:
    """Named cases, those with numbers for junk first."""
    made = [(text, generate(text)) for text in IDS]
    with_numbers = [(f"filled {name}", filled(case)) for name, case in made]
    step = 1 << 20
    farther = [
        ("far, bytes", far([4096 + 5, 2048 + 6, 8192 + 7, 9], step)),
        ("far, elements", far([16384 + 5, 8192 + 6, 16384 + 7, 9], step)),
        ("far, ids", far([65536 + 5, 32768 + 6, (1 << 24) + 9, 65536 + 7], 512)),
    ]
    return (*with_numbers, *farther, *made)
