# SPDX-License-Identifier: Apache-2.0
"""Who runs against whom: each function here prepares contestants, checks them against strict f64, times them.

A contestant whose result is wrong (by more than LIMIT of the largest element) is left out, with a line why.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from calibration import Contestant, Effort, Peak, Samples, rounds
from peers import numpy_peer, torch_module, torch_peers
from problems import SHAPES, Dense, Paged, paged
from seeds import compiled, dense_seed, paged_seed
from wheel import operators, wheel_peers

from mla_oracle.fast import isa as isas

PEERS = ("numpy", "torch", "wheel", "seeds")
LIMIT = {"f32": 1e-4, "bf16": 0.2}
SEEDED = ("S1", "S3", "S4")  # the shapes at which a speed over the seeds' kernel is asked

Race = dict[str, Samples]


@dataclass
class Course:
    """What all races share: the instruction set, the peers, the effort, what was skipped and why."""

    isa: str
    bf16_isa: str  # AMX where there is one
    peers: tuple[str, ...]
    effort: Effort
    every_head: bool
    skipped: list[str] = field(default_factory=list)
    peaks: dict[tuple[str, int], Peak] = field(default_factory=dict)

    def peak(self, isa: str, threads: int = 1) -> Peak:
        """The f32 multiply-add peak; the AMX build's is AVX-512's."""
        key = ("v4" if isa == "amx" else isa, threads)
        if key not in self.peaks:
            self.peaks[key] = Peak(*key)
        return self.peaks[key]

    def ours(self, case: Paged, name: str = "mla-oracle", **how: Any) -> Contestant:
        return case.decode(name, self.bf16_isa if case.dtype == "bf16" else self.isa, **how)

    def available(self, peer: str, reason: Callable[[], object]) -> bool:
        """Whether a peer was asked for and is there."""
        if peer not in self.peers:
            return False
        answer = reason()
        if isinstance(answer, str):
            self.skip(answer)
        return not isinstance(answer, str)

    def skip(self, reason: str) -> None:
        if reason not in self.skipped:
            self.skipped.append(reason)
            print(f"  skipped: {reason}", file=sys.stderr)

    def rivals(self, case: Paged) -> Iterator[Contestant]:
        if "numpy" in self.peers:
            yield from numpy_peer(case)
        if self.available("torch", torch_module):
            yield from torch_peers(case)
        if self.available("wheel", operators):
            yield from wheel_peers(case)

    def race(
        self, title: str, contestants: Iterable[Contestant], truth: np.ndarray, heads: object, limit: float,
        peak: Peak,
    ) -> Race:  # fmt: skip
        """Check, then time. `truth` [B, heads, V]; `heads` picks those of a result."""
        errors, sound = {}, []
        for contestant in contestants:
            contestant.call()
            found = np.abs(contestant.result()[:, heads] - truth).max() / np.abs(truth).max()
            if not found <= limit:
                self.skip(f"{contestant.name} at {title}: error {found:.1e} of the largest element")
                continue
            errors[contestant.name] = float(found)
            sound.append(contestant)
        race = rounds(sound, peak, self.effort)
        print(f"{title}, threads {peak.threads}, shares of the {peak.isa} peak", file=sys.stderr)
        for name, samples in race.items():
            samples.error = errors[name]
            share = "no quiet repetition" if samples.share is None else f"share {samples.share:.3f}"
            print(f"  {name:15} {share}, quiet {samples.counts}, error {errors[name]:.1e}", file=sys.stderr)
        return race

    def heads(self, H: int) -> object:
        """The heads that are checked."""
        return slice(None) if self.every_head else [0, H // 2, H - 1]


def shape_races(course: Course, shape: str) -> dict[str, Race]:
    """{"f32", "bf16": one thread, with peers; "f32 two", "bf16 two": ours at two; "v3" in S1; and "... near": rows that
    stay in the second cache}."""
    case = paged(*SHAPES[shape])
    heads, races = course.heads(case.sizes[1]), {}
    seeded = shape in SEEDED and course.available("seeds", lambda: compiled("paged"))
    for problem in (case, case.rounded()):
        name, title, limit = problem.dtype, f"{shape} {problem.dtype}", LIMIT[problem.dtype]
        truth = problem.truth(heads)
        contestants = [course.ours(problem), *course.rivals(problem)]
        if seeded:
            contestants.append(paged_seed(problem))
        if name == "f32" and shape == "S1":
            contestants.append(course.ours(problem, "mla-oracle f64", precision="f64"))
        races[name] = course.race(title, contestants, truth, heads, limit, course.peak(course.isa))
        near = problem.near()
        races[f"{name} near"] = course.race(
            f"{title} near", [course.ours(near)], near.truth(heads), heads, limit, course.peak(course.isa)
        )
        for where, one in (("", problem), (" near", near)):
            two = [course.ours(one, threads=2), course.ours(one, "one thread")]
            races[f"{name} two{where}"] = course.race(
                f"{title}{where}", two, one.truth(heads), heads, limit, course.peak(course.isa, 2)
            )
        if name == "f32" and shape == "S1" and course.isa != "v3" and "v3" in isas.available():
            v3 = [problem.decode("mla-oracle", "v3")]
            races["v3"] = course.race(title, v3, truth, heads, limit, course.peak("v3"))
    return races


def dense_races(course: Course) -> dict[str, Race]:
    """GLM-5.2 at one query token: the absorbed form over 4096 rows, the naive one over 512."""
    races = {}
    for form, t_kv in (("absorbed", 4096), ("naive", 512)):
        case = Dense(form, t_kv)
        contestants = [case.attend("mla-oracle", course.isa)]
        if course.available("seeds", lambda: compiled("dense")):
            contestants.append(dense_seed(case))
        title, peak = f"GLM-5.2 {form} L={t_kv}", course.peak(course.isa)
        races[form] = course.race(title, contestants, case.truth(), slice(None), LIMIT["f32"], peak)
    return races


def growth_races(course: Course, lengths: Iterable[int]) -> dict[tuple[int, str, int], Race]:
    """{(H, dtype, L): one thread with peers}, one request, checked on three heads."""
    races = {}
    for H in (16, 128):
        for L in lengths:
            case = paged(1, H, L)
            heads = [0, H // 2, H - 1]
            for problem in (case, case.rounded()):
                dtype, contestants = problem.dtype, [course.ours(problem), *course.rivals(problem)]
                races[H, dtype, L] = course.race(
                    f"L={L} H={H} {dtype}", contestants, problem.truth(heads), heads, LIMIT[dtype],
                    course.peak(course.isa),
                )  # fmt: skip
    return races
