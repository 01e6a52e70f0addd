# SPDX-License-Identifier: Apache-2.0
"""Wrong layouts of rows, KV heads and results, and scales that are missing or applied twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from .list_edits import of_case
from .listed import Listed, Reader
from .mutant import Edit, Finish, Maker
from .plan import Plan
from .problem import Problem, Results

LAYOUT, SCALE, HEADS = "rope first", "scale misuse", "KV head of a head"
offset = of_case("a value that does not begin the row", lambda p: p.offset > 0)
split_rows = of_case("rows in two caches", lambda p: p.case.kpe_cache is not None and p.case.cache_format is None)
kv_heads = of_case("two KV heads", lambda p: p.KV > 1)
groups = of_case("two KV heads, of two heads each", lambda p: p.KV > 1 and p.H > 1)
q_scale = of_case("a q_scale", lambda p: p.case.q_scale is not None and p.case.q_scale != 1)
output_scale = of_case("an output_scale", lambda p: p.case.output_scale is not None and p.case.output_scale != 1)
token_heads = of_case(
    "two query tokens [B, T, H] and two heads", lambda p: p.case.q.ndim == 4 and min(p.case.q.shape[1:3]) > 1
)


def _latent_first(problem: Problem, plan: Plan) -> Plan:
    """A row of rope, latent read as latent, rope: other elements meet, and the value is the row's first."""
    assert isinstance(problem, Listed)
    rope = problem.offset
    q = np.concatenate([problem.q[plan.b][..., rope:], problem.q[plan.b][..., :rope]], -1)
    return replace(plan, q_latent=q[..., : problem.split].copy(), value_columns=np.arange(problem.V))


def _of_kv_head(which: Callable[[Listed, Array], Array]) -> tuple[Edit, Finish]:
    """Head h reads KV head which(problem, h): each KV head takes its heads, and they go back to their places."""

    def order(problem: Listed) -> Array:
        """[H]: the head that stands at each place, KV head after KV head."""
        return np.argsort(which(problem, np.arange(problem.all_heads)), kind="stable")

    def edit(problem: Problem, plan: Plan) -> Plan:
        assert isinstance(problem, Listed) and plan.keys is not None
        n, g = divmod(plan.b, problem.KV)
        mine = order(problem)[g * problem.H : (g + 1) * problem.H]
        q = problem.canonical.q[n, mine][None]
        bias = plan.keys.bias
        if problem.canonical.bias is not None and problem.canonical.bias.shape[1] > 1:
            main = plan.keys.source == 0
            bias = np.where(main, problem.canonical.bias[n][mine][:, np.where(main, plan.keys.place, 0)], 0.0)
        return replace(
            plan,
            q_latent=q[..., : problem.split].copy(),
            q_rope=q[..., problem.split :].copy(),
            keys=plan.keys._replace(bias=bias),
            sinks=None if plan.sinks is None else problem.canonical.sinks[mine],
        )

    def finish(problem: Problem, results: Results) -> Results:
        assert isinstance(problem, Listed)
        back = np.argsort(order(problem))
        return {
            name: x.reshape(-1, problem.all_heads, *x.shape[3:])[:, back].reshape(x.shape)
            for name, x in results.items()
        }

    return edit, finish


def _neighbour(by: int) -> Edit:
    """Every head reads the KV head `by` further, 0: the first."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        assert isinstance(problem, Listed) and plan.keys is not None
        g = plan.b % problem.KV
        other = (g + by) % problem.KV if by else 0
        keys = plan.keys._replace(
            address=np.where(plan.keys.address < 0, plan.keys.address, plan.keys.address + other - g)
        )
        return replace(plan, keys=keys)

    return edit


def reading(name: str, of: Callable[[Listed], Reader]) -> Edit:
    """Keys and values as another reader finds them."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        assert isinstance(problem, Listed) and plan.keys is not None
        space = space_of(problem, name, of)
        address = np.where(plan.keys.address < 0, plan.keys.address, plan.keys.address + space)
        return replace(plan, keys=plan.keys._replace(address=address))

    return edit


def space_of(problem: Listed, name: str, of: Callable[[Listed], Reader]) -> int:
    """The addresses of a reader, which is made once."""
    if name not in problem.spaces:
        problem.spaces[name] = problem.store.space(of(problem))
    return problem.spaces[name]


def _cut(problem: Listed) -> int:
    """Columns of kv_cache; those of kpe_cache follow."""
    return int(problem.case.kv_cache.shape[-1])


def _kpe_of(slot: Callable[[Listed, Array], Array]) -> Callable[[Listed], Reader]:
    """The rope part of another slot."""

    def of(problem: Listed) -> Reader:
        def read(source: int, slots: Array) -> Array:
            cache = problem.store.caches[source]
            own = cache.read(slots)
            if source:
                return own
            other = cache.read(slot(problem, slots) % (cache.num_blocks * cache.block_size))
            return np.concatenate([own[..., : _cut(problem)], other[..., _cut(problem) :]], -1)

        return read

    return of


def _kpe_missing(problem: Listed) -> Reader:
    def read(source: int, slots: Array) -> Array:
        own = problem.store.caches[source].read(slots).copy()
        if not source:
            own[..., _cut(problem) :] = 0
        return own

    return read


