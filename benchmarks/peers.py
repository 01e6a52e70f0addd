# SPDX-License-Identifier: Apache-2.0
"""The peers on one paged decode: numpy and torch, which gather pages first; more in wheel.py, seeds.py.

Each function takes a problems.Paged and yields Contestants, with outputs allocated once and the query scaled
instead of the scores. Threads are one: cpu.py starts the process so, and torch is told.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType

import numpy as np
from calibration import Contestant
from problems import SCALE, D, Paged, V


def rows_of(case: Paged) -> np.ndarray:
    """Where each token's row is in the cache seen as rows: [B, L]."""
    _, block, _ = case.cache.shape
    tokens = np.arange(case.lens[0])
    return np.ascontiguousarray(case.table[:, tokens // block].astype(np.int64) * block + tokens % block)


def numpy_peer(case: Paged) -> Iterator[Contestant]:
    """Gather, product, softmax, product; every array written in place."""
    if case.dtype != "f32":
        return
    B, H, L = case.sizes
    keys = np.empty((B, case.table.shape[1], *case.cache.shape[1:]), np.float32)
    flat = keys.reshape(B, -1, D)[:, :L]
    weights, out = np.empty((B, H, L), np.float32), np.empty((B, H, V), np.float32)

    def call() -> None:
        np.take(case.cache, case.table, axis=0, out=keys, mode="clip")
        np.matmul(case.q * np.float32(SCALE), flat.transpose(0, 2, 1), out=weights)
        np.subtract(weights, weights.max(2, keepdims=True), out=weights)
        np.exp(weights, out=weights)
        np.divide(weights, weights.sum(2, keepdims=True), out=weights)
        np.matmul(weights, flat[..., :V], out=out)

    yield Contestant("numpy", call, lambda: out.astype(np.float64), case.flops)


@functools.cache
def torch_module() -> ModuleType | str:
    """torch with one thread, or why not."""
    try:
        import torch
    except ImportError as error:
        return f"torch: {error} (pip install torch==2.13.0)"
    torch.set_num_threads(1)
    return torch


def tensor(torch: ModuleType, array: np.ndarray) -> object:
    """The same memory as a torch tensor."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def torch_peers(case: Paged) -> Iterator[Contestant]:
    """Gather and bmm; gather and scaled_dot_product_attention with heads as its sequence.

    Its values are whole rows, because its blocked kernel wants keys and values of one width.
    """
    torch = torch_module()
    B, H, L = case.sizes
    q, cache = tensor(torch, case.q), tensor(torch, case.cache).view(-1, D)
    rows = torch.from_numpy(rows_of(case).reshape(-1))
    keys = torch.empty(B * L, D, dtype=q.dtype)
    weights, out = torch.empty(B, H, L, dtype=q.dtype), torch.empty(B, H, V, dtype=q.dtype)
    attention = torch.nn.functional.scaled_dot_product_attention
    kept: list[object] = []

    def bmm() -> None:
        with torch.inference_mode():
            k = torch.index_select(cache, 0, rows, out=keys).view(B, L, D)
            torch.bmm(q * SCALE, k.transpose(1, 2), out=weights)
            torch.bmm(torch.softmax(weights, 2), k[..., :V], out=out)

    def sdpa() -> None:
        with torch.inference_mode():
            k = torch.index_select(cache, 0, rows, out=keys).view(B, 1, L, D)
            kept[:] = [attention(q[:, None], k, k, scale=SCALE)]

    yield Contestant("torch bmm", bmm, lambda: out.double().numpy(), case.flops)
    yield Contestant("torch sdpa", sdpa, lambda: kept[0][:, 0, :, :V].double().numpy(), case.flops)
