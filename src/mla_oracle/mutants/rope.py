# SPDX-License-Identifier: Apache-2.0
"""Wrong rotations of the rope elements, of the query, of the keys or of both: pairing, angle, base, off by one.

On a rope case the rows are turned the wrong way to begin with.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .mutant import Mutant, Turn
from .needs import Need, angles, rope, two_keys
from .plan import Plan
from .problem import Problem
from .rotation import Rotation, frequencies
from .turns import half, missing, moved, pairing, rotate, rounded, swapped, table_layout, with_angles

BASES = (10000.0, 500000.0, 1000000.0)


rotated_with_yarn = Need("angles with YaRN", lambda p: isinstance(p.rotation, Rotation) and p.rotation.yarn is not None)


TURNS: tuple[tuple[str, str, str, str, tuple[Need, ...], Turn, str], ...] = (
    (
        "pairing",
        "rope pairing",
        "pairs (2i, 2i + 1) rotated as (i, i + R/2), or the other way round",
        "huggingface/optimum-intel#1877 vllm-project/vllm#28968 sgl-project/sglang#13531",
        (),
        pairing,
        "both q k",
    ),
    (
        "table-layout",
        "rope pairing",
        "x'_m = x_m cos phi_m -+ x_m' sin phi_m with the phi of the other pairing's table",
        "NVIDIA/Megatron-LM#3900",
        (),
        table_layout,
        "both q k",
    ),
    (
        "doubled",
        "double rotation",
        "R(p) -> R(2p)",
        "NVIDIA/TensorRT-LLM#13222",
        (),
        moved(lambda p: 2 * p),
        "both q k",
    ),
    ("missing", "missing rotation", "R(p) -> 1", "ml-explore/mlx-lm#1189", (), missing, "both q k"),
    ("reversed", "wrong angle", "R(p) -> R(-p), the sine's sign", "", (), moved(lambda p: -p), "both q k"),
    ("cos-sin-swapped", "wrong angle", "cos and sin exchanged", "", (), swapped, "both q k"),
    (
        "exponent",
        "wrong angle",
        "theta_i = base^(-i/R) for base^(-2i/R)",
        "",
        (),
        with_angles(lambda r: r.base ** (-np.arange(r.width // 2) / r.width)),
        "both k",
    ),
    (
        "exponent-width",
        "wrong angle",
        "theta_i = base^(-2i/3R), R taken for the width of the whole query head",
        "",
        (),
        with_angles(lambda r: r.base ** (-2 * np.arange(r.width // 2) / (3 * r.width))),
        "both k",
    ),
    ("half", "wrong angle", "only the first R/2 elements are rotated", "", (), half, "both k"),
    (
        "no-yarn",
        "wrong angle",
        "theta without YaRN's ramp",
        "",
        (rotated_with_yarn,),
        with_angles(lambda r: frequencies(r.width, r.base)),
        "both k",
    ),
    (
        "position-bf16",
        "position rounded",
        "R(p) -> R(bf16(p)), from position 257 on",
        "",
        (Need("more than 257 keys", lambda p: int(p.lens.max(initial=0)) > 257),),
        rounded("bf16"),
        "both k",
    ),
    (
        "position-f16",
        "position rounded",
        "R(p) -> R(f16(p)), from position 2049 on",
        "",
        (Need("more than 2049 keys", lambda p: int(p.lens.max(initial=0)) > 2049),),
        rounded("f16"),
        "both k",
    ),
)


def _turning(
    name: str, family: str, formula: str, refs: str, needs: tuple[Need, ...], act: Turn, sides: str, side: str
) -> Mutant:
    where = {"both": "q and k", "q": "q alone", "k": "k alone"}[side]

    def edit(problem: Problem, plan: Plan) -> Plan:
        return rotate(problem, plan, act if side != "k" else None, act if side != "q" else None)

    return Mutant(
        name=f"rope.{name}" if side == "both" else f"rope.{name}-{side}",
        family=family,
        formula=f"{formula}: {where}",
        references=tuple(refs.split()),
        parameters={"side": side},
        conditions=(two_keys, rope, angles, *needs),
        edit=edit,
        turn=act if side == "both" or (side == "q" and "both" not in sides) else None,
    )


def base(value: float, side: str) -> Mutant:
    """The keys, the query or both rotated with another base."""
    act = with_angles(lambda r: frequencies(r.width, value, r.yarn))
    other = Need(
        f"angles of a base other than {value:g}",
        lambda p: isinstance(p.rotation, Rotation) and p.rotation.base != value,
    )
    made = _turning(
        f"base-{value:g}",
        "wrong base",
        f"theta_i = {value:g}^(-2i/R)",
        "ml-explore/mlx-lm#1189",
        (other,),
        act,
        "both q k",
        side,
    )
    return replace(made, parameters={"base": value, "side": side})


def shifted(by: float, side: str) -> Mutant:
    """The query or the keys rotated `by` positions too far; only the difference counts, so never both."""
    known: dict[float, str] = {1: "plus-one", -1: "minus-one"}
    name = known.get(by, f"shift-{by:g}")
    refs = "EfficientMoE/MoE-Infinity#195" if by == 1 and side == "q" else ""
    family = "position off by one" if abs(by) == 1 else "wrong position"
    formula = f"R(p) -> R(p {'+-'[by < 0]} {abs(by):g})"
    made = _turning(name, family, formula, refs, (), moved(lambda p: p + by), "q k", side)
    return replace(made, parameters={"by": by, "side": side})


MUTANTS = (
    *(_turning(*spec, side) for spec in TURNS for side in spec[6].split()),
    *(shifted(by, side) for by in (1, -1) for side in ("q", "k")),
    *(base(value, side) for value in BASES for side in ("both", "k")),
)
