# SPDX-License-Identifier: Apache-2.0
"""Paged decode of arrays that lie on a GPU: nothing is copied but what is on the host, and the host does not wait.

Results are on the device too: DeviceArrays, which cupy.asarray and torch.as_tensor take as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mla_oracle.arrays import FLOATS, Axes, aligned, as_array
from mla_oracle.checks import value_width
from mla_oracle.gpu import foreign, forms, layout
from mla_oracle.gpu.device import Device
from mla_oracle.gpu.foreign import DeviceArray
from mla_oracle.paged import count_tokens


def any_foreign(*arrays: object) -> bool:
    """Whether one of `arrays` lies on a GPU."""
    return any(map(foreign.is_foreign, arrays))


def decode_paged(
    arrays: Mapping[str, object],
    *,
    softmax_scale: float,
    head_dim_v: object,
    causal: bool,
    lse_unit: float,
    empty_lse: float,
    stream: object,
    check_ids: bool,
) -> tuple[Any, Any]:
    """out and lse of `mla_oracle.decode_paged` for its four arrays by name, on the device that those on a GPU share.

    Lengths and ids on the host are checked there. On the device they are checked if `check_ids`, which waits for it;
    otherwise they are taken as they are. With seq_lens on the device, there is scratch for the longest row that the
    block table can hold.
    """
    device = Device(foreign.device_of(arrays) or 0, stream)
    taken: dict[str, Any] = {
        name: foreign.take(name, array, device.stream) if foreign.is_foreign(array) else aligned(as_array(name, array))
        for name, array in arrays.items()
    }
    axes = Axes()
    has_tokens = taken["q"].ndim != 3
    axes.check("q", taken["q"], "B T H D" if has_tokens else "B H D", FLOATS)
    axes.check("kv_cache", taken["kv_cache"], "num_blocks block_size D", FLOATS)
    axes.check("block_table", taken["block_table"], "B max_blocks", ("i32",))
    axes.check("seq_lens", taken["seq_lens"], "B", ("i32",))
    width = value_width(head_dim_v, axes["D"])
    blocks = axes["num_blocks"], axes["block_size"]

    table, lengths = taken["block_table"], taken["seq_lens"]
    longest = int(lengths.max(initial=0)) if isinstance(lengths, np.ndarray) else None
    if isinstance(table, np.ndarray) and isinstance(lengths, np.ndarray):
        count_tokens(table, lengths, *blocks)
        check_ids = False
    q, cache, table, lengths = (
        layout.put(device, array) if isinstance(array, np.ndarray) else device.upload(array) for array in taken.values()
    )
    if check_ids and forms.check_ids(device, table, lengths, *blocks)[0] >= 0:
        count_tokens(device.download(table), device.download(lengths), *blocks)
    if not has_tokens:
        q = replace(q, shape=(q.shape[0], 1, *q.shape[1:]), strides=(q.strides[0], 0, *q.strides[1:]))
    out = device.empty((*q.shape[:3], width), np.float32)
    lse = device.empty(q.shape[:3], np.float32)
    forms.decode_paged(
        device, q, cache, table, lengths, softmax_scale, causal, lse_unit, empty_lse, out, lse, longest=longest
    )
    return (out, lse) if has_tokens else (_without_token(out), _without_token(lse))


def _without_token(array: DeviceArray) -> DeviceArray:
    return replace(
        array, shape=(array.shape[0], *array.shape[2:]), strides=(array.strides[0], *array.strides[2:])
    )
