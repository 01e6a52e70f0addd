# SPDX-License-Identifier: Apache-2.0
"""The verdict on a layer's stages as an engine dumped them: the first that leaves its budget, and at which query.

Every stage is computed in f64 from the stages before it as the engine dumped them, so that an error is told where it is
made and nowhere after. Of what was not dumped ours takes the place, and the budget allows for its roundings. A stage of
f32 whose every number is one of a narrower format is taken to be stored in that. Sequences are judged one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import dtypes
from ..checks import WIDE_FLOATS, choice
from ..errors import InputError
from ..verdict.noise import UNIT
from .config import LayerConfig
from .dump import narrowest, taken
from .judge import Judge
from .layout import OF_ROPE, layout_of, may_part, settled_layout
from .pages import Store
from .sequences import sequences, together
from .spread import Spread
from .stages import STAGES, stages_of
from .verdict import Finding, LayerVerdict, merged, reason
from .weights import Weights

# What nothing else needs: looked at if dumped.
LEAVES = ("k_nope", "v", "q_lat", "scores", "lse", "p", "o_lat")
# What engines keep in f32 whatever they store else, and what holds no numbers: these do not tell what others are in.
WIDE = ("scores", "lse", "p", "index_weights", "index_scores", "topk")
# Norms whose eps engines read differently.
NORMS = ("q_a_norm", "kv_a_norm")


def check_stages(
    config: LayerConfig,
    weights: Weights,
    inputs: Mapping[str, object],
    dump: Mapping[str, object],
    *,
    angles: str = "any",
    held: str | None = None,
    rope_layout: str | None = None,
    lse_base: str = "e",
    numerics: Any = None,
    store: Store | None = None,
) -> LayerVerdict:
    """The verdict on `dump`, stages by their names, of a layer that was given `inputs` (as of stages.run).

    `held`: the dtype of stages that are not dumped; None: the coarsest of those that are, or of the hidden states.
    `rope_layout`: how rotated rows of adjacent pairs are stored, interleaved or neox (pairs parted); None: as the
    first of them in the dump is. `angles`: the mode of the angles, "any" allows for each. `numerics`: what the
    attention rounds, see numerics.resolve. `store`: of the paged form, how cached rows are stored. A choice of tokens
    that is not dumped is ours. Raises InputError.
    """
    every = sequences(config, weights, inputs, angles=angles, store=store, form="naive" if store is None else "paged")
    stages, sizes = stages_of(config), together(every)
    batch = len(every) if len({(s.sizes.tokens, s.sizes.rows) for s in every}) == 1 else 1
    given = {name: taken(name, value, config, sizes, batch) for name, value in dump.items()}
    if not given:
        raise InputError(f"the dump holds no stage, expected one or more of {', '.join(stages)}")
    choice("lse_base", lse_base, ("e", "2"))
    if held is None:
        kept = WIDE if store is None else (*WIDE, "kv_cache")
        own = [array for name, array in given.items() if name not in kept]
        own = own or [narrowest(s.state["hidden_states"]) for s in every]
        held = max((dtypes.name_of(array.dtype) for array in own), key=UNIT.__getitem__)
        held = "f32" if not any(name not in kept for name in given) and held == "f64" else held
    choice("held", held, WIDE_FLOATS)
    known: dict[str, bool] = {}
    found, judges = [], []
    for sequence in every:
        part = {name: sequence.of(name, STAGES[name].axes, stage) for name, stage in given.items()}
        judge = Judge(sequence, Spread(sequence.state, held, weights.dtypes(), {}), part, numerics, lse_base)
        found.append(_findings(judge, known, rope_layout))
        judges.append(judge)
    findings = [merged(of) for of in zip(*found, strict=True)]
    failed = [finding for finding in findings if not finding.passed]
    first = failed[0] if failed else None
    state = judges[0].state
    return LayerVerdict(
        passed=first is None,
        reason=reason(findings, first),
        first=None if first is None else first.stage,
        sequence=None if first is None else first.sequence,
        row=None if first is None else first.row,
        position=None if first is None else first.position,
        stages=findings,
        missing=[name for name in stages if name not in given],
        conventions={
            "held": held,
            "angles": state.angles,
            "norm_eps": state.config.norm_eps,
            "rope_layout": layout_of(state),
            "numerics": judges[0].declared,
        },
    )


def _findings(judge: Judge, known: dict[str, bool], rope_layout: str | None) -> list[Finding]:
    """What is found of every stage of a sequence's dump; `known`, whether pairs are parted, is added to."""
    state, given = judge.state, judge.given
    settled = settled_layout(state, given, known, rope_layout)
    findings = []
    for name in stages_of(state.config):
        if name in LEAVES and name not in given:
            continue
        kind = OF_ROPE.get(name)
        finding = judge.judge(name)
        if kind is not None and name in given:
            if not settled[kind] and not finding.passed and may_part(state, name):
                judge.part(kind, True, name)
                other = judge.judge(name)
                if other.passed:
                    finding = other
                else:
                    judge.part(kind, False, name)
                    judge.judge(name)
            settled[kind] = True
            if finding.passed:
                known[kind] = state.parted[kind]
        if name in NORMS and not finding.passed:
            finding = judge.explained(finding)
        judge.settle(name)
        if name in given:
            findings.append(finding)
    return findings
