# SPDX-License-Identifier: Apache-2.0
"""Case ids: an id and its recipe are one to one, and a bad id is one line that says what is wrong with it."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_oracle import InputError, generate
from mla_oracle.cases.draws import MAX_BYTES
from mla_oracle.cases.recipes import (
    DENSE_INPUTS,
    PAGED_INPUTS,
    RECIPES,
    AbsorbedRecipe,
    AppendRecipe,
    MergeRecipe,
    NaiveRecipe,
    PagedRecipe,
    RopeRecipe,
    parse_id,
)
from mla_oracle.geometry.presets import PRESETS

sizes = st.integers(1, 2**31 - 1)
naturals = st.integers(0, 2**64 - 1)
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
lists = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple)
names = st.from_regex(r"\A[A-Za-z0-9_.]{1,20}\Z")
runs = st.builds(lambda n, times: (n,) * times, st.integers(0, 999), st.integers(0, 9))


def optional(values):
    return st.none() | values


COMMON = {
    "geometry": optional(st.sampled_from(sorted(PRESETS))),
    "dtype": st.sampled_from(["f32", "f16", "bf16"]),
    "seed": naturals,
}
LSE = {"lse_base": st.sampled_from(["e", "2"]), "empty_lse": st.floats(allow_nan=False)}
DENSE = {
    **dict.fromkeys(("heads", "nope", "value", "rank"), optional(sizes)),
    "rope": optional(naturals),
    "queries": sizes,
    "cached": sizes,
    "scale": optional(positive),
    "inputs": st.sampled_from(DENSE_INPUTS),
}
FIELDS = {
    NaiveRecipe: DENSE,
    AbsorbedRecipe: DENSE,
    PagedRecipe: {
        **dict.fromkeys(("heads", "row", "value", "tokens"), optional(sizes)),
        "lens": lists | runs,
        "block": sizes,
        "scale": optional(positive),
        "causal": st.booleans(),
        **LSE,
        "inputs": st.sampled_from(PAGED_INPUTS),
        "pages": st.sampled_from(["shuffled", "descending", "strided", "huge"]),
        "unread": st.sampled_from(["nan", "numbers"]),
        "shards": sizes,
        "shard_layout": st.sampled_from(["contiguous", "interleaved"]),
        "window": optional(st.lists(st.integers(-1, 2**31 - 1), min_size=1, max_size=2).map(tuple)),
        **dict.fromkeys(("first", "kpe", "value_offset"), st.integers(0, 2**31 - 1)),
        "bias": optional(st.sampled_from(["normal", "mask", "alibi"])),
        **dict.fromkeys(("topk", "extra_topk"), optional(sizes)),
        **dict.fromkeys(("extra_block", "kv_heads"), sizes),
        "topk_by": st.sampled_from(["position", "slot"]),
        "topk_outside": st.sampled_from(["error", "skip"]),
        "topk_length": optional(st.sampled_from(["request", "query"])),
        "invalid": st.sampled_from(["none", "some", "rows"]),
        **dict.fromkeys(("duplicates", "sinks_in_lse"), st.booleans()),
        **dict.fromkeys(("extra", "ragged"), optional(lists | runs)),
        **dict.fromkeys(("softcap", "q_scale", "output_scale"), optional(positive)),
        "sinks": optional(st.sampled_from(["normal", "infinite"])),
        "lse_axes": st.sampled_from(["BTH", "BHT"]),
        "q_dtype": optional(st.sampled_from(["f32", "f16", "bf16", "e4m3"])),
        **dict.fromkeys(("format", "writer", "reader", "extra_format"), optional(names)),
    },
    MergeRecipe: {**dict.fromkeys(("states", "rows", "heads", "value"), sizes), **LSE},
    RopeRecipe: {
        "heads": sizes,
        "rope": optional(naturals),
        "positions": lists | runs,
        "pairing": optional(st.sampled_from(["interleaved", "neox"])),
        "base": optional(positive),
        "angles": st.sampled_from(["recurrence", "power", "closed", "table"]),
    },
    AppendRecipe: {
        "rank": optional(sizes),
        "rope": optional(naturals),
        **dict.fromkeys(("tokens", "blocks", "block"), sizes),
    },
}


def test_every_field_of_every_kind_is_drawn_below():
    assert set(FIELDS) == set(RECIPES.values())
    for cls, drawn in FIELDS.items():
        assert {f.name for f in dataclasses.fields(cls)} == set(drawn) | set(COMMON)


@settings(deadline=None, max_examples=400, derandomize=True)
@given(st.one_of(st.builds(cls, **COMMON, **fields) for cls, fields in FIELDS.items()))
def test_an_id_gives_its_recipe_back(recipe):
    assert parse_id(str(recipe)) == recipe and type(parse_id(str(recipe))) is type(recipe)
    assert str(recipe).isprintable() and not set(str(recipe)) & set(" \t'\"\\$&|;<>()*?[]{}#!~`")


def test_a_nan_empty_lse_goes_through_an_id():
    assert str(parse_id("merge:empty_lse=nan")) == "merge:empty_lse=nan"


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("merge", "merge:"),
        ("merge:states=3,seed=1", "merge:"),
        ("paged:seed=007,block=064", "paged:seed=7"),
        ("paged:lens=5+5+5+1x2+0", "paged:lens=5x3+1x2+0"),
        ("paged:lens=7x0", "paged:lens="),
        ("paged:lens=", "paged:lens="),
        ("paged:scale=1e-3,heads=2", "paged:heads=2,scale=0.001"),
        ("paged:empty_lse=-inf,causal=true", "paged:"),
    ],
)
def test_an_id_has_one_canonical_spelling(text, canonical):
    assert str(parse_id(text)) == canonical


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is of kind '', expected naive, absorbed, paged, merge, rope, append"),
        ("page:seed=1", "is of kind 'page', expected"),
        ("PAGED:seed=1", "is of kind 'PAGED', expected"),
        ("paged:seed=1,", "has '', expected key=value with key bias, block"),
        ("paged:seeds=1", "has 'seeds=1', expected key=value with key bias"),
        ("paged:seed", "has 'seed', expected key=value"),
        ("paged:nope=1", "has 'nope=1', expected key=value"),
        ("paged:kind=naive", "has 'kind=naive', expected key=value"),
        ("paged:seed=1,seed=2", "gives seed twice"),
        ("paged:seed=-1", "has seed=-1, expected an integer from 0 to 2^64 - 1"),
        ("paged:seed=1.5", "has seed=1.5, expected an integer"),
        ("paged:seed=18446744073709551616", "has seed=18446744073709551616, expected an integer from 0 to 2^64 - 1"),
        ("paged:seed=٣", "has seed=٣, expected an integer"),
        ("paged:heads=0", "has heads=0, expected a positive integer"),
        ("paged:heads=2147483648", "has heads=2147483648, expected a positive integer below 2^31"),
        ("paged:block=99999999999999999999", "has block=99999999999999999999, expected a positive integer below 10^18"),
        ("paged:tokens=0", "has tokens=0, expected a positive integer"),
        ("paged:lens=1+-2", "has lens=1+-2, expected an integer from 0"),
        ("paged:lens=2147483648", "has lens=2147483648, expected at most 1000000 integers below 2^31"),
        ("paged:lens=1x1000001", "has lens=1x1000001, expected at most 1000000 integers below 2^31"),
        ("paged:lens=7x0+", "has lens=7x0+, expected an integer"),
        ("paged:lens=1x", "has lens=1x, expected an integer"),
        ("paged:lens=1 2", "has lens=1 2, expected an integer"),
        ("paged:scale=nan", "has scale=nan, expected a positive finite number"),
        ("paged:scale=0", "has scale=0, expected a positive finite number"),
        ("paged:scale=-1", "has scale=-1, expected a positive finite number"),
        ("paged:scale=inf", "has scale=inf, expected a positive finite number"),
        ("paged:scale=half", "has scale=half, expected a number"),
        ("rope:base=0", "has base=0, expected a positive finite number"),
        ("paged:causal=yes", "has causal=yes, expected true or false"),
        ("paged:dtype=e5m2", "has dtype=e5m2, expected f32 or f16 or bf16 or e4m3"),
        ("naive:dtype=e4m3", "has dtype=e4m3, expected f32 or f16 or bf16"),
        ("paged:inputs=xorshift", "has inputs=xorshift, expected normal or peaked or flat"),
        ("naive:inputs=lcg", "has inputs=lcg, expected normal or xorshift"),
        ("paged:pages=random", "has pages=random, expected shuffled or descending or huge"),
        ("paged:lse_base=10", "has lse_base=10, expected e or 2"),
        ("paged:seed=1\n2", "has an unprintable character"),
        ("rope:angles=\x00", "has an unprintable character"),
    ],
)
def test_a_bad_id_is_one_line_that_says_what_is_wrong(text, reason):
    with pytest.raises(InputError) as error:
        parse_id(text)
    assert str(error.value).startswith(f"case id {text!r} {reason}") and str(error.value).isprintable()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("paged:geometry=gpt", "geometry is 'gpt', expected"),
        ("paged:row=8,value=4,scale=1", "has neither heads nor geometry, expected one of them"),
        ("paged:heads=1,row=8,value=4", "has neither scale nor geometry, expected one of them"),
        ("paged:heads=1,row=8,value=9,scale=1", "has value=9, expected at most row=8"),
        ("naive:heads=1,nope=2,rope=2,value=2", "has neither rank nor geometry, expected one of them"),
        ("naive:geometry=glm-5.2,queries=3,cached=2", "has queries=3, expected at most cached=2"),
        ("rope:rope=8", "has no pairing, expected it or a geometry that has one"),
        ("rope:geometry=glm-5.3-flash", "has no base, expected it or a geometry that has one"),
        (
            "paged:geometry=glm-5.2,lens=2147483647x1000000",
            f"is too large to generate, expected at most {MAX_BYTES} bytes",
        ),
        (
            "paged:heads=1,row=2,value=1,scale=1,lens=1,block=2147483647,pages=descending",
            "a tensor of [4, 2147483647, 2] f32",
        ),
        ("paged:heads=1,row=1,value=1,scale=1,block=1,lens=99999x9999", "expected fewer than 2^28 entries"),
        ("append:rank=1,rope=0,blocks=2147483647,block=2147483647", "is too large to generate"),
        ("naive:geometry=glm-5.2,cached=2147483647", "is too large to generate"),
        ("merge:states=2147483647,rows=2147483647", "is too large to generate"),
        ("naive:heads=1,nope=1,rope=18446744073709551615,value=1,rank=1", "is too large to generate"),
    ],
)
def test_a_case_that_cannot_be_made_is_one_line_before_memory_is_taken(text, reason):
    with pytest.raises(InputError) as error:
        generate(text)
    assert reason in str(error.value) and str(error.value).isprintable()


@settings(deadline=None, max_examples=300, derandomize=True)
@given(st.sampled_from(sorted(RECIPES)), st.text(st.sampled_from("=,+x-.0123456789nefabilts:geometry_\n")))
def test_no_text_makes_the_parser_raise_anything_else(kind, text):
    try:
        parse_id(f"{kind}:{text}")
    except InputError as error:
        assert str(error).isprintable()


@pytest.mark.parametrize(
    "recipe",
    [
        PagedRecipe(heads=1, row=4, value=2, scale=1.0, lens=(-1,)),
        PagedRecipe(heads=1, row=4, value=2, scale=math.nan),
        PagedRecipe(heads=1, row=4, value=2, scale=1.0, inputs="uniform"),
        NaiveRecipe(geometry="glm-5.2", dtype="e4m3"),
        MergeRecipe(states=0),
        "paged",
        7,
    ],
)
def test_a_recipe_made_by_hand_is_checked_like_an_id(recipe):
    with pytest.raises(InputError):
        generate(recipe)
