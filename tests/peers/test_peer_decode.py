# SPDX-License-Identifier: Apache-2.0
"""What gpu/check/peers.py measures beside our kernels is attention: torch on the CPU, Triton in its own interpreter.

Triton's interpreter has no bf16, so that it is given f16 and f32.
"""

import os
import subprocess
import sys

import pytest

from mla_oracle.gpu.check import peers

torch = pytest.importorskip("torch", reason="torch is not installed")

TRITON = """
import torch
from mla_oracle.gpu.check import triton_decode

torch.manual_seed(0)
for B, H, n, L, R, block, dtype in [(2, 20, 150, 64, 16, 16, torch.float16), (1, 3, 64, 32, 16, 64, torch.float32)]:
    blocks = -(-n // block)
    cache, q = torch.randn(B * blocks + 2, block, L + R).to(dtype), torch.randn(B, H, L + R).to(dtype)
    table = torch.randperm(B * blocks + 2)[: B * blocks].reshape(B, blocks).to(torch.int32)
    lengths = torch.tensor([n, n - 37][:B], dtype=torch.int32)
    for multiprocessors in (1, 4, 30):
        out = triton_decode.decode(q, table, cache, lengths, 0.1, L, multiprocessors)
        for b in range(B):
            rows = cache[table[b].long()].reshape(-1, L + R)[: lengths[b]].double()
            expected = torch.softmax(0.1 * q[b].double() @ rows.T, -1) @ rows[:, :L]
            torch.testing.assert_close(out[b].double(), expected, rtol=0, atol=2e-3 if dtype == torch.float16 else 1e-5)
"""


def test_sdpa_over_gathered_rows_is_the_decode():
    problem = peers.Problem(None, 2, 5, 128, l2=1 << 19, multiprocessors=4, where="cpu")
    assert len(problem.tables) == 4  # past the cache twice over
    run = peers.torch_sdpa(problem)
    for index in (0, 3, 4):
        q, table = problem.of(index)
        rows = problem.cache[table.long()].reshape(2, 128, 576).double()
        expected = torch.softmax(peers.SCALE * q.double() @ rows.mT, -1) @ rows[..., :512]
        torch.testing.assert_close(run(index)[:, 0].double(), expected, rtol=0.02, atol=0.01)


def test_the_decode_in_triton_is_the_decode():
    pytest.importorskip("triton", reason="triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", TRITON], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