def _kpe_first(problem: Listed) -> Reader:
    def read(source: int, slots: Array) -> Array:
        own = problem.store.caches[source].read(slots)
        return own if source else np.roll(own, own.shape[-1] - _cut(problem), -1)

    return read


def _scale(of: Callable[[float], float]) -> Edit:
    """The scores times of(q_scale)."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        assert isinstance(problem, Listed) and problem.case.q_scale is not None
        return replace(plan, scale=plan.scale * of(float(problem.case.q_scale)))

    return edit


def _out(of: Callable[[float], float]) -> Edit:
    return lambda problem, plan: replace(plan, out_factor=of(plan.out_factor))


def _on_out(problem: Problem, plan: Plan) -> Plan:
    assert isinstance(problem, Listed) and problem.case.q_scale is not None
    return replace(plan, out_factor=plan.out_factor * problem.case.q_scale)


def _axes(stored_first: bool) -> Finish:
    """The LSE of a request in the other order of its axes."""

    def finish(problem: Problem, results: Results) -> Results:
        assert isinstance(problem, Listed)
        B, T, H = problem.case.q.shape[:3]
        lse = results["lse"].reshape(B, T, H)
        turned = lse.swapaxes(1, 2).reshape(B, T, H) if stored_first else lse.reshape(B, H, T).swapaxes(1, 2)
        return {**results, "lse": np.ascontiguousarray(turned).reshape(results["lse"].shape)}

    return finish


_mutant = Maker("layout.")
_scaled = Maker("scale.")
_modulo = _of_kv_head(lambda p, h: h % p.KV)
MUTANTS = (
    _mutant(
        "value-at-0",
        "wrong V slice",
        "o = sum w_j row_j[0:V], of a value that begins later",
        offset,
        edit=lambda p, plan: replace(plan, value_columns=np.arange(p.V)),
        refs="ggml-org/llama.cpp#18986",
    ),
    _mutant(
        "latent-first",
        LAYOUT,
        "a row of rope, latent read as latent, rope",
        offset,
        edit=_latent_first,
        refs="ggml-org/llama.cpp#18986",
    ),
    _mutant("kv-head-modulo", HEADS, "head h reads KV head h mod KV", groups, edit=_modulo[0], finish=_modulo[1]),
    _mutant("kv-head-0", HEADS, "every head reads KV head 0", kv_heads, edit=_neighbour(0)),
    _mutant("kv-head-next", HEADS, "every head reads the KV head after its own", kv_heads, edit=_neighbour(1)),
    _mutant(
        "kpe-of-page-0",
        "rows in two caches",
        "the rope part of page 0",
        split_rows,
        edit=reading("kpe-of-page-0", _kpe_of(lambda p, slots: slots % p.block)),
    ),
    _mutant(
        "kpe-of-next-page",
        "rows in two caches",
        "the rope part of the page after it",
        split_rows,
        edit=reading("kpe-of-next-page", _kpe_of(lambda p, slots: slots + p.block)),
    ),
    _mutant(
        "kpe-of-next-slot",
        "rows in two caches",
        "the rope part of the slot after it",
        split_rows,
        edit=reading("kpe-of-next-slot", _kpe_of(lambda p, slots: slots + 1)),
    ),
    _mutant(
        "kpe-missing", "rows in two caches", "the rope part is 0", split_rows, edit=reading("kpe-missing", _kpe_missing)
    ),
    _mutant(
        "kpe-first",
        "rows in two caches",
        "the row is the rope part, then the other",
        split_rows,
        edit=reading("kpe-first", _kpe_first),
    ),
    _mutant(
        "lse-heads-first",
        "LSE slot",
        "lse stored [B, H, T] where [B, T, H] is asked for",
        token_heads,
        finish=_axes(True),
    ),
    _mutant(
        "lse-tokens-first",
        "LSE slot",
        "lse stored [B, T, H] where [B, H, T] is asked for",
        token_heads,
        finish=_axes(False),
    ),
    _scaled(
        "q-missing", SCALE, "q_scale is left out", q_scale, edit=_scale(lambda s: 1 / s), refs="vllm-project/vllm#37054"
    ),
    _scaled(
        "q-twice", SCALE, "q_scale is applied twice", q_scale, edit=_scale(lambda s: s), refs="vllm-project/vllm#37054"
    ),
    _scaled("q-divided", "inverted scale", "q / q_scale", q_scale, edit=_scale(lambda s: s**-2)),
    _scaled(
        "q-on-out",
        SCALE,
        "o <- q_scale o, too",
        q_scale,
        edit=_on_out,
    ),
    _scaled("out-missing", "output scale", "output_scale is left out", output_scale, edit=_out(lambda s: 1.0)),
    _scaled("out-twice", "output scale", "output_scale is applied twice", output_scale, edit=_out(lambda s: s * s)),
    _scaled(
        "out-divided",
        "inverted scale",
        "o / output_scale",
        output_scale,
        edit=_out(lambda s: 1 / s),
        refs="vllm-project/vllm#36297",
    ),
)
