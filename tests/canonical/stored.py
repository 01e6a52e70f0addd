# SPDX-License-Identifier: Apache-2.0
"""In which cache formats a drawn problem stores its rows: `choose` draws them, `store` writes the rows so.

Every format with every writer, reader, kind of scale and layout of memory; a second cache in the format of the main
one, in one of its own, or beside a dense one. dictionary.py says what the bytes stand for.
"""

import sys
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from mla_oracle import formats
from mla_oracle.dtypes import LARGEST

sys.path.insert(0, str(Path(__file__).parents[1] / "formats"))
from random_caches import PAGES, backwards, gaps, one_head, page_gaps, unaligned

PER_TENSOR = ("fp8_e4m3", "fp8_e4m3fnuz", "fp8_e5m2")
OF_MORE = tuple(n for n in formats.NAMES if set(formats.get(n).tensors) - {"kv_scale"} and n not in PER_TENSOR)
WIDTHS = {name: formats.get(name).width for name in formats.NAMES}  # None: as wide as one likes
OF_32 = ("q8_0", "q6_0", "q8_KV")


def choose(draw, name, extra):
    """({prefix: format}, D), `name` among them; None is dense, "" that of the main cache."""
    if not extra:
        found = {"": name}
    elif draw(st.booleans()):
        same = () if name in OF_MORE else ("", "", "", "")
        found = {"": name, "extra_": draw(st.sampled_from([*_beside(name), *same]))}
    elif name in OF_MORE:
        found = {"": name, "extra_": draw(st.sampled_from(_beside(name)))}
    else:
        found = {"": draw(st.sampled_from([None, *_beside(name, OF_MORE)])), "extra_": name}
    names = {form for form in found.values() if form}
    fixed = [WIDTHS[form] for form in names if WIDTHS[form]]
    if fixed:
        return found, fixed[0]
    if names & set(OF_32):
        return found, 32 * draw(st.integers(1, 3))
    return found, draw(st.integers(3, 7) | st.integers(65, 68))


def _beside(name, more=()):
    """The formats whose rows can be as wide as those of `name`."""
    widths = (WIDTHS[name], None) if WIDTHS[name] else set(WIDTHS.values())
    return [other for other in formats.NAMES if WIDTHS[other] in widths and (other not in OF_MORE or other in more)]


def store(draw, rng, p, found):
    """Quantise the rows of p's caches, NaN where nobody reads, each in its format."""
    for prefix, form in found.items():
        name = p.get("cache_format") if form == "" else form
        if name is None:
            continue
        if prefix == "":
            p["cache_format"] = name
            p["cache_reader"] = draw(st.none() | st.sampled_from(formats.get(name).readers))
        elif form:
            p["extra_cache_format"] = name
        writer = draw(st.sampled_from(formats.get(name).writers))
        rows = p[prefix + "kv_cache"] * np.float32(2.0 ** draw(st.integers(-9, 2)))
        tensors = _written(draw, rng, name, writer, rows, alone=prefix == "")
        lay = draw(st.sampled_from([np.copy, page_gaps if name in PAGES else gaps, unaligned, backwards, one_head]))
        for tensor, array in tensors.items():
            p[prefix + tensor] = lay(array) if tensor.endswith("cache") else array


def _written(draw, rng, name, writer, rows, alone):
    """The tensors of rows [blocks, size, D]; of per-tensor fp8 split or joined, scales of the cache or of tokens."""
    if name not in PER_TENSOR:
        return formats.quantize(name, rows, writer=writer)
    D = rows.shape[-1]
    split = alone and draw(st.booleans())
    cut = D - draw(st.integers(1, min(64, D - 1))) if split else D - 64
    two = alone and (split or D > 64) and draw(st.booleans())
    scale = _scale(draw, rng, name, writer, rows[..., : cut if two else D])
    rope = _scale(draw, rng, name, writer, rows[..., cut:]) if two else None
    if not split:
        return formats.quantize(name, rows, writer=writer, kv_scale=scale, **({"kpe_scale": rope} if two else {}))
    tensors = formats.quantize(name, np.ascontiguousarray(rows[..., :cut]), writer=writer, kv_scale=scale)
    other = formats.quantize(name, rows[..., cut:], writer=writer, kv_scale=rope if two else tensors["kv_scale"])
    return tensors | {"kpe_cache": other["kv_cache"]} | ({"kpe_scale": other["kv_scale"]} if two else {})


def _scale(draw, rng, name, writer, rows):
    """A scale of all rows, or of each; where the writer makes NaN of what is past the largest, none that small."""
    with np.errstate(invalid="ignore"):
        top = np.nanmax(np.abs(rows), initial=2.0**-20)
    least = 1.0 if writer == "cast" else 0.3
    shape = rows.shape[:2] if draw(st.booleans()) else (1,)
    found = (top / LARGEST[name.removeprefix("fp8_")] * rng.uniform(least, 4, shape)).astype(np.float32)
    if len(shape) == 2:
        found[np.isnan(rows).all(axis=-1)] = np.nan
    return found
