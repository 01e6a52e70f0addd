# SPDX-License-Identifier: Apache-2.0
"""Bugs planted in the text of the CUDA kernels that give a wrong function: rejected, and named.

A line is what is changed, and the class that comes first. The interpreter computes; tests/ptx has the bugs that are
faults (races, bounds, what was never written). A byte offset beyond 32 bits is not among them: a cache of 4 GiB is
more than the interpreter holds.
"""

import pytest
from buggy import Judged
from planted import other, paged

from mla_oracle.cases.inputs import generate
from mla_oracle.diagnosis import diagnose
from mla_oracle.gpu import paged_mma
from mla_oracle.oracle import expected
from mla_oracle.verdict.compare import check

pytest.importorskip("cuda.bindings", reason="the extra cuda is not installed")

LENS = "lens=150+0+33+5+70,tokens=3,block=16"
ID = f"paged:heads=3,row=48,value=32,{LENS},scale=0.3,unread=numbers"

SCORE = "score[k] = sum * softmax_scale;"
BOUND = "return causal ? seq_lens[b] - T + t + 1 : seq_lens[b];"
RESCALE = "float rescale = m == -INF ? 0 : expf(m - m_new);"
VALUE = "load(kv_cache + key[k] + d)"
LSE = "float sum = m + logf(l);"
MERGED = "sum += rescale * partial_out"
MERGED_SUM = "l += rescale * partial_sum[s];"
OUT = "sum / whole * out_scale;"
USED = "(visible - 1) / keys_of_split(seq_lens[row / T], split_keys) + 1;"
END = "begin + min(keys, visible - begin)"
LAST = "(used > 1 && s == used - 1 ? 2 : 1)"
EXP = ("expf(", "exp2f(", 0)
OF_SPLIT = ("expf(partial_max[s] - m)", "exp2f(partial_max[s] - m)")

