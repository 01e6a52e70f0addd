# SPDX-License-Identifier: Apache-2.0
"""Top-k, windows, sinks and packed rows in the tensor-core kernel, against a definition in f64 kept here.

The bound is that of mla_oracle.gpu.paged over the keys that a query sees, whatever list they stand in.
"""

import dataclasses

import kernel_cases
import ml_dtypes
import numpy as np
import pytest
from kernel_cases import EPS, TINY, Planted, assert_within

from mla_oracle.errors import InputError, UnsupportedError
from mla_oracle.gpu import forms, paged_mma
from mla_oracle.gpu.selection import Selection
from mla_oracle.ptx import Fault

BF16, F16, E4M3 = ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn
RNG = np.random.default_rng(20)


@pytest.fixture(params=[*kernel_cases.TILE_OF, "cuda"])
def machine(request, monkeypatch):
    yield from kernel_cases.tiled(request.param, monkeypatch)


@dataclasses.dataclass
class Problem:
    """q [B, T, H, D], rows [num_blocks, block_size, D] f64 as the kernel multiplies them, and which each query sees."""

    q: np.ndarray
    cache: np.ndarray
    rows: np.ndarray
    table: np.ndarray
    lens: np.ndarray
    V: int
    scale: float = 0.1
    causal: bool = False

    def attend(self, slots_of, sinks=None, sinks_in_lse=False, out_scale=1.0):
        """(out, lse, allowed out, allowed lse) in f64: slots_of(b, t) lists the rows a query sees, in any order."""
        B, T, H, D = self.q.shape
        out, lse = np.zeros((B, T, H, self.V)), np.full((B, T, H), -np.inf)
        allowed_out, allowed_lse = out.copy(), np.zeros((B, T, H))
        u, step = (2.0**-11, 2.0**-24) if self.q.dtype == np.float16 else (2.0**-8, TINY)
        flat = self.rows.reshape(-1, D)
        for b, t in np.ndindex(B, T):
            k = flat[np.asarray(slots_of(b, t), np.int64)]
            if len(k) == 0:
                continue
            q = self.q[b, t].astype(np.float64)
            s = q @ k.T * self.scale
            size = (np.abs(q) @ np.abs(k).T).max(1) * self.scale
            top = s.max(1, keepdims=True)
            p = np.exp(s - top)
            total = p.sum(1)
            sink = -np.inf if sinks is None else sinks.astype(np.float64)
            whole = total + np.exp(sink - top[:, 0])
            out[b, t] = p @ k[:, : self.V] / whole[:, None] * out_scale
            lse[b, t] = top[:, 0] + np.log(whole if sinks_in_lse else total)
            n = len(k)
            relative = EPS * ((1.1 * D + 16) * size + 1.6 * n + 35) + 2 * D * TINY * self.scale
            mean = p @ np.abs(k[:, : self.V]) / whole[:, None]
            allowed_out[b, t] = ((relative[:, None] + u) * mean + n * step * (1 + np.abs(k).max())) * abs(out_scale)
            biggest = np.maximum(np.abs(top[:, 0]), 0 if sinks is None else np.abs(np.where(np.isinf(sink), 0, sink)))
            allowed_lse[b, t] = relative + 2 * EPS * (biggest + 2 * np.log(n))
        return out, lse, allowed_out, allowed_lse

    def token(self, b, position):
        """The slot of a token."""
        block = self.rows.shape[1]
        return self.table[b, position // block] * block + position % block

    def tokens(self, b, positions):
        return [self.token(b, p) for p in positions]


def make(B=2, T=2, H=3, D=48, V=32, lens=(70, 33), block=16, dtype=BF16, causal=False, rng=RNG):
    lens = np.array(lens, np.int32)
    used = -(-lens // block)
    blocks = int(used.sum()) + 2
    order, table, at = rng.permutation(blocks), np.full((B, int(used.max()) + 1), -7, np.int32), 0
    cache = rng.standard_normal((blocks, block, D)).astype(dtype)
    held = np.zeros((blocks, block), bool)
    for b in range(B):
        table[b, : used[b]] = order[at : at + used[b]]
        at += used[b]
        for p in range(lens[b]):
            held[table[b, p // block], p % block] = True
    cache[~held] = np.nan
    q = rng.standard_normal((B, T, H, D)).astype(dtype)
    rows = np.where(held[..., None], cache.astype(np.float64), 0)
    return Problem(q, cache, rows, table, lens, V, causal=causal)


def run(machine, p, selection=None, packed=0, sinks=None, lengths=None, indices=None, scale=None, **options):
    put = lambda x: forms.put(machine, x)  # noqa: E731
    if selection is not None:
        selection = dataclasses.replace(
            selection,
            indices=None if indices is None else put(indices.astype(np.int32)),
            lengths=None if lengths is None else put(lengths.astype(np.int32)),
        )
    B, T, H, _ = p.q.shape
    out, lse = machine.empty((B, T, H, p.V), np.float32), machine.empty((B, T, H), np.float32)
    name = forms.decode_paged(
        machine, put(p.q), put(p.cache), put(p.table), put(p.lens), p.scale if scale is None else scale, p.causal, 1.0,
        -np.inf, out, lse, longest=int(p.lens.max()), packed=packed, selection=selection,
        sinks=None if sinks is None else put(sinks), **options,
    )  # fmt: skip
    return name, machine.download(out), machine.download(lse)


def assert_right(machine, p, slots_of, sinks=None, sinks_in_lse=False, out_scale=1.0, **options):
    name, out, lse = run(machine, p, sinks=sinks, sinks_in_lse=sinks_in_lse, out_scale=out_scale, **options)
    expected_out, expected_lse, allowed_out, allowed_lse = p.attend(slots_of, sinks, sinks_in_lse, out_scale)
    assert_within(out, expected_out, allowed_out)
    assert_within(lse, expected_lse, allowed_lse)
    return name, out, lse


def choose(p, K, rng=RNG):
    """Indices [B, T, K] of positions in any order, one in four invalid, and one twice."""
    B, T = p.q.shape[:2]
    indices = np.full((B, T, K), -1)
    for b, t in np.ndindex(B, T):
        n = min(K, int(p.lens[b]))
        indices[b, t, :n] = rng.permutation(int(p.lens[b]))[:n]
        indices[b, t, rng.random(K) < 0.25] = -1
        indices[b, t, 0] = indices[b, t, 1] = 0
    return indices


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("K", [1, 31, 32, 33, 64])
def test_topk_by_position(machine, K, dtype):
    p = make(dtype=dtype)
    indices = choose(p, max(2, K))[..., :K]
    seen = lambda b, t: p.tokens(b, indices[b, t][indices[b, t] >= 0])  # noqa: E731
    assert assert_right(machine, p, seen, selection=Selection(), indices=indices)[0].startswith("paged_mma")


@pytest.mark.parametrize("split_keys", [32, 512])
def test_topk_by_slot_with_lengths_and_what_lies_beyond_them(machine, split_keys):
    p = make(lens=(130, 5), T=3)
    indices = choose(p, 96)
    slots = np.stack([[p.tokens(b, np.maximum(row, 0)) for row in indices[b]] for b in range(2)])
    slots[indices < 0] = -1
    lengths = np.array([[0, 1, 96], [50, 33, 2]])
    beyond = np.arange(96) >= lengths[..., None]
    slots[beyond] = 2**31 - 1
    seen = lambda b, t: [s for s in slots[b, t, : lengths[b, t]] if s >= 0]  # noqa: E731
    _, out, lse = assert_right(
        machine, p, seen, selection=Selection(by_slot=True), indices=slots, lengths=lengths, split_keys=split_keys
    )
    assert (out[0, 0] == 0).all() and (lse[0, 0] == -np.inf).all()


def test_a_selection_longer_than_its_request_has_splits_of_its_own(machine):
    p = make(lens=(70, 33))
    indices = np.tile(choose(p, 60), 4)
    seen = lambda b, t: p.tokens(b, indices[b, t][indices[b, t] >= 0])  # noqa: E731
    assert_right(machine, p, seen, selection=Selection(), indices=indices, split_keys=32)


def test_lengths_beyond_a_selection_are_its_own(machine):
    p = make()
    indices, lengths = choose(p, 40), np.array([[41, 2**31 - 1], [40, 80]])
    seen = lambda b, t: p.tokens(b, indices[b, t][indices[b, t] >= 0])  # noqa: E731
    assert_right(machine, p, seen, selection=Selection(), indices=indices, lengths=lengths)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("left", "right", "kept"), [(0, 0, 0), (5, 0, 2), (-1, 0, 0), (40, -1, 4), (3, 7, 80), (200, 200, 0)]
)
def test_windows(machine, left, right, kept, causal):
    p = make(lens=(70, 3), T=3, causal=causal)
    if causal and right > 0:
        right = 0

    def seen(b, t):
        n, at = int(p.lens[b]), int(p.lens[b]) - 3 + t
        inside = lambda j: (left < 0 or j >= at - left) and (right < 0 or j <= at + right)  # noqa: E731
        return p.tokens(b, [j for j in range(n) if (j < kept or inside(j)) and (not causal or j <= at)])

    assert_right(machine, p, seen, selection=Selection(left=left, right=right, kept=kept))


@pytest.mark.parametrize(("left", "right"), [(2**31 - 1, 2**31 - 1), (-1, 2**31 - 1), (2**31 - 1, -1)])
def test_a_window_of_the_largest_size_hides_nothing(machine, left, right):
    p = make(lens=(40, 2), T=5)  # the second request's first queries stand before its first key
    seen = lambda b, t: p.tokens(b, range(p.lens[b]))  # noqa: E731
    assert_right(machine, p, seen, selection=Selection(left=left, right=right))


def test_a_selection_within_a_window(machine):
    p = make(lens=(70, 40), causal=True)
    indices = choose(p, 64)

    def seen(b, t):
        at = int(p.lens[b]) - 2 + t
        return p.tokens(b, [j for j in indices[b, t] if 0 <= j <= at and (j < 3 or j >= at - 20)])

    assert_right(machine, p, seen, selection=Selection(left=20, right=0, kept=3), indices=indices)


@pytest.mark.parametrize("sinks_in_lse", [False, True])
def test_sinks(machine, sinks_in_lse):
    p = make(H=5, lens=(70, 0))
    sinks = np.array([0.5, -np.inf, 90, -300, 3], np.float32)
    every = lambda b, t: p.tokens(b, range(p.lens[b]))  # noqa: E731
    _, out, lse = assert_right(machine, p, every, sinks, sinks_in_lse)
    assert (out[1] == 0).all() and (lse[1] == -np.inf).all()
    assert_right(machine, p, every, sinks, sinks_in_lse, kernel="scalar")
    _, out, lse = run(machine, p, sinks=np.full(5, np.inf, np.float32), sinks_in_lse=True)
    assert (out == 0).all() and (lse[0] == np.inf).all() and (lse[1] == -np.inf).all()


@pytest.mark.parametrize("selected", [False, True])
def test_per_tensor_fp8(machine, selected):
    """Every code of e4m3, NaN in rows nobody reads; one scale, folded in."""
    p = make(lens=(70, 33), D=64, V=48, T=1)
    codes = RNG.permutation(np.resize(np.r_[0:127, 128:255], p.cache.size)).astype(np.uint8).reshape(p.cache.shape)
    codes[~np.isfinite(p.cache.astype(np.float32))] = 0x7F
    values = codes.view(E4M3).astype(np.float64)
    p.cache, p.rows = codes, np.where(np.isnan(values), 0, values)
    p.scale = 0.1 / 300
    indices = choose(p, 48) if selected else None

    def seen(b, t):
        return p.tokens(b, indices[b, t][indices[b, t] >= 0] if selected else range(p.lens[b]))

    selection = Selection() if selected else None
    assert_right(machine, p, seen, selection=selection, indices=indices, packed=1, out_scale=0.25)


def ds_mla(scales="power", rng=RNG):
    """A Problem of 656-byte rows, its latent values before the scales [..., 512] and the scales [..., 4]."""
    p = make(B=1, T=1, H=3, D=576, V=512, lens=(40,), rng=rng)
    held = np.isfinite(p.cache.astype(np.float32)).all(-1)
    codes = rng.integers(0, 127, (*held.shape, 512)) + 128 * rng.integers(0, 2, (*held.shape, 512))
    codes = codes.astype(np.uint8)
    factor = np.exp2(rng.integers(-9, -4, (*held.shape, 4))).astype(np.float32)
    if scales != "power":
        factor *= rng.uniform(1, 2, factor.shape).astype(np.float32)
    row = np.concatenate([codes, factor.view(np.uint8), p.cache[..., 512:].view(np.uint8)], -1)
    row[~held] = 0xFF
    assert row.shape[-1] == 656
    values = np.where(held[..., None], codes.view(E4M3).astype(np.float32), 0)
    p.cache, p.scale = row, 0.02
    return p, values, np.where(held[..., None], factor, 1)


@pytest.mark.parametrize(
    ("reader", "scales"), [("f32_bf16", "any"), ("bf16", "any"), ("exponent", "any"), ("exponent", "power")]
)
def test_rows_of_656_bytes(machine, reader, scales):
    p, values, factor = ds_mla(scales)
    if reader == "bf16":
        factor = factor.astype(BF16).astype(np.float32)
    if reader == "exponent":
        factor = np.exp2(np.floor(np.log2(factor)))
    latent = (values * np.repeat(factor, 128, -1)).astype(BF16).astype(np.float64)
    p.rows = np.concatenate([latent, p.rows[..., 512:]], -1)
    packed = paged_mma.PACKED["fp8_ds_mla", reader]
    assert_right(machine, p, lambda b, t: p.tokens(b, range(40)), packed=packed)
    if reader == "f32_bf16":
        slots = np.array([[[p.token(0, j) for j in (3, 39, 3, 0)]]])
        listed = Selection(by_slot=True)
        assert_right(machine, p, lambda b, t: slots[b, t], packed=packed, selection=listed, indices=slots)


def test_a_nan_scale_or_code_spoils_the_rows_that_see_it(machine):
    for byte, value in ((0, 0x7F), (515, 0x7F)):
        p, _, _ = ds_mla()
        at = p.token(0, 39)
        p.cache.reshape(-1, 656)[at, byte] = value
        if byte:
            p.cache.reshape(-1, 656)[at, byte - 1] = 0xC0
        _, out, lse = run(machine, p, packed=2)
        assert np.isnan(out).all() and np.isnan(lse).all()
        slots = np.array([[[p.token(0, j) for j in range(39)]]])
        _, out, lse = run(machine, p, packed=2, selection=Selection(by_slot=True), indices=slots)
        assert np.isfinite(out).all() and np.isfinite(lse).all()


def test_what_the_kernel_does_not_take_is_refused_by_name(machine):
    p = make()
    with pytest.raises(UnsupportedError, match=r"^kernel 'scalar' takes neither packed rows nor a selection$"):
        run(machine, p, selection=Selection(left=3), kernel="scalar")
    p.q, p.cache = p.q.astype(np.float32), p.cache.astype(np.float32)
    with pytest.raises(UnsupportedError, match=r"q is f32 and kv_cache f32, expected both f16 or both bf16$"):
        run(machine, p, selection=Selection(left=3))
    p = make(causal=True)
    with pytest.raises(InputError, match=r"^by_slot is True, expected indices, and causal False$"):
        run(machine, p, selection=Selection(by_slot=True), indices=np.zeros((2, 2, 4)))


SYNC = "        __syncthreads();            // the rows are there"
BUGS = {
    "no barrier before rows are unpacked": (SYNC, "        //", "race|cp.async"),
    "no barrier after rows are unpacked": ("    __syncthreads();        // the tile is there", "    //", "race"),
    "no wait": ("        wait_for_groups();\n", "", "cp.async not waited for"),
    "the next rows copied over these": ("tiles + (now ^ 1) * TILE_BYTES", "tiles + now * TILE_BYTES", "cp.async"),
    "a row of twice the bytes": ("TILE_BYTES + key * ROW_BYTES", "TILE_BYTES + key * 2 * ROW_BYTES", "never|bounds"),
    "rows past the last": ("        if (j >= end) continue;\n", "", "out of bounds|never written"),
}


@pytest.mark.skipif(kernel_cases.missing("ptx") is not None, reason="the extra cuda is not installed")
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_planted_in_the_path_of_packed_rows_is_reported(bug):
    old, new, said = BUGS[bug]
    p, _, _ = ds_mla()
    slots = np.array([[[p.token(0, j) for j in np.resize(np.arange(40), 150)]]])
    with pytest.raises(Fault, match=said):
        run(Planted("sm_90", old, new), p, packed=2, selection=Selection(by_slot=True), indices=slots)
