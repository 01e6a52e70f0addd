# SPDX-License-Identifier: Apache-2.0
"""Ids of small generated cases that are not plain: options beside the keys in SMALL."""

from mla_oracle import generate

LENS = [0, 1, 4, 5, 11, 40]
SMALL = "paged:heads=4,row=12,value=8,scale=0.5,block=4,lens=0+1+4+5+11+40"
IDS = [
    "window=3", "window=3+0,first=2,tokens=2", "window=2+1,causal=false,tokens=3", "window=-1+2,causal=false",
    "bias=normal,tokens=2", "bias=mask,tokens=3,dtype=f16", "bias=alibi,tokens=2", "bias=alibi,dtype=bf16",
    "topk=6", "topk=6,tokens=3", "topk=6,topk_by=slot,tokens=2", "topk=6,topk_length=query,tokens=2",
    "topk=6,topk_length=request", "topk=6,topk_length=request,tokens=2,topk_by=slot", "topk=16,topk_outside=skip",
    "topk=16,topk_outside=skip,topk_by=slot", "topk=16,invalid=rows,tokens=3,causal=false", "topk=8,duplicates=true",
    "topk=5,window=6,bias=normal,tokens=2", "topk=9,window=2+0,causal=false,tokens=4",
    "topk=4,extra=3+0+9+17+2+40,extra_topk=5,extra_block=2,tokens=2",
    "topk=4,extra=3+0+9+17+2+40,topk_by=slot,topk_length=query", "topk=4,extra=3+0+9+17+2+40,kv_heads=2,bias=normal",
    "softcap=3", "sinks=normal", "sinks=infinite,sinks_in_lse=true", "ragged=2+1+0+3+1+2",
    "ragged=2+1+0+3+1+2,topk=5,topk_length=query,bias=mask,window=9",
    "ragged=2+1+0+3+1+2,topk=5,topk_length=request,topk_by=slot", "kv_heads=2", "kv_heads=4,topk=5,inputs=position",
    "kpe=3", "kpe=3,kv_heads=2,topk=9", "value_offset=4,inputs=position", "tokens=2,lse_axes=BHT",
    "q_dtype=e4m3,q_scale=0.03", "output_scale=0.5,dtype=bf16", "topk=5,inputs=lcg",
]


def made(options, **more):
    return generate(",".join([SMALL, options, *(f"{name}={value}" for name, value in more.items())]))


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
