# SPDX-License-Identifier: Apache-2.0
"""Cache formats: what the bytes of a paged cache stand for, by the rules of those who write and read them.

    tensors = quantize("fp8_ds_mla", rows, writer="flashmla")      rows [num_blocks, block_size, D] f32
    read("fp8_ds_mla", tensors, blocks, offsets, block_size=64)    [n, D] f32: row i lies in blocks[i] at offsets[i]

Each file holds the formats of one shape, its docstrings the byte maps; format.py the rules of readers, scales.py those
of writers. To add a format, subclass Format there and name its file below. `tensors` is a mapping with `kv_cache` and,
where the format has them, `kpe_cache`, `kv_scale`, `kpe_scale`, `ckv_scale`; None stands for a tensor that is absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import InputError

if TYPE_CHECKING:
    from .format import Array, Format, Parts

_HOMES = {
    "fp8_e4m3": "per_tensor",
    "fp8_e4m3fnuz": "per_tensor",
    "fp8_e5m2": "per_tensor",
    "flashinfer_fp8": "per_tensor",
    "flashinfer_fp8_grouped": "per_tensor",
    "fp8_ds_mla": "tile_rows",
    "aiter_v4": "tile_rows",
    "model1": "pages",
    "v4.1": "pages",
    "v4.1_fp4": "pages",
    "nvfp4_ds_mla": "nvfp4",
    "nvfp4_sglang": "nvfp4",
    "q8_0": "blocks_of_32",
    "q6_0": "blocks_of_32",
    "q8_KV": "blocks_of_32",
}
NAMES = tuple(_HOMES)
Tensors = Mapping[str, Any]


def get(name: str | None) -> Format:
    """The format `name`, one of NAMES; None is that of dense rows."""
    home = "dense" if name is None else _HOMES.get(name) if isinstance(name, str) else None
    if home is None:
        raise InputError(f"cache_format is {name!r}, expected one of {' '.join(NAMES)}")
    found: Format
    for found in import_module(f".{home}", __name__).FORMATS:
        if name is None or found.name == name:
            return found
    raise AssertionError(name)


def check(name: str | None, tensors: Tensors, *, block_size: int | None = None) -> tuple[int, int, int]:
    """(num_blocks, block_size, D) of a cache, or an InputError in one line that names the tensor.

    Looks at dtypes, shapes, strides and scales of one number; of the rows and of scales in them it reads nothing.
    """
    shape = get(name).check(tensors, block_size)
    if block_size is not None and shape[1] != block_size:
        raise InputError(f"block_size is {block_size}, but kv_cache has blocks of {shape[1]}")
    return shape


def block_size_of(name: str | None, shape: tuple[int, ...]) -> int:
    """Tokens a page of a kv_cache of this shape: its second axis, or of pages [num_blocks, bytes] what fits in them."""
    form = get(name)
    if len(shape) in (3, 4):
        return shape[1]
    page = getattr(form, "page", None)
    if len(shape) != 2 or page is None:
        raise InputError(f"kv_cache is {list(shape)}, expected [num_blocks, block_size, ..]")
    if page <= form.align:  # type: ignore[attr-defined]
        raise InputError(f"block_size is not told, and pages of {shape[1]} bytes of {page} a token do not tell it")
    return int(shape[1] // page)


def fetch(name: str | None, tensors: Tensors, blocks: Array, offsets: Array, *, block_size: int | None = None) -> Parts:
    """The codes and scales of the rows at (blocks[i], offsets[i]), copied; no other row is touched."""
    from .memory import check_slots

    num_blocks, rows, _ = check(name, tensors, block_size=block_size)
    blocks, offsets = check_slots(blocks, offsets, num_blocks, rows)
    return get(name).fetch(tensors, blocks, offsets, rows)


def exact(
    name: str | None,
    tensors: Tensors,
    blocks: Array,
    offsets: Array,
    *,
    block_size: int | None = None,
    reader: str | None = None,
) -> Array:
    """[n, D] f64: the very numbers that `reader` multiplies with, its roundings made. Else as `read`."""
    import numpy as np

    form = get(name)
    rule = form.reader_of(reader)
    parts = fetch(name, tensors, blocks, offsets, block_size=block_size)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return form.values(parts, rule).astype(np.float64)


def read(
    name: str | None,
    tensors: Tensors,
    blocks: Array,
    offsets: Array,
    *,
    block_size: int | None = None,
    reader: str | None = None,
) -> Array:
    """[n, D] f32: the rows at page blocks[i], slot offsets[i], by the rule of `reader` (None: the format's first).

    blocks, offsets   [n] integers inside the cache; a row may be asked for twice
    block_size        tokens a page; None where the shape of kv_cache tells
    Every reader's numbers are f32 but those of "fold", which `exact` gives in full and this rounds. Only the rows asked
    for are touched: what lies elsewhere may be anything.
    """
    import numpy as np

    form = get(name)
    rule = form.reader_of(reader)
    parts = fetch(name, tensors, blocks, offsets, block_size=block_size)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return form.values(parts, rule).astype(np.float32, copy=False)


def quantize(name: str, rows: Array, *, writer: str | None = None, **scales: Any) -> dict[str, Array]:
    """The tensors that `writer` (None: the format's first) makes of `rows`, f32 [num_blocks, block_size, D].

    scales   kv_scale, kpe_scale: the external scales of the format, numbers or f32 arrays; what is not given is
             calibrated over the rows and returned with the cache
    The cache has the shape engines pass; pages are padded, so its strides are not those of a dense array.
    """
    import numpy as np

    from ..arrays import as_array
    from .memory import check_dtype

    form = get(name)
    rule = form.writer_of(writer)
    rows = as_array("rows", rows)
    check_dtype("rows", rows, "f32")
    if rows.ndim != 3 or rows.shape[2] == 0:
        raise InputError(f"rows is {list(rows.shape)}, expected [num_blocks, block_size, D]")
    for scale in scales:
        if scale not in form.tensors or not scale.endswith("_scale") or scale == "ckv_scale":
            raise InputError(f"{scale} is given, expected none: the writer of {name} takes no such scale")
    return form.pack(np.ascontiguousarray(rows), rule, scales)
