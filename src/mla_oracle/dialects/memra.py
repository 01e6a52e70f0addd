# SPDX-License-Identifier: Apache-2.0
"""memra's mla_attend_absorbed and mla_attend_naive, which take the same inputs.

Read from memra f54b005: mla.rs (MlaDims, MlaInputs).
"""

from __future__ import annotations

from typing import Any

from ..cases import AbsorbedCase, Case
from ..oracle import check_shapes
from .arguments import Given, tensor
from .dialect import Dialect


class MlaInputs(Dialect):
    """f32 inputs, rope applied and c_kv normed; query i sees rows 0 .. t_kv - t_q + i; the scale is 1/sqrt(P + R).

    n_head, d_nope, d_rope, d_v and kv_rank are the axes of the arrays. No LSE.
    """

    name = "memra"
    call = "mla_attend_absorbed"
    source = "memra f54b005 mla.rs"
    arguments = {
        "q_nope": tensor("t_q n_head d_nope", "f32"),
        "q_pe": tensor("t_q n_head d_rope", "f32"),
        "c_kv": tensor("t_kv kv_rank", "f32"),
        "k_pe": tensor("t_kv d_rope", "f32"),
        "w_uk": tensor("n_head d_nope kv_rank", "f32"),
        "w_uv": tensor("n_head d_v kv_rank", "f32"),
    }
    itself = "scale 1/sqrt(d_nope + d_rope)"
    masks = "causal bottom-right"
    out_axes = "t_q n_head d_v"

    @staticmethod
    def kind() -> type[Case]:
        return AbsorbedCase

    def to_case(self, **arguments: Any) -> Case:
        case = AbsorbedCase(**self.take(arguments))
        self.check(case)
        return case

    def check(self, case: Any) -> None:
        check_shapes(case)

    def canonical(self, given: Given) -> dict[str, Any]:
        return dict(given)

    def spell(self, case: Any) -> dict[str, Any]:
        return dict(case.tensors())


DIALECTS = (MlaInputs(),)
