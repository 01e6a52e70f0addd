# SPDX-License-Identifier: Apache-2.0
"""What `run` dumps passes its own check, in every form, and with one stage of it broken that stage is named first.

Of every form all stages are dumped, those of the other form among them: an o_lat that attn was not made of. As numbers
of 16 bits a dump has each stage rounded before the next is computed from it.
"""

import itertools

import ml_dtypes
import numpy as np
import pytest
from engine import CONFIG, PLAIN, Engine, random_states, random_weights
from test_check_stages import FAMILIES, judged, layer_of

from mla_oracle.layer import Store, check_stages, run, stages_of
from mla_oracle.layer.sequences import sequences

TOKENS = 6
FORMS = ("naive", "absorbed", "paged")
DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
CELLS = list(itertools.product(FAMILIES, FORMS, ("f32", "f64"), DTYPES))


def of(family, form):
    """A layer, its inputs, and how its rows are stored."""
    config = FAMILIES[family]
    inputs = {"hidden_states": random_states(config, TOKENS), "positions": np.arange(TOKENS)}
    if form != "paged":
        return *layer_of(config, random_weights(config)), inputs, None
    inputs |= {"slot_mapping": 8 + np.arange(TOKENS), "block_table": np.array([[2, 3]])}
    return *layer_of(config, random_weights(config)), inputs, Store(block_size=4, dtype="f32")


def dumped(config, weights, inputs, dtype, **how):
    """Every stage in `dtype`, computed from those before it as they are dumped."""
    (sequence,) = sequences(config, weights, inputs, angles="closed", backend="auto", **how)
    state, dump = sequence.state, {}
    for name, stage in stages_of(config).items():
        found = stage.compute(state)
        dump[name] = found if name == "topk" else found.astype(dtype)
        state.values[name] = dump[name].astype(found.dtype)
    return dump


def broken(dump, name, row):
    """The dump with one element of a row far off, or with one token fewer chosen."""
    stage = dump[name].copy()
    if name == "topk":
        stage[row, np.flatnonzero(stage[row] >= 0)[-1]] = -1
        return dump | {name: stage}
    values = np.nan_to_num(stage.astype(np.float64), neginf=0)
    index = (row, *[0] * (stage.ndim - 1))
    stage[index] = values[index] + 1 + 2 * np.abs(values).max()
    return dump | {name: stage}


@pytest.mark.parametrize("cell", range(len(CELLS)), ids=["-".join(cell) for cell in CELLS])
def test_a_dump_of_ours_passes_and_its_broken_stage_is_named_first(cell):
    family, form, precision, dtype = CELLS[cell]
    config, weights, inputs, store = of(family, form)
    dump = dumped(config, weights, inputs, DTYPES[dtype], precision=precision, form=form, store=store)
    verdict = check_stages(config, weights, inputs, dump, store=store)
    assert verdict.passed and not any(finding.blind for finding in verdict.stages), verdict.reason
    names = [name for name in stages_of(config) if dump[name].size]
    for name in ("attn", names[2 * cell % len(names)], names[(2 * cell + 1) % len(names)]):  # all, over the cells
        row = len(dump[name]) - 1
        verdict = check_stages(config, weights, inputs, broken(dump, name, row), store=store)
        assert (verdict.first, verdict.row) == (name, row), verdict.reason


@pytest.mark.parametrize("precision", ["f32", "f64"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_run_gives_is_such_a_dump(family, form, precision):
    config, weights, inputs, store = of(family, form)
    found = run(config, weights, inputs, precision=precision, form=form, store=store)
    dump = dumped(config, weights, inputs, found["out"].dtype, precision=precision, form=form, store=store)
    assert all(np.array_equal(found[name], dump[name]) for name in found)
    for lacking in ((), ("attn",), ("o_lat",), ("scores", "p", "o_lat"), ("q_nope", "kv_cache")):
        part = {name: stage for name, stage in found.items() if name not in lacking}
        verdict = check_stages(config, weights, inputs, part, store=store)
        assert verdict.passed, (lacking, verdict.reason)


def test_an_attn_made_beside_an_o_lat_is_said_to_be_where_no_values_tell():
    config, weights, inputs, _ = of("plain", "naive")
    dump = run(config, weights, inputs, precision="f32")
    del dump["v"]
    verdict = check_stages(config, weights, inputs, dump)
    assert verdict.passed
    (said,) = (finding.blind for finding in verdict.stages if finding.blind)
    assert said == "attn is not made of the o_lat dumped, from which it is off by 3.06 times its budget"


class Beside(Engine):
    """Of the absorbed form, with an attn of a wrong up-projection."""

    def parts(self):
        w_uk, w_uv = super().parts()
        return w_uk, self.wrong(w_uv)


class RoundedValues(Beside):
    def wrong(self, w_uv):
        return w_uv.astype(ml_dtypes.bfloat16).astype(self.real)


class NextHead(Beside):
    def wrong(self, w_uv):
        return np.roll(w_uv, 1, axis=0)


@pytest.mark.parametrize(
    ("engine", "dtype"), [(RoundedValues, "f32"), (NextHead, "f32"), (NextHead, "bf16"), (RoundedValues, "f64")]
)
@pytest.mark.parametrize("config", [CONFIG, PLAIN], ids=["yarn", "plain"])
def test_a_wrong_up_projection_of_a_right_o_lat_fails_at_attn(engine, dtype, config):
    verdict = judged(config, engine, dtype=dtype, naive=False)
    assert [finding.stage for finding in verdict.stages if not finding.passed] == ["attn"], verdict.reason


def test_a_wrong_o_lat_fails_and_no_stage_made_of_it():
    class Doubled(Engine):
        def keep(self, name, value):
            return super().keep(name, 2 * value if name == "o_lat" else value)

    verdict = judged(CONFIG, Doubled, naive=False)
    assert [finding.stage for finding in verdict.stages if not finding.passed] == ["o_lat"], verdict.reason
