# SPDX-License-Identifier: Apache-2.0
"""What is asked of the fast tier's speed beside what was reached: `figures` reads the races, `table` prints.

A figure is a share of the f32 multiply-add peak, or a ratio of the speeds of two who ran in turns; the
quiet/all repetitions follow it, for a ratio those of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from calibration import Samples
from problems import SHAPES, D
from races import Race

OURS = ("mla-oracle", "mla-oracle f64", "one thread", "seed")
AVX512_SHARE = {"S1": 0.88, "S2": 0.86, "S3": 0.78, "S4": 0.72}
SHARE = {"amx": AVX512_SHARE, "v4": AVX512_SHARE, "v3": {"S1": 0.70}}
SHARE_TWO = {"S1": 0.82, "S2": 0.84, "S3": 0.60, "S4": 0.70}
OVER_PEER = {"S1": 1.4, "S2": 1.4, "S3": 3.4, "S4": 3.8}
BF16_OVER_PEER = {"S1": 2.4, "S2": 2.4, "S3": 3.6, "S4": 1.7}
BF16_ERROR = 4e-6
TWO_OVER_ONE = 1.85
OVER_SEED = {"f32": {"S1": 250, "S3": 200, "S4": 200}, "bf16": {"S1": 900, "S3": 400, "S4": 400}}
DENSE_OVER_SEED = {"absorbed": 22, "naive": 65}
F64_RATE = 0.35


@dataclass(frozen=True)
class Figure:
    what: str
    where: str
    asked: float | None
    reached: float | None
    quiet: str  # repetitions that count, of all; for a ratio those of both sides
    note: str = ""
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        if self.reached is None or self.asked is None:
            return None
        return self.reached <= self.asked if self.at_most else self.reached >= self.asked

    def record(self) -> dict[str, object]:
        return {**asdict(self), "met": self.met}


def ratio(
    what: str, where: str, asked: float | None, a: Samples | None, b: Samples | None, note: str = ""
) -> Figure | None:
    """The speed of `a` over that of `b`, which ran in turns; None without both."""
    if a is None or b is None:
        return None
    reached = a.rate / b.rate if a.rate and b.rate else None
    return Figure(what, where, asked, reached, f"{a.counts} {b.counts}", note)


def best_peer(race: Race) -> Samples | None:
    peers = [samples for samples in race.values() if samples.name not in OURS]
    return max(peers, key=lambda samples: samples.rate or 0, default=None)


def of_shape(shape: str, races: dict[str, Race], isa: str, bf16_isa: str) -> Iterator[Figure | None]:
    f32, bf16, bf16_two = races["f32"], races["bf16"], races["bf16 two"]
    ours, ours_bf16 = f32["mla-oracle"], bf16["mla-oracle"]
    yield Figure("f32, share of peak", shape, SHARE.get(isa, {}).get(shape), ours.share, ours.counts)
    two = races["f32 two"]["mla-oracle"]
    B, _, L = SHAPES[shape]
    note = ""
    if shape == "S3" and two.rate:
        note = f"reads {two.rate / two.flops * B * L * D * 4 / 1e9:.1f} GB/s of cache"
    yield Figure(
        "f32, 2 threads, share of twice that", shape, SHARE_TWO[shape] if isa in ("v4", "amx") else None,
        two.share, two.counts, note,
    )  # fmt: skip
    for name, race, own, table in (
        ("f32", f32, ours, OVER_PEER),
        (f"bf16 ({bf16_isa})", bf16, ours_bf16, BF16_OVER_PEER),
    ):
        peer, others = best_peer(race), len([s for s in race if s not in OURS])
        note = f"{peer.name}, best of {others}, error {peer.error:.0e}" if peer else ""
        unknown = [s.name for s in race.values() if s.name not in OURS and s is not peer and not s.quiet]
        note += f"; never quiet: {', '.join(unknown)}" if unknown else ""
        yield ratio(f"{name} over the best peer", shape, table[shape], own, peer, note)
    yield Figure(
        f"bf16 ({bf16_isa}), error / max output", shape, BF16_ERROR, ours_bf16.error, "", at_most=True
    )
    pair = bf16_two["mla-oracle"], bf16_two["one thread"]
    yield ratio(f"bf16 ({bf16_isa}), 2 threads over 1", shape, TWO_OVER_ONE, *pair, "by the wall")
    for name in ("f32", "bf16"):
        what, near, two = f"{name}, rows in L2", races[f"{name} near"], races[f"{name} two near"]
        yield Figure(f"{what}, share of peak", shape, None, near["mla-oracle"].share, near["mla-oracle"].counts)
        pair = two["mla-oracle"], two["one thread"]
        yield ratio(f"{what}, 2 threads over 1", shape, None, *pair, "by the wall")
    for name, race, own in (("f32", f32, ours), ("bf16", bf16, ours_bf16)):
        if shape in OVER_SEED[name]:
            asked = OVER_SEED[name][shape]
            yield ratio(f"{name} over the seed's C++ re-stated", shape, asked, own, race.get("seed"))
    if "v3" in races:
        v3 = races["v3"]["mla-oracle"]
        yield Figure("f32 (v3), share of the AVX2 peak", shape, SHARE["v3"][shape], v3.share, v3.counts)
    yield ratio("f64 over f32", shape, F64_RATE, f32.get("mla-oracle f64"), ours)


def of_dense(races: dict[str, Race]) -> Iterator[Figure | None]:
    for form, race in races.items():
        note = "seed's Rust in C++ -O3 -march=native"
        asked = DENSE_OVER_SEED[form]
        ours = race["mla-oracle"]
        yield ratio(f"{form} over the seed's", "GLM-5.2", asked, ours, race.get("seed"), note)


def table(figures: list[Figure]) -> Iterator[str]:
    """Asked beside reached, a line each."""
    yield f"{'':38} {'':8} {'asked':>8} {'reached':>8}      quiet of all repetitions"
    for f in figures:
        show = "{:.1e}" if f.at_most else "{:.0f}" if (f.asked or 0) >= 20 else "{:.2f}"
        reached = "-" if f.reached is None else show.format(f.reached)
        verdict = {None: "    ", True: "yes ", False: "no  "}[f.met]
        asked = "" if f.asked is None else show.format(f.asked)
        yield f"{f.what:38} {f.where:8} {asked:>8} {reached:>8} {verdict} {f.quiet}  {f.note}".rstrip()


def growth_table(races: dict[tuple[int, str, int], Race]) -> Iterator[str]:
    """The share of the peak over lengths, and how flat ours is: the slowest length over the fastest."""
    lengths = sorted({L for _, _, L in races})
    yield f"{'share of the f32 peak at L =':30}" + "".join(f"{L:>8}" for L in lengths)
    for H, dtype in dict.fromkeys((H, dtype) for H, dtype, _ in races):
        names = dict.fromkeys(n for key, race in races.items() if key[:2] == (H, dtype) for n in race)
        for name in names:
            shares = [races[H, dtype, L].get(name) if (H, dtype, L) in races else None for L in lengths]
            cells = "".join(f"{s.share:8.3f}" if s and s.share else f"{'-':>8}" for s in shares)
            known = [s.share for s in shares if s and s.share]
            flat = f"  slowest/fastest {min(known) / max(known):.2f}" if known and name == OURS[0] else ""
            yield f"H={H:<4} {dtype:5} {name:17}{cells}{flat}"
