# SPDX-License-Identifier: Apache-2.0
"""What a layer case means, in words: the steps of the layer in order, with what its config and its metadata settle."""

from __future__ import annotations

from .. import formats
from .case_file import LayerCase
from .config import Indexer, LayerConfig
from .sequences import sequences
from .stages import stages_of

ANGLES = {
    "any": "in f32 in whatever way: what any mode rounds is allowed for, and sines of angles reduced in f32",
    "recurrence": "each is the one before it times base^(-2/R)",
    "power": "position * (base^(-2/R))^j",
    "closed": "position * base^(-2j/R)",
    "table": "position * base^(-2j/R), cosines and sines computed in f64",
}


def meaning(case: LayerCase) -> list[str]:
    """The conventions of a layer case as sentences."""
    config = case.config
    return [
        *_projections(config),
        *_rope(case),
        *_indexer(config.indexer),
        *_attention(config),
        *_pages(case),
        *_tokens(case),
        *_judgement(case),
    ]


def _projections(config: LayerConfig) -> list[str]:
    g = config.geometry
    q = "q_proj" if g.q_lora_rank is None else f"q_b_proj, RMSNorm and q_a_proj (rank {g.q_lora_rank})"
    sentences = [
        f"q = {q} of hidden states of {g.hidden_size}: {g.num_heads} heads of {g.qk_nope_head_dim}, not rotated, and"
        f" {g.qk_rope_head_dim}",
        f"a cached row = RMSNorm of {g.kv_lora_rank} elements of kv_a_proj_with_mqa, and {g.qk_rope_head_dim} others",
        f"norms: x / sqrt(mean x^2 + {config.norm_eps:g}) weight, in f32",
    ]
    if config.attention_bias:
        sentences.append("attention_bias: q_a_proj (where there is one), kv_a_proj_with_mqa and o_proj add one")
    for what, factor in (("q", g.mla_scale_q_lora), ("c_kv", g.mla_scale_kv_lora)):
        if factor != 1:
            sentences.append(f"{what} is multiplied by {factor!r}, sqrt(hidden_size / rank)")
    if g.llama_4_scaling_beta and g.yarn is not None:
        context = g.yarn.original_max_position_embeddings
        beta = f"{g.llama_4_scaling_beta:g}"
        sentences.append(f"q at position p is multiplied by 1 + {beta} ln(1 + floor(p / {context}))")
    return sentences


def _rope(case: LayerCase) -> list[str]:
    config = case.config
    g = config.geometry
    if not config.rotates:
        return ["rope: nothing is rotated"]
    R = g.qk_rope_head_dim
    pairs = "(2j, 2j + 1)" if g.rope_interleave else f"(j, j + {R // 2})"
    base = config.longrope.base if config.longrope is not None else g.rope_theta
    sentences = [f"rope: pairs {pairs} of {R} elements, base {base:g}", f"angles: {ANGLES[case.angles]}"]
    if config.longrope is not None:
        table = config.longrope
        sentences.append(
            f"LongRoPE: angles over its factors, the long ones where the last position + 1 exceeds"
            f" {table.original_max_position_embeddings}; cosines and sines times {table.amplitude!r}"
        )
    if g.yarn is not None:
        y = g.yarn
        sentences.append(
            f"YaRN: factor {y.factor:g} over {y.original_max_position_embeddings} tokens, beta_fast {y.beta_fast:g},"
            f" beta_slow {y.beta_slow:g}, mscale {y.mscale:g}, mscale_all_dim {y.mscale_all_dim:g}"
        )
    if g.rope_interleave:
        layout = case.how.get("rope_layout")
        stored = {
            None: "as the first of them in the dump is",
            "interleaved": "where they are",
            "neox": "parted, the even elements and then the odd",
        }[layout]
        sentences.append(f"rotated pairs are stored {stored}")
    return sentences


def _indexer(indexer: Indexer | None) -> list[str]:
    if indexer is None:
        return []
    if indexer.shared:
        return ["indexer: none of its own, the tokens of topk are attended to"]
    pairing = "nothing rotated" if indexer.pairing is None else f"rotated in {indexer.pairing} pairs"
    turned = ", times the Hadamard matrix" if indexer.hadamard else ""
    sentences = [
        f"indexer: {indexer.num_heads} heads of {indexer.head_dim}, {pairing}{turned}, scores in {indexer.scores}",
        "index score = sum over heads of weight relu(q . k / sqrt(d)); of equal scores the lowest positions are chosen",
    ]
    if indexer.kpool is None:
        return [*sentences, f"a query attends to the {indexer.topk} best of the tokens it sees, or to fewer"]
    pools = f"the {indexer.topk // indexer.kpool} best pools of {indexer.kpool} tokens"
    return [*sentences, f"a query attends to {pools} and to the tokens after its last whole pool"]


def _attention(config: LayerConfig) -> list[str]:
    g = config.geometry
    mscale = f" * {g.softmax_mscale!r}^2, YaRN's" if g.softmax_mscale != 1 else ""
    return [
        f"score = (q_nope . k_nope + q_pe . k_pe) * {g.softmax_scale!r}: 1/sqrt({g.qk_head_dim}){mscale}",
        f"out = o_proj of {g.num_heads} heads of {g.v_head_dim}",
    ]


def _pages(case: LayerCase) -> list[str]:
    store = case.store
    if store is None:
        return []
    how = f"in {store.dtype}"
    if store.format is not None:
        form = formats.get(store.format)
        how = f"as {store.format} by {form.writer_of(store.writer)}, read by {form.reader_of(store.reader)}"
    return [
        f"cached rows are written by slot_mapping into pages of {store.block_size}, {how}",
        "attention: the paged decode of absorbed queries over the rows that block_table says",
    ]


def _tokens(case: LayerCase) -> list[str]:
    every = sequences(case.config, case.weights, case.inputs, **case.work)
    said = []
    for s in every:
        cached, who = s.sizes.rows - s.sizes.tokens, f"sequence {s.number}: " if s.among > 1 else ""
        said.append(f"{who}{cached} rows were cached before; query t of {s.sizes.tokens} sees rows 0 to {cached} + t")
    if len(every) > 1:
        said.append("columns of scores, and tokens chosen, are those of the query's own sequence")
    return said


def _judgement(case: LayerCase) -> list[str]:
    held = case.how.get("held")
    return [
        f"stages, in order: {', '.join(stages_of(case.config))}",
        f"what is not dumped is held in {held or 'the coarsest dtype of what is'}",
        f"lse is in base {case.how.get('lse_base', 'e')}",
    ]
