# SPDX-License-Identifier: Apache-2.0
"""Cases beyond the plain problem that a suite is chosen from: ids, by the name of what they are for.

    extended("geometry=deepseek-v3,dtype=bf16", ("sparse-fp8", "window"))

Each set has lists, lengths and windows around the edges of tiles and pages, empty rows, several query tokens, and
numbers in what nobody may read, so that what a wrong kernel reads there can be told.
"""

from __future__ import annotations

from ..cases import PagedCase
from ..cases.recipes import parse_id
from ..errors import InputError
from ..formats import NAMES as FORMATS
from ..geometry import Geometry

LENS = "lens=130+0+1+63+90"
SHORT = "lens=9+5+40+3"
HOT = "lens=1+1+2+9,scale=30000,unread=numbers"  # scores beyond the range of exponentials
SETS: dict[str, tuple[str, ...]] = {
    "sparse": (
        f"{LENS},topk=72,topk_length=query,tokens=2,unread=numbers",
        f"{LENS},topk=40,topk_length=request,tokens=3,duplicates=true,topk_outside=skip,unread=numbers",
        f"{LENS},topk=72,invalid=rows,topk_outside=skip,tokens=3,causal=false,unread=numbers",
        f"{SHORT},topk=12,tokens=4,unread=numbers",
        f"{LENS},topk=40,invalid=rows",
        f"{LENS},topk=24,inputs=position,unread=numbers",
        f"{LENS},topk=24,inputs=peaked,tokens=2,unread=numbers",
        f"{HOT},topk=4",
        "lens=200+70,topk=140,invalid=none,causal=false,unread=numbers",
    ),
    "sparse-slot": (
        f"{LENS},topk=40,topk_by=slot,topk_length=query,topk_outside=skip,tokens=2,unread=numbers",
        f"{LENS},topk=72,topk_by=slot,topk_length=request,duplicates=true,tokens=3,unread=numbers",
        f"{LENS},topk=40,topk_by=slot,invalid=rows,unread=numbers",
        f"{HOT},topk=4,topk_by=slot",
    ),
    "second-cache": (
        f"{LENS},topk=24,topk_length=query,extra=9+3+40+17+0,extra_topk=16,extra_block=8,tokens=2,unread=numbers",
        f"{LENS},topk=24,topk_length=query,topk_by=slot,extra=9+3+40+17+0,extra_topk=16,extra_block=8,unread=numbers",
        f"{HOT},topk=4,extra=3+0+9+2,extra_topk=4,extra_block=8",
    ),
    "window": (
        f"{LENS},window=7,tokens=3,unread=numbers",
        f"{LENS},window=37+0,first=3,tokens=2,unread=numbers",
        f"{LENS},window=5+1,causal=false,first=2,tokens=4,unread=numbers",
        f"{SHORT},window=-1+2,causal=false,tokens=3,unread=numbers",
        f"{LENS},window=9,causal=false,tokens=3,unread=numbers",
        f"{SHORT},window=4,first=6,tokens=2,unread=numbers",
        f"{HOT},window=7",
    ),
    "sinks": (
        f"{LENS},sinks=normal,tokens=2,unread=numbers",
        f"{LENS},sinks=normal,sinks_in_lse=true,unread=numbers",
        f"{SHORT},sinks=infinite,tokens=2",
        f"{LENS},sinks=normal,topk=24,topk_length=query",
        f"{HOT},sinks=normal",
    ),
    "bias": (
        f"{LENS},bias=normal,tokens=2,unread=numbers",
        f"{SHORT},bias=mask,tokens=3,unread=numbers",
        f"{LENS},bias=alibi,unread=numbers",
        f"{LENS},bias=normal,topk=24,tokens=2,unread=numbers",
        f"{HOT},bias=normal",
    ),
    "softcap": (f"{LENS},softcap=3,tokens=2,unread=numbers", f"{LENS},softcap=3,bias=normal"),
    "ragged": (
        f"{LENS},ragged=2+1+0+3+1,window=9,unread=numbers",
        f"{LENS},ragged=2+1+0+3+1,topk=24,topk_length=query,unread=numbers",
        f"{LENS},ragged=4+0+1+2+3,unread=numbers",
        f"{HOT},ragged=2+1+1+3",
    ),
    "layout": (
        f"{LENS},kv_heads=2,tokens=2,unread=numbers",
        f"{LENS},kpe=ROPE,tokens=2,unread=numbers",
        f"{LENS},value_offset=ROPE,tokens=2,unread=numbers",
        f"{LENS},value_offset=ROPE,topk=24,unread=numbers",
        f"{LENS},tokens=3,lse_axes=BHT,topk=24",
    ),
    "scales": (f"{LENS},q_dtype=e4m3,q_scale=0.03,tokens=2,unread=numbers", f"{LENS},output_scale=0.5,unread=numbers"),
    **{name: (f"{SHORT},format={name},topk=12,topk_by=slot,tokens=2,unread=numbers",) for name in FORMATS},
    "sparse-fp8": (
        f"{LENS},format=fp8_ds_mla,topk=72,topk_by=slot,topk_length=query,tokens=2,unread=numbers",
        f"{LENS},format=fp8_ds_mla,topk=40,topk_outside=skip,invalid=rows,unread=numbers",
        f"{SHORT},format=fp8_ds_mla,topk=12,topk_by=slot,topk_outside=skip,tokens=2,unread=numbers",
        f"{SHORT},format=fp8_ds_mla,topk=40,tokens=2,unread=numbers",
        f"{HOT},format=fp8_ds_mla,topk=4",
    ),
    "v4": (
        f"{LENS},format=model1,topk=40,topk_by=slot,topk_length=query,sinks=normal,extra=9+3+40+17+0,extra_topk=16,"
        "extra_block=8,unread=numbers",
        f"{SHORT},format=model1,topk=12,topk_by=slot,invalid=rows,sinks=normal,unread=numbers",
    ),
}
GROUPS = {"formats": FORMATS, "all": tuple(SETS)}
OF_512 = ("aiter_v4", "model1", "v4.1", "v4.1_fp4")


