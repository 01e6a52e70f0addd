# SPDX-License-Identifier: Apache-2.0
"""What a kernel is called with, as words with spaces between: `--args` of `mla-oracle ptx run`.

    q, kv_cache ...         a tensor of the case, uploaded with its strides: a pointer
    out, lse, out:bf16 ...  a result of the case, contiguous and not yet written, f32 unless it says: a pointer
    zeros:f32:64            64 zeros: a pointer; empty:f32:64: memory never written; null: a null pointer
    T, H, block_size ...    a size of the case, an int
    kv_cache.0, q.1 ...     the stride of a tensor on that axis, in elements, a long long
    softmax_scale ...       a convention of the case: float; causal: an int
    i32:5, i64:7, f32:0.5   a number

Sizes of a paged case: B T H D V num_blocks block_size max_blocks; of a naive or absorbed one: t_q t_kv H P R L V.
Without --args a kernel takes every tensor of the case in the order `mla-oracle explain` lists them, its results, and
then, of a paged case: softmax_scale B T H D V block_size max_blocks causal kv_cache.0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mla_oracle import dtypes
from mla_oracle.arrays import Array
from mla_oracle.cases import Case, DenseCase, PagedCase
from mla_oracle.cases.extensions import require_plain
from mla_oracle.errors import InputError
from mla_oracle.gpu.machine import Buffer
from mla_oracle.ptx.interpreter import Interpreter

PAGED = "softmax_scale B T H D V block_size max_blocks causal kv_cache.0"
NUMBERS = {"i32": np.int32, "i64": np.int64, "u32": np.uint32, "u64": np.uint64, "f32": np.float32, "f64": np.float64}


def default(case: Case) -> str:
    """The words for a kernel that follows the convention."""
    require_plain(case, "ptx run")
    names = [*case.tensors(), *case.results]
    return " ".join([*names, PAGED]) if isinstance(case, PagedCase) else " ".join(names)


def arguments(
    machine: Interpreter, words: list[str], case: Case | None, results: dict[str, tuple[int, ...]]
) -> tuple[list[Buffer | np.generic | None], dict[str, Buffer]]:
    """(the arguments, the buffers of the results among them). `results`: name -> shape. Raises InputError."""
    tensors = _tensors(case)
    uploaded: dict[str, Buffer] = {}
    filled: dict[str, Buffer] = {}
    values: list[Buffer | np.generic | None] = []
    for word in words:
        name, _, rest = word.partition(":")
        if word in tensors and word not in results:
            values.append(uploaded.setdefault(word, machine.upload(tensors[word])))
        elif name in results:
            dtype = np.dtype(dtypes.dtype(rest or "f32"))
            filled[name] = machine.upload(tensors[name]) if name in tensors else machine.empty(results[name], dtype)
            values.append(filled[name])
        else:
            values.append(_value(machine, word, case, tensors))
    return values, filled


def _tensors(case: Case | None) -> dict[str, Array]:
    if case is None:
        return {}
    require_plain(case, "ptx run")
    if isinstance(case, PagedCase) and case.page_ids is not None:
        from mla_oracle.cases.placement import sparse_cache

        return case.tensors() | {"kv_cache": sparse_cache(case)}
    return case.tensors()


def _value(machine: Interpreter, word: str, case: Case | None, tensors: dict[str, Array]) -> Buffer | np.generic | None:
    """The argument of a word that names no tensor."""
    name, _, rest = word.partition(":")
    try:
        if word == "null":
            return None
        if name in ("zeros", "empty"):
            dtype, _, size = rest.partition(":")
            shape, kind = (int(size),), np.dtype(dtypes.dtype(dtype))
            return machine.upload(np.zeros(shape, kind)) if name == "zeros" else machine.empty(shape, kind)
        if name in NUMBERS:
            number: np.generic = np.array([float(rest) if name[0] == "f" else int(rest, 0)], NUMBERS[name])[0]
            return number
    except InputError as error:
        raise InputError(f"--args has {word!r}: {error}") from None
    except (ValueError, OverflowError):
        raise InputError(f"--args has {word!r}, expected a number there") from None
    tensor, _, axis = word.partition(".")
    if tensor in tensors and axis.isdigit() and int(axis) < tensors[tensor].ndim:
        array = tensors[tensor]
        return np.int64(array.strides[int(axis)] // array.itemsize)
    known = _sizes(case) if case else {}
    if word in known:
        return known[word]
    raise InputError(f"--args has {word!r}, expected {', '.join([*tensors, *known]) or 'a number'} (see --help)")


def _sizes(case: Case) -> dict[str, np.generic]:
    """Sizes and conventions by name."""
    sizes: dict[str, int] = {}
    if isinstance(case, PagedCase):
        *outer, H, D = case.q.shape
        sizes = {"B": outer[0], "T": outer[1] if len(outer) == 2 else 1, "H": H, "D": D, "V": case.head_dim_v}
        sizes |= {"block_size": case.kv_cache.shape[1], "max_blocks": case.block_table.shape[1]}
        sizes["num_blocks"] = case.num_blocks or case.kv_cache.shape[0]
    elif isinstance(case, DenseCase):
        (t_q, H, P), R, (t_kv, L) = case.q_nope.shape, case.q_pe.shape[2], case.c_kv.shape
        sizes = {"t_q": t_q, "t_kv": t_kv, "H": H, "P": P, "R": R, "L": L, "V": case.w_uv.shape[1]}
        if case.softmax_scale is None:
            return {**_ints(sizes), "softmax_scale": np.float32((P + R) ** -0.5)}
    conventions: dict[str, Any] = case.conventions()
    floats = {name: np.float32(value) for name, value in conventions.items() if isinstance(value, float)}
    flags = {name: np.int32(value) for name, value in conventions.items() if isinstance(value, bool)}
    return {**_ints(sizes), **floats, **flags}


def _ints(sizes: dict[str, int]) -> dict[str, np.generic]:
    return {name: np.int32(size) for name, size in sizes.items()}
