# SPDX-License-Identifier: Apache-2.0
"""The lightning indexer: its choice, ties, pools, Hadamard, fp8, and that a choice of everything is dense attention."""

import numpy as np
import pytest
from engine import GLM, INDEXED, POOLED, random_states, random_weights

from mla_oracle import InputError
from mla_oracle.layer import LayerConfig, check_weights, run
from mla_oracle.layer.indexer import choose, fp8, hadamard, pool_keys, score
from mla_oracle.layer.state import prepare

INF = np.inf


def layer(config, **how):
    read = LayerConfig.from_hf_config(config, **how)
    return read, check_weights({k.removesuffix(".weight"): w for k, w in random_weights(config).items()}, read)


def inputs(config, tokens=9):
    return {"hidden_states": random_states(config, tokens), "positions": np.arange(tokens)}


@pytest.mark.parametrize("backend", ["strict", "fast"])
@pytest.mark.parametrize("form", ["naive", "absorbed"])
@pytest.mark.parametrize("precision", ["f32", "f64"])
@pytest.mark.parametrize("config", [INDEXED, GLM], ids=lambda c: c["model_type"])
def test_up_to_top_k_tokens_give_dense_attention_bit_for_bit(config, precision, form, backend):
    dense = {**config, "model_type": "deepseek_v3"}
    how = {"precision": precision, "form": form, "backend": backend}
    weights = check_weights(
        {k.removesuffix(".weight"): w for k, w in random_weights(config).items() if "indexer" not in k},
        LayerConfig.from_hf_config(dense),
    )
    expected = run(LayerConfig.from_hf_config(dense), weights, inputs(config), **how)
    for topk in (9, 100):
        found = run(*layer({**config, "index_topk": topk}), inputs(config), **how)
        np.testing.assert_array_equal(found["attn"], expected["attn"])
        np.testing.assert_array_equal(found["out"], expected["out"])
    fewer = run(*layer(config), inputs(config), **how)  # top-k is 4
    np.testing.assert_array_equal(fewer["attn"][:4], expected["attn"][:4])
    assert np.all(np.any(fewer["attn"][4:] != expected["attn"][4:], axis=(1, 2)))


def test_rows_that_chose_some_tokens_attend_to_them_alone():
    read, weights = layer(INDEXED)
    found = run(read, weights, inputs(INDEXED))
    topk = found["topk"]
    assert topk.shape == (9, 4)
    for t in range(9):
        chosen = topk[t][topk[t] >= 0]
        assert len(chosen) == min(t + 1, 4) and np.all(np.diff(chosen) > 0)
        np.testing.assert_array_equal(np.flatnonzero(np.isfinite(found["scores"][t, 0])), chosen)
        p = np.exp(found["scores"][t][:, chosen])
        p /= p.sum(-1, keepdims=True)
        np.testing.assert_allclose(found["attn"][t], np.einsum("hn,nhv->hv", p, found["v"][chosen]), rtol=1e-12)


def test_of_equal_scores_the_lowest_positions_are_chosen():
    indexer = LayerConfig.from_hf_config(INDEXED).indexer
    scores = np.array([[1, 1, 1, 1, 1, 1, -INF], [0, 2, 1, 2, 1, 1, 1], [-INF] * 6 + [3]])
    seen = scores > -INF
    np.testing.assert_array_equal(choose(indexer, scores, seen), [[0, 1, 2, 3], [1, 2, 3, 4], [6, -1, -1, -1]])


def test_scores_are_weighted_sums_of_positive_products():
    indexer = LayerConfig.from_hf_config(INDEXED).indexer
    q = np.zeros((1, 4, 16))
    q[0, :, 0] = [1, -1, 2, 0]
    keys = np.zeros((2, 16))
    keys[:, 0] = [4, -4]
    weights = np.array([[1.0, 10.0, -0.5, 100.0]])
    found = score(indexer, q, keys, weights, np.array([[True, True]]))
    np.testing.assert_allclose(found, [[(4 - 0.5 * 8) / 4, 10 * 4 / 4]])
    assert score(indexer, q, keys, weights, np.array([[False, True]]))[0, 0] == -INF