def names_of(text: str) -> tuple[str, ...]:
    """The sets of "sparse+window", groups taken apart. Raises InputError."""
    found: list[str] = []
    for name in text.split("+"):
        if name not in SETS and name not in GROUPS:
            raise InputError(f"with has {name!r}, expected {', '.join((*GROUPS, *SETS))} joined by +")
        found += GROUPS.get(name, (name,))
    return tuple(dict.fromkeys(found))


def extended(sizes: str, names: tuple[str, ...], *, block: int = 64) -> list[str]:
    """Ids of the sets `names`; `sizes` as for `probes`. Sizes that a set cannot have are left out, or made to fit."""
    fields = dict(item.split("=", 1) for item in sizes.split(","))
    geometry = Geometry.preset(fields["geometry"]) if "geometry" in fields else None
    row = int(fields.get("row", geometry.latent_dim if geometry else 0))
    value = int(fields.get("value", geometry.kv_lora_rank if geometry else 0))
    heads = int(fields.get("heads", geometry.num_heads if geometry else 0))
    made = []
    for name in names:
        for rest in SETS[name]:
            own = fields | {"block": str(block)} | dict(item.split("=", 1) for item in rest.split(","))
            rope = row - value
            if ("ROPE" in own.values() and not rope) or ("kv_heads" in own and heads % 2):
                continue
            own = {key: str(rope) if text == "ROPE" else text for key, text in own.items()}
            if "format" in own:
                own |= {"row": "512" if own["format"] in OF_512 else "576", "value": "512"}
                if row not in (512, 576):
                    own["scale"] = "0.06"
            made.append(str(parse_id("paged:" + ",".join(f"{key}={text}" for key, text in own.items()))))
    return list(dict.fromkeys(made))


def names_like(case: PagedCase) -> tuple[str, ...]:
    """The sets that have what the case has."""
    has = {
        "sparse": case.topk_indices is not None and case.topk_by == "position",
        "sparse-slot": case.topk_by == "slot",
        "second-cache": case.extra_kv_cache is not None,
        "window": case.window_left is not None or case.window_right is not None,
        "sinks": case.sinks is not None,
        "bias": case.bias is not None,
        "softcap": case.softcap is not None,
        "ragged": case.qo_indptr is not None,
        "layout": bool({"num_kv_heads", "kpe_cache", "value_offset", "lse_axes"} & set(case.extensions())),
        "scales": case.q_scale is not None or case.output_scale is not None,
    }
    formats = (case.cache_format,) if case.cache_format in SETS else ()
    return tuple(name for name, there in has.items() if there) + formats