# What is changed: (class, (old, new), ...)
SCALAR = {
    "scores 5 % too large": ("uniform temperature", (SCORE, "score[k] = 1.05f * sum * softmax_scale;")),
    "the scale twice": ("uniform temperature", (SCORE, "score[k] = sum * softmax_scale * softmax_scale;")),
    "no scale": ("uniform temperature", (SCORE, "score[k] = sum;")),
    "exp2 of natural scores": ("uniform temperature", EXP, EXP, EXP, EXP),
    "rope columns left out": ("rope not in the score", ("kv_cache + begins, D)", "kv_cache + begins, V)")),
    "scores of half a warp": (
        "elements left out",
        (
            "float sum = warp_sum(lane_dot(query, kv_cache + begins, D));",
            "float sum = lane_dot(query, kv_cache + begins, D);"
            " for (int away = 8; away > 0; away /= 2) sum += __shfl_xor_sync(~0u, sum, away);",
        ),
    ),
    "no causal bound": ("no causal bound", (BOUND, "return seq_lens[b];")),
    "one key too few": ("length off by one", (BOUND, "return causal ? seq_lens[b] - T + t : seq_lens[b];")),
    "one key too many": ("length off by one", (BOUND, "return causal ? seq_lens[b] - T + t + 2 : seq_lens[b];")),
    "top-left causal": ("causal bound", (BOUND, "return causal ? min(seq_lens[b], t + 1) : seq_lens[b];")),
    "the length of request 0": ("length metadata", (BOUND, "return causal ? seq_lens[0] - T + t + 1 : seq_lens[b];")),
    "no tail mask": ("length metadata", ("int n = min(TILE, end - first);", "int n = TILE;")),
    "pad lanes counted": ("pad lanes in denominator", ("? score[lane] : -INF;", "? score[lane] : 0;")),
    "the last key of a tile lost": ("key lost or repeated", ("min(TILE, end - first)", "min(TILE - 1, end - first)")),
    "acc not rescaled": ("missing rescale", ("float sum = acc[d] * rescale;", "float sum = acc[d];")),
    "l not rescaled": ("missing rescale", ("l = l * rescale + warp_sum(p);", "l = l + warp_sum(p);")),
    "neither rescaled": ("missing rescale", (RESCALE, "float rescale = m == -INF ? 0 : 1;")),
    "rescaled in base 2": ("wrong rescale", (RESCALE, "float rescale = m == -INF ? 0 : exp2f(m - m_new);")),
    "rescaled the other way": ("wrong rescale", (RESCALE, "float rescale = m == -INF ? 0 : expf(m_new - m);")),
    "l of half a warp": (
        "wrong normalisation",
        (
            "l = l * rescale + warp_sum(p);",
            "float x = p; for (int away = 8; away > 0; away /= 2) x += __shfl_xor_sync(~0u, x, away);"
            " l = l * rescale + x;",
        ),
    ),
    "V from the end of the row": ("wrong V slice", (VALUE, "load(kv_cache + key[k] + d + D - V)")),
    "V one element on": ("wrong V slice", (VALUE, "load(kv_cache + key[k] + d + 1)")),
    "V of pairs exchanged": ("value rows permuted", (VALUE, "load(kv_cache + key[(k ^ 1) < n ? k ^ 1 : k] + d)")),
    "half of the columns": (
        "columns not computed",
        ("out[state * V + d] = l == 0 ?", "out[state * V + d] = l == 0 || d >= V / 2 ?"),
    ),
    "2 % too small": ("missing V descale", (OUT, "0.98f * sum / whole * out_scale;")),
    "not divided": ("wrong normalisation", (OUT, "sum;")),
    "LSE in base 2": ("LSE base", (LSE, "float sum = (m + logf(l)) * 1.44269504f;")),
    "LSE with its maximum in base 2": ("LSE base", (LSE, "float sum = m * 1.44269504f + logf(l);")),
    "LSE without the maximum": ("LSE value", (LSE, "float sum = logf(l);")),
    "LSE without the log": ("LSE value", (LSE, "float sum = m + l;")),
    "LSE of the next head": (
        "LSE slot",
        ("lse[state] = l", "lse[(long long)row * gridDim.y + (h + 1) % gridDim.y] = l"),
    ),
    "LSE of an empty row 0": ("empty row", ("l == 0 ? empty_lse :", "l == 0 ? 0 :")),
    "equal weights": (
        "equal weights",
        ("sum += rescale * partial_out[(long long)s * V + d];",
         "sum += partial_out[(long long)s * V + d] / partial_sum[s];"),
        (OUT, "sum / used;"),
    ),
    "merged acc not rescaled": ("missing rescale", (MERGED, "sum += partial_out")),
    "merged l not rescaled": ("missing rescale", (MERGED_SUM, "l += partial_sum[s];")),
    "merged in base 2": ("LSE base", (*OF_SPLIT, 0), (*OF_SPLIT, 0)),
    "merged l in base 2": ("wrong rescale", (*OF_SPLIT, 0)),
    "the last split dropped": ("combine coverage", (USED, f"max(1, {USED[:-5]});")),
    "the last split twice": (
        "state merged twice",
        (MERGED_SUM, f"l += {LAST} * rescale * partial_sum[s];"),
        (MERGED, f"sum += {LAST} * rescale * partial_out"),
    ),
    "the first split alone": ("combine coverage", (USED, "1;")),
    "a split's first key lost": ("key lost or repeated", ("begin = split * keys;", "begin = split * keys + 1;")),
    "a split's edge in two": ("key lost or repeated", (END, "begin + min(keys + 1, visible - begin)")),
    "the next table entry": ("table entry", ("+ j / block_size]", "+ j / block_size + 1]")),
    "the next table entry at a page's end": ("table entry", ("+ j / block_size]", "+ (j + 1) / block_size]")),
    "the table not read": (
        "table entry",
        ("int block = block_table[b * table_request + j / block_size];", "int block = j / block_size;"),
    ),
    "the table of request 0": ("table row mapping", ("b * table_request + j", "0 * table_request + j")),
    "half a page twice": ("page-size semantics", ("j % block_size * cache_row", "j % (block_size / 2) * cache_row")),
    "the next row of the page": (
        "page-size semantics",
        ("j % block_size * cache_row", "(j + 1) % block_size * cache_row"),
    ),
    "rows V apart": ("stride ignored", ("j % block_size * cache_row", "j % block_size * V")),
    "pages P V apart": ("stride ignored", ("block * cache_block", "block * (long long)block_size * V")),
    "the next head": ("query row mapping", ("h * q_head", "(h + 1) % gridDim.y * q_head")),
    "head 0 for all": ("query row mapping", ("h * q_head", "0 * q_head")),
    "query token 0 for all": ("query row mapping", ("t * q_token", "0 * q_token")),
    "q read as [H, T]": ("query row mapping", ("t * q_token + h * q_head", "t * q_head + h * q_token")),
    "out stored as [H, T]": (
        "query row mapping",
        ("out[state * V + d] = l", "out[((long long)(row / T * gridDim.y + h) * T + row % T) * V + d] = l"),
    ),
}

