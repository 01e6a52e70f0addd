# SPDX-License-Identifier: Apache-2.0
"""The paged form against torch's scaled_dot_product_attention over the rows gathered from the pages, all in f64.

Key = the gathered row, value = its first head_dim_v elements, one key head for every query head; the LSE against
torch.logsumexp of the masked scores. Requests of ragged lengths, in shuffled pages of which some belong to nobody.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from peer_bounds import UNIT, lse_bound, out_bound

from mla_oracle import decode_paged

torch = pytest.importorskip("torch", reason="torch is not installed")

STORED = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
ARITHMETIC = [("f64", "f64"), *((dtype, precision) for dtype in ("f32", "f16", "bf16") for precision in UNIT)]
SCALE = 1 / math.sqrt(192)
LENGTHS = (1, 15, 16, 17, 40, 3)


@dataclass
class Problem:
    q: torch.Tensor  # [B, T, H, D]
    kv_cache: torch.Tensor  # [num_blocks, block_size, D]
    block_table: torch.Tensor  # [B, max_blocks] i32
    seq_lens: torch.Tensor  # [B] i32
    head_dim_v: int


def draw(dtype, *, tokens, heads=4, width=576, head_dim_v=512, block_size=16, lengths=LENGTHS):
    """Unit-normal rows and queries: scores of a few units. Pages nobody may read and the tails hold NaN."""
    generator = torch.Generator().manual_seed(7)
    blocks = [-(-length // block_size) for length in lengths]
    num_blocks = sum(blocks) + 3
    pages = torch.randperm(num_blocks, generator=generator, dtype=torch.int32)
    kv_cache = torch.full((num_blocks, block_size, width), math.nan, dtype=torch.float64)
    block_table = torch.full((len(lengths), max(blocks) + 1), -1, dtype=torch.int32)
    for b, length in enumerate(lengths):
        own, pages = pages[: blocks[b]], pages[blocks[b] :]
        block_table[b, : blocks[b]] = own
        for j in range(length):
            row = torch.randn(width, generator=generator, dtype=torch.float64)
            kv_cache[own[j // block_size], j % block_size] = row
    q = torch.randn(len(lengths), tokens, heads, width, generator=generator, dtype=torch.float64)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    return Problem(q.to(STORED[dtype]), kv_cache.to(STORED[dtype]), block_table, seq_lens, head_dim_v)


def gathered(problem, b):
    """The rows of request b, [seq_len, D] f64."""
    length = int(problem.seq_lens[b])
    used = problem.block_table[b, : -(-length // problem.kv_cache.shape[1])]
    return problem.kv_cache[used].flatten(0, 1)[:length].double()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("dtype", "precision"), ARITHMETIC)
def test_out_is_torchs_and_lse_is_its_logsumexp(dtype, precision, tokens, causal):
    problem = draw(dtype, tokens=tokens)
    out, lse = decode_paged(
        problem.q,
        problem.kv_cache,
        problem.block_table,
        problem.seq_lens,
        softmax_scale=SCALE,
        head_dim_v=problem.head_dim_v,
        causal=causal,
        precision=precision,
    )
    for b, length in enumerate(LENGTHS):
        rows = gathered(problem, b)[None, None]  # [1, 1, n, D]
        query = problem.q[b].double().transpose(0, 1)[None]  # [1, H, T, D]
        seen = torch.ones(tokens, length, dtype=torch.bool)
        if causal:
            seen = seen.tril(length - tokens)
        value = rows[..., : problem.head_dim_v]
        wanted = torch.nn.functional.scaled_dot_product_attention(
            query, rows, value, attn_mask=seen, scale=SCALE, enable_gqa=True
        )
        scores = (query @ rows.mT * SCALE).masked_fill(~seen, -math.inf)  # [1, H, T, n]
        score_size = query.abs() @ rows.abs().mT * SCALE
        unit = UNIT[precision]
        some = seen.any(dim=1).numpy()  # queries that see a row: the others are not torch's to define
        wanted, scores, score_size = (x[0].transpose(0, 1).numpy()[some] for x in (wanted, scores, score_size))
        bound = out_bound(scores, score_size, value[0, 0].abs().numpy(), unit=unit)
        assert np.all(np.abs(out[b][some] - wanted) <= bound)
        log_sum = torch.logsumexp(torch.from_numpy(scores), dim=-1).numpy()
        assert np.all(np.abs(lse[b][some] - log_sum) <= lse_bound(scores, score_size, unit=unit))
        assert np.all(out[b][~some] == 0) and np.all(lse[b][~some] == -np.inf)


def test_base_2_lse_is_torchs_over_log_2():
    problem = draw("bf16", tokens=1)
    arrays = (problem.q, problem.kv_cache, problem.block_table, problem.seq_lens)
    conventions = {"softmax_scale": SCALE, "head_dim_v": problem.head_dim_v, "precision": "f64"}
    lse = decode_paged(*arrays, lse_base="2", **conventions).lse
    for b in range(len(LENGTHS)):
        scores = problem.q[b, 0].double() @ gathered(problem, b).mT * SCALE  # [H, n]
        np.testing.assert_allclose(lse[b, 0], torch.logsumexp(scores, dim=-1) / math.log(2), rtol=1e-13)