def test_hadamard_is_sylvesters_matrix_and_leaves_products_alone():
    matrix = np.array([[1.0]])
    for _ in range(4):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((2, 5, 16))
    np.testing.assert_allclose(hadamard(x), x @ matrix / 4, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(hadamard(hadamard(x)), x, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(hadamard(x) @ hadamard(y).T, x @ y.T, rtol=1e-12, atol=1e-14)


def test_hadamard_changes_no_choice():
    plain = run(*layer(INDEXED), inputs(INDEXED))
    turned = run(*layer(INDEXED, index_hadamard=True), inputs(INDEXED))
    np.testing.assert_array_equal(plain["topk"], turned["topk"])
    np.testing.assert_allclose(plain["index_scores"][8], turned["index_scores"][8], rtol=1e-12)
    assert np.abs(plain["index_q"] - turned["index_q"]).max() > 0.5


def test_fp8_rows_are_e4m3_times_a_power_of_two():
    row = np.zeros((1, 8))
    row[0, :5] = [448, 300, 1.0, -17, 3 * 2.0**-9]  # scale 1: the last is a multiple of the smallest e4m3
    np.testing.assert_array_equal(fp8(row)[0, :5], [448, 288, 1, -16, 3 * 2.0**-9])
    np.testing.assert_array_equal(fp8(row * 1.01)[0, 0], 448.0)  # 452.48 / 448 rounds up to 2: 226.24 -> 224
    np.testing.assert_array_equal(fp8(row * 2**-20), fp8(row) * 2**-20)
    tiny = np.full((1, 8), 1e-6)
    scale = 2.0**-22  # 1e-4 / 448 rounded up
    np.testing.assert_array_equal(fp8(tiny), np.round(1e-6 / scale / 2.0**-1) * 2.0**-1 * scale)


def test_fp8_scores_are_near_those_of_f32():
    exact = run(*layer(INDEXED), inputs(INDEXED))["index_scores"][8]
    rounded = run(*layer(INDEXED, index_scores="fp8"), inputs(INDEXED))["index_scores"][8]
    assert 0 < np.abs(rounded - exact).max() < 0.15 * np.abs(exact).max()


def test_a_pool_with_a_flat_gate_is_the_mean_of_its_keys():
    keys = np.arange(14.0).reshape(7, 2)
    np.testing.assert_allclose(pool_keys(keys, np.zeros((7, 2)), np.zeros((3, 2))), [[2, 3], [8, 9]])
    gate = np.zeros((7, 2))
    gate[1] = 50  # takes the whole weight of its pool
    np.testing.assert_allclose(pool_keys(keys, gate, np.zeros((3, 2)))[0], keys[1])
    ape = np.array([[0.0, 0], [0, 0], [50, 50]])
    np.testing.assert_allclose(pool_keys(keys, np.zeros((7, 2)), ape), keys[[2, 5]])


def test_pools_are_chosen_whole_and_the_tail_beside_them():
    indexer = LayerConfig.from_hf_config({**POOLED, "index_kpool": 2}).indexer  # top-k 4: two pools
    scores = np.array([[1.0, 3, 2, -INF], [5.0, 1, 5, 5], [-INF] * 4])
    seen = np.array([[True] * 7 + [False], [True] * 8, [True] + [False] * 7])
    expected = [[2, 3, 4, 5, 6], [0, 1, 4, 5, -1], [0, -1, -1, -1, -1]]
    np.testing.assert_array_equal(choose(indexer, scores, seen), expected)


def test_pool_size_is_a_convention():
    weights = random_weights({**POOLED, "index_kpool": 4})
    read = LayerConfig.from_hf_config(POOLED, index_kpool=4)
    found = run(read, check_weights({k.removesuffix(".weight"): w for k, w in weights.items()}, read), inputs(POOLED))
    assert found["index_keys"].shape == (2, 16)


@pytest.mark.parametrize(("pairing", "config"), [("interleaved", INDEXED), ("neox", GLM)])
def test_the_other_pairing_is_a_convention_and_chooses_otherwise(pairing, config):
    far = inputs(config) | {"positions": np.arange(9) * 50}
    own, other = run(*layer(config), far), run(*layer(config, index_rope=pairing), far)
    np.testing.assert_array_equal(own["topk"][:4], other["topk"][:4])
    assert np.any(own["topk"] != other["topk"])


def test_a_shared_layer_takes_the_choice_it_is_given():
    config = {**GLM, "indexer_types": ["full", "shared"]}
    full = run(*layer(config), inputs(config))
    read = LayerConfig.from_hf_config(config, layer=1)
    weights = {k.removesuffix(".weight"): w for k, w in random_weights(config).items() if "indexer" not in k}
    checked = check_weights(weights, read)
    shared = run(read, checked, inputs(config) | {"topk": full["topk"]})
    np.testing.assert_array_equal(shared["out"], full["out"])
    assert "index_q" not in shared
    with pytest.raises(InputError, match=r"topk is missing, expected \[T, k\]"):
        run(read, checked, inputs(config))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([0, 5], "topk[1, 1] is 5, expected -1 or a token below 2"),
        ([-2, 0], "topk[1, 0] is -2, expected -1 or a token below 2"),
        ([1, 1], "topk[1] has 2 tokens, expected distinct ones, 1 or more"),
        ([-1, -1], "topk[1] has 0 tokens, expected distinct ones, 1 or more"),
    ],
)
def test_a_choice_that_is_none_is_told(row, said):
    config = {**GLM, "indexer_types": ["full", "shared"]}
    read = LayerConfig.from_hf_config(config, layer=1)
    weights = {k.removesuffix(".weight"): w for k, w in random_weights(config).items() if "indexer" not in k}
    topk = np.array([[0, -1], row, [0, 1]])
    with pytest.raises(InputError) as caught:
        prepare(read, check_weights(weights, read), inputs(config, 3) | {"topk": topk})
    assert str(caught.value) == said


def test_shared_layers_follow_the_frequency_the_pattern_or_the_list():
    def kinds(**keys):
        config = {**GLM, "num_hidden_layers": 8, **keys}
        return "".join("FS"[LayerConfig.from_hf_config(config, layer=i).indexer.shared] for i in range(8))

    assert kinds() == "FFFFFFFF"
    assert kinds(index_topk_freq=4, index_skip_topk_offset=3) == "FFFSSSFS"
    assert kinds(index_topk_pattern="FSSFSSFS") == "FSSFSSFS"
    assert kinds(indexer_types=["full", "shared"] * 4, index_topk_pattern="FFFFFFFF") == "FSFSFSFS"