S = "s[i][j][e]"
END_MMA = "int last = p.causal ? len - p.T + (group + rows - 1) / p.H + 1 : len;"
COLUMNS = "column / PER_CHUNK + lane / 16));"
NEXT = "find_rows(p, b, begin + KEYS, end, begins);"
TENSOR = {
    "scores 5 % too large": ("uniform temperature", (f"{S} * p.scale", f"{S} * (1.05f * p.scale)")),
    "log2 e left out": ("uniform temperature", ("softmax_scale * LOG2E", "softmax_scale")),
    "maxima left in base 2": ("LSE base", ("m[i][half] / LOG2E;", "m[i][half];")),
    "the last row's bound for all": ("no causal bound", ("key < min(end, visible[i][half])", "key < end")),
    "no mask": ("composition of two", ("key < min(end, visible[i][half])", "true")),
    "no causal bound": (
        "no causal bound",
        ("visible[i][half] = p.causal ? len - p.T + t + 1 : len;", "visible[i][half] = len;"),
        (END_MMA, "int last = len;"),
    ),
    "t of a row as if rows were [H, T]": ("causal bound", ("half + lane / 4) / p.H;", "half + lane / 4) % p.H;")),
    "the bound of the upper rows for the lower": ("causal bound", ("16 * i + 8 * half + lane / 4) / p.H;",
                                                               "16 * i + lane / 4) / p.H;")),
    "rope columns left out": ("rope not in the score", ("< D / PER_CHUNK; chunk += 2", "< V / 8; chunk += 2")),
    "acc not rescaled": ("missing rescale", ("acc[i][c][n][e] *= e < 2 ? upper : lower;", ";")),
    "l not rescaled": ("missing rescale", ("l[i][half] *= rescale;", ";")),
    "l of one warp": ("wrong normalisation", ("w < KEY_WARPS; w++) sum +=", "w < 1; w++) sum +=")),
    "l of half the lanes": ("wrong normalisation", ("sum += __shfl_xor_sync(~0u, sum, 2);", ";")),
    "V a step of columns on": ("wrong V slice", (COLUMNS, "column / PER_CHUNK + 2 + lane / 16));")),
    "V's eights of columns exchanged": ("output permutation", (COLUMNS, "column / PER_CHUNK + 1 - lane / 16));")),
    "weights of pairs exchanged": ("value rows permuted", ("(weight[0], weight[1], S", "(weight[1], weight[0], S")),
    "the first tile twice": ("stale tile", (NEXT, "find_rows(p, b, begin, end, begins);")),
    "a split's last key lost": ("key lost or repeated", ("min(keys, last - begin)", "min(keys - 1, last - begin)")),
    "the table of request 0": ("table row mapping", ("b * p.table_request + j /", "0 * p.table_request + j /")),
    "the table entry before": ("table entry", ("j / p.block_size];", "max(j / p.block_size - 1, 0)];")),
    "q read as [H, T]": (
        "query row mapping",
        ("r / p.H * p.q_token + r % p.H * p.q_head", "r % p.T * p.q_token + r / p.T * p.q_head"),
    ),
    "the next head": ("query row mapping", ("r % p.H * p.q_head", "(r + 1) % p.H * p.q_head")),
}

