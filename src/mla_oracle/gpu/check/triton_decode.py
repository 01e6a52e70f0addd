# SPDX-License-Identifier: Apache-2.0
"""A paged decode in Triton, to measure by: splits of the keys, 16 heads to a program, then a combine.

It needs triton and torch; nothing imports it but gpu/check/peers.py.
"""

import torch
import triton
import triton.language as tl

HEADS, LOG2E = 16, 1.4426950408889634


@triton.jit
def _split(
    q, cache, table, lengths, partial, lses, scale, H, blocks, split_blocks,
    L: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """partial [B, H, splits, L] f32 and lses [B, H, splits], base 2, of q [B, H, L + R] and pages of BLOCK rows."""
    b, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    length = tl.load(lengths + b)
    heads = group * HEADS + tl.arange(0, HEADS)
    latent, rope, row = tl.arange(0, L), tl.arange(0, R), tl.arange(0, BLOCK)
    begins = (b * H + heads) * (L + R)
    is_head = (heads < H)[:, None]
    q_latent = tl.load(q + begins[:, None] + latent[None], mask=is_head, other=0.0)
    q_rope = tl.load(q + begins[:, None] + L + rope[None], mask=is_head, other=0.0)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, L], tl.float32)
    first, end = split * split_blocks, tl.minimum((split + 1) * split_blocks, tl.cdiv(length, BLOCK))
    for j in range(first, end):
        page = tl.load(table + b * blocks + j).to(tl.int64)
        rows = cache + (page * BLOCK + row) * (L + R)
        is_key = j * BLOCK + row < length
        k = tl.load(rows[:, None] + latent[None], mask=is_key[:, None], other=0.0)
        k_rope = tl.load(rows[:, None] + L + rope[None], mask=is_key[:, None], other=0.0)
        score = (tl.dot(q_latent, tl.trans(k)) + tl.dot(q_rope, tl.trans(k_rope))) * scale
        score = tl.where(is_key[None], score, float("-inf"))
        above = tl.maximum(top, tl.max(score, 1))
        rescale = tl.exp2(top - above)
        weight = tl.exp2(score - above[:, None])
        total = total * rescale + tl.sum(weight, 1)
        acc = acc * rescale[:, None] + tl.dot(weight.to(k.dtype), k)
        top = above
    state = (b * H + heads) * splits + split
    is_state = first < end
    safe = tl.where(total > 0, total, 1.0)
    tl.store(partial + state[:, None] * L + latent[None], acc / safe[:, None], mask=is_head)
    tl.store(lses + state, tl.where(is_state, top + tl.log2(safe), float("-inf")), mask=heads < H)


@triton.jit
def _combine(partial, lses, out, splits, L: tl.constexpr):
    """out [B H, L] of partial [B H, splits, L], in ascending order."""
    n = tl.program_id(0).to(tl.int64)
    latent = tl.arange(0, L)
    top = tl.full([1], float("-inf"), tl.float32)
    for s in range(0, splits):
        top = tl.maximum(top, tl.load(lses + n * splits + s))
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([L], tl.float32)
    for s in range(0, splits):
        weight = tl.exp2(tl.load(lses + n * splits + s) - top)
        total += weight
        acc += weight * tl.load(partial + (n * splits + s) * L + latent)
    tl.store(out + n * L + latent, (acc / total).to(out.dtype.element_ty))


def decode(
    q: torch.Tensor,
    table: torch.Tensor,
    cache: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    L: int,
    multiprocessors: int,
) -> torch.Tensor:
    """out [B, H, L] of q [B, H, D], table [B, blocks] i32, cache [pages, BLOCK, D] and lengths [B] i32, none of 0."""
    (B, H, D), blocks, BLOCK = q.shape, table.shape[1], cache.shape[1]
    groups = triton.cdiv(H, HEADS)
    splits = max(1, min(blocks, 2 * multiprocessors // (B * groups)))
    split_blocks = triton.cdiv(blocks, splits)
    splits = triton.cdiv(blocks, split_blocks)
    partial = torch.empty(B, H, splits, L, dtype=torch.float32, device=q.device)
    lses = torch.empty(B, H, splits, dtype=torch.float32, device=q.device)
    out = torch.empty(B, H, L, dtype=q.dtype, device=q.device)
    _split[B, groups, splits](
        q, cache, table, lengths, partial, lses, scale * LOG2E, H, blocks, split_blocks,
        L=L, R=D - L, BLOCK=BLOCK, HEADS=HEADS, num_warps=8, num_stages=1,
    )  # fmt: skip
    _combine[(B * H,)](partial, lses, out, splits, L=L)
    return out