DENSE = "heads=3,nope=16,rope=8,value=16,rank=32,queries=3,cached=70"
FORMS = {
    "naive": (f"naive:{DENSE}", "naive.cu", {
        "no causal bound": ("no causal bound", ("t_kv - gridDim.x + i + 1;", "t_kv;")),
        "rope unscaled": ("scale of one part", (
            "sum = warp_sum(sum);",
            "sum = warp_sum(lane_dot(query, k_nope + t * P, P)) + warp_sum(lane_dot(query + P, k_pe + t * k_pe_row, R))"
            " / scale;")),
        "rope left out": ("rope not in the score", (" + lane_dot(query + P, k_pe + t * k_pe_row, R)", "")),
        "keys of head 0": ("upstream GEMM", ("k_nope += (long long)h", "k_nope += (long long)0")),
        "values of the next head": ("upstream GEMM", ("v += (long long)h", "v += (long long)((h + 1) % gridDim.y)")),
        "acc not rescaled": ("missing rescale", ("acc[j] * rescale;", "acc[j];")),
    }),
    "absorbed": (f"absorbed:{DENSE}", "absorbed.cu", {
        "w_uk of the next head": ("upstream GEMM", ("w_uk += h *", "w_uk += (h + 1) % gridDim.y *")),
        "w_uv of head 0": ("upstream GEMM", ("w_uv + h * w_uv_head", "w_uv + 0 * w_uv_head")),
        "1/sqrt(576)": ("uniform temperature", ("score[k] = sum * scale;", "score[k] = sum * scale * 0.577f;")),
        "l not rescaled": ("missing rescale", ("l = l * rescale + warp_sum(p);", "l = l + warp_sum(p);")),
        "not divided": ("wrong normalisation", ("acc[l] / total;", "acc[l];")),
    }),
    "merge": ("merge:states=4,rows=5", "merge.cu", {
        "base 2": ("LSE base", ("expf((", "exp2f((", 0), ("expf((", "exp2f((", 0)),
        "outputs in base 2": ("wrong rescale", ("expf((", "exp2f((", 1)),
        "the last state lost": ("combine coverage", *[("s < S; s++)", "s < S - 1; s++)", 0)] * 3),
        "the largest LSE": ("merged LSE", ("m + logf(total) / unit", "m")),
        "log2 of the sum": ("merged LSE", ("m + logf(total) / unit", "m + log2f(total) / unit")),
        "not divided": ("merge weights", ("sum / total;", "sum;")),
    }),
    "rope": ("rope:heads=3,rope=16,pairing=interleaved,base=50000", "rope.cu", {
        "the other pairing": ("rope pairing", ("neox ? j : 2 * j,", "!neox ? j : 2 * j,"),
                              ("neox ? j + pairs :", "!neox ? j + pairs :")),
        "the other way": ("wrong angle", ("- b * sine[j]", "+ b * sine[j]"), ("a * sine[j] +", "-a * sine[j] +")),
        "base 10000": ("wrong base", ("powf(base, -2.0f / n)", "powf(10000.0f, -2.0f / n)")),
        "half the exponent": ("wrong angle", ("powf(base, -2.0f / n)", "powf(base, -1.0f / n)")),
        "the next position": ("position off by one", ("position = positions[t],", "position = positions[t] + 1,")),
        "twice": ("double rotation", ("position = positions[t],", "position = 2 * positions[t],")),
    }),
    "append": ("append:rank=16,rope=4,tokens=21", "append.cu", {
        "the row before": ("writer corruption", ("c_kv[t *", "c_kv[(t + gridDim.x - 1) % gridDim.x *"),
                           ("k_pe[t *", "k_pe[(t + gridDim.x - 1) % gridDim.x *")),
        "rope of row 0": ("writer corruption", ("k_pe[t *", "k_pe[0 *")),
        "rope first": ("writer corruption", ("row[l] = c_kv", "row[R + l] = c_kv"), ("row[L + p] =", "row[p] =")),
        "slot -1 is slot 0": ("writer corruption", ("if (slot < 0) return;", "if (slot < 0) slot = 0;")),
    }),
}  # fmt: skip


class Kernel(Judged):
    """One kernel of paged decode, and a case for it."""

    def __init__(self, dtype, name, arch, file):
        super().__init__(generate(f"{ID},dtype={dtype}"), {"out": "f32", "lse": "f32"})
        self.name, self.arch, self.file = name, arch, file

    def run(self, *changes):
        return paged(self.case, [(self.file, *change) for change in changes], self.name, self.arch)

    def diagnose(self, *changes):
        """The diagnosis of what must be rejected."""
        results = self.run(*changes)
        assert not check(self.case, results, self.truth).passed
        found = super().diagnose(results)
        assert found.facts
        return found


@pytest.fixture(scope="module")
def scalar():
    return Kernel("f32", "scalar", "sm_80", "paged.cu")


@pytest.fixture(scope="module")
def tensor():
    """Of the tile with the fewest rows and keys: a split of it has two tiles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_mma, "TILES", ((16, 32),))
        yield Kernel("bf16", "mma", "sm_86", "paged_mma.cu")


def assert_named(found, family):
    assert found.named, found.summary
    assert found.classes[0].family == family, found.summary


def test_more_than_twenty_are_planted_in_each():
    assert len(SCALAR) > 50 and len(TENSOR) > 20


def test_without_a_bug_they_are_right(scalar, tensor):
    for kernel in (scalar, tensor):
        assert check(kernel.case, kernel.run(), kernel.truth).passed


@pytest.mark.parametrize("bug", SCALAR)
def test_a_bug_in_the_scalar_kernel_is_named(scalar, bug):
    family, *changes = SCALAR[bug]
    assert_named(scalar.diagnose(*changes), family)


@pytest.mark.parametrize("bug", TENSOR)
def test_a_bug_in_the_tensor_core_kernel_is_named(tensor, bug):
    family, *changes = TENSOR[bug]
    assert_named(tensor.diagnose(*changes), family)


@pytest.mark.parametrize(("form", "bug"), [(form, bug) for form in FORMS for bug in FORMS[form][2]])
def test_a_bug_in_another_kernel_is_named(form, bug, monkeypatch):
    case_id, file, bugs = FORMS[form]
    family, *changes = bugs[bug]
    case = generate(case_id)
    results = other(case, [(file, *change) for change in changes], monkeypatch)
    assert not check(case, results, expected(case)).passed
    assert_named(diagnose(case, results[case.results[0]], results.get("lse"), separate=False), family)


NEAREST = {
    "V of the next row of the tile": ("scalar", "value row off by one", ("key[k] + d", "key[(k + 1) % n] + d")),
    "rescale of rows exchanged": ("tensor", "missing rescale", ("e < 2 ? upper : lower", "e < 2 ? lower : upper")),
    "the maximum of one warp": (
        "tensor",
        "missing rescale",
        ("m_new = fmaxf(m_new, shared.of_warp[w][row]);", "m_new = fmaxf(m_new, shared.of_warp[key_warp][row]);"),
    ),
}


@pytest.mark.parametrize("bug", NEAREST)
def test_what_no_class_explains_is_unknown_and_its_nearest_class_is_said(bug, request):
    name, family, *changes = NEAREST[bug]
    found = request.getfixturevalue(name).diagnose(*changes)
    assert not found.named and found.summary.startswith(f"unknown: the nearest, {family}"), found.summary


ROUNDED = "__uint_as_float((__float_as_uint(x) + 0x7fff + (__float_as_uint(x) >> 16 & 1)) & 0xffff0000u)"
HONEST = {
    "no maximum": ("scalar", ("float m_new = fmaxf(m, warp_max(s));", "float m_new = 0;")),
    "the mean for the maximum": ("scalar", ("float m_new = fmaxf(m, warp_max(s));",
                                            "float m_new = m == -INF ? warp_sum(lane < n ? s : 0) / n : m;")),
    "P rounded to bf16 before it is summed": (
        "tensor", ("l[i][half] += weight[e];", f"{{ float x = weight[e]; l[i][half] += weight[e] = {ROUNDED}; }}")),
    "tiles from the last to the first": ("scalar", ("int j = first + k;", "int j = begin + end - 1 - first - k;")),
}  # fmt: skip


@pytest.mark.parametrize("change", HONEST)
def test_a_kernel_that_only_rounds_or_orders_otherwise_is_accepted(change, request):
    name, *changes = HONEST[change]
    kernel = request.getfixturevalue(name)
    verdict = check(kernel.case, kernel.run(*changes), kernel.truth)
    assert verdict.passed, verdict.reason
