# SPDX-License-Identifier: Apache-2.0
"""The kernels behind the public functions and the command line."""

import json
import subprocess
import sys

import kernel_cases
import numpy as np
import pytest
from kernel_cases import BACKENDS
from problems import dense, paged

import mla_oracle
from mla_oracle import InputError, MissingError, UnsupportedError, Yarn, backends, cli, dtypes, expected, generate, rope
from mla_oracle.cases import placement


@pytest.fixture(params=BACKENDS)
def backend(request):
    for _ in kernel_cases.machine(request.param):
        yield request.param


def assert_close(got, truth):
    np.testing.assert_allclose(got, truth, rtol=1e-5, atol=1e-5)


# --- the public functions


@pytest.mark.parametrize("T", [None, 2])
def test_decode_paged(backend, T):
    problem = paged(3, [5, 0, 40], T=T, H=3, dtype="bf16")
    how = {"lse_base": "2", "empty_lse": np.inf, "causal": False}
    got = mla_oracle.decode_paged(**problem, **how, backend=backend)
    truth = mla_oracle.decode_paged(**problem, **how, precision="f64")
    assert got.out.dtype == got.lse.dtype == np.float32
    assert_close(got.out, truth.out)
    assert_close(got.lse, truth.lse)
    rounded = mla_oracle.decode_paged(**problem, **how, backend=backend, out_dtype="bf16")
    assert rounded.out.dtype == problem["q"].dtype


def test_decode_paged_of_a_cache_larger_than_any_memory(backend):
    case = generate("paged:heads=2,row=20,value=16,scale=0.2,lens=5+0+40,block=16,pages=huge")
    cache = placement.sparse_cache(case)
    assert cache.nbytes > 2**34
    how = {"softmax_scale": 0.2, "head_dim_v": 16}
    got = mla_oracle.decode_paged(case.q, cache, case.block_table, case.seq_lens, **how, backend=backend)
    truth = mla_oracle.decode_paged(case.q, cache, case.block_table, case.seq_lens, **how, precision="f64")
    assert_close(got.out, truth.out)
    assert_close(got.lse, truth.lse)


def test_decode_paged_of_nothing(backend):
    problem = paged(3, [5, 7], T=2)
    none = mla_oracle.decode_paged(
        **problem | {name: problem[name][:0] for name in ("q", "block_table", "seq_lens")}, backend=backend
    )
    assert none.out.shape == (0, 2, 2, 4) and none.lse.shape == (0, 2, 2)
    empty = paged(3, [0, 0], T=2)
    assert (mla_oracle.decode_paged(**empty | {"kv_cache": empty["kv_cache"][:0]}, backend=backend).out == 0).all()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("attend", [mla_oracle.attend_naive, mla_oracle.attend_absorbed])
def test_dense_forms(backend, attend, dtype):
    problem = dense(3, t_q=2, t_kv=40, dtype=dtype)
    assert_close(attend(**problem, backend=backend), attend(**problem, precision="f64"))
    none = problem | {name: problem[name][:0] for name in ("q_nope", "q_pe")}
    assert attend(**none, backend=backend).shape == (0, 2, 4)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_the_two_ends_of_the_absorbed_form(backend, dtype):
    problem = dense(3, dtype=dtype)
    ends = problem["q_nope"], problem["w_uk"]
    assert_close(mla_oracle.absorb_query(*ends, backend=backend), mla_oracle.absorb_query(*ends, precision="f64"))
    ends = problem["c_kv"][:2, None].repeat(2, axis=1), problem["w_uv"]
    assert_close(mla_oracle.up_project(*ends, backend=backend), mla_oracle.up_project(*ends, precision="f64"))


@pytest.mark.parametrize("angles", rope.ANGLES)
@pytest.mark.parametrize("rotate", [mla_oracle.rope_interleaved, mla_oracle.rope_neox])
def test_rope(backend, rotate, angles):
    x = np.random.default_rng(0).standard_normal((3, 2, 12)).astype(np.float16)
    yarn = Yarn(factor=4, original_max_position_embeddings=64)
    for rows, n in ((x, None), (x[:, 0], 8)):
        how = {"base": 1e4, "rotary_dim": n, "angles": angles, "yarn": yarn}
        positions = np.array([0, 3, 77])
        got = rotate(rows, positions, **how, backend=backend)
        assert got.dtype == np.float32
        assert_close(got, rotate(rows, positions, **how, precision="f64"))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_append_and_merge(backend, dtype):
    rng = np.random.default_rng(0)
    number = dtypes.dtype(dtype)
    rows = rng.standard_normal((3, 6)).astype(number)
    caches = [np.full((3, 2, 4, 6), 7, number)[:, 1] for _ in range(2)]
    for cache, name in zip(caches, ("strict", backend), strict=True):
        mla_oracle.append_kv(cache, rows[:, :4], rows[:, 4:], np.array([5, -1, 11]), backend=name)
    assert caches[0].tobytes() == caches[1].tobytes() and (caches[1][1, 1] == rows[0]).all()

    states = rng.standard_normal((3, 2, 5, 4)).astype(number), rng.standard_normal((3, 2, 5)).astype(number)
    got = mla_oracle.merge_states(*states, lse_base="2", backend=backend)
    truth = mla_oracle.merge_states(*states, lse_base="2", precision="f64")
    assert_close(got.out, truth.out)
    assert_close(got.lse, truth.lse)


@pytest.mark.parametrize(
    "case_id",
    [
        "paged:heads=2,row=20,value=16,scale=0.2,lens=5+0+40,block=16,shards=2",
        "naive:heads=2,nope=8,rope=4,value=8,rank=16,queries=2,cached=33",
        "absorbed:heads=2,nope=8,rope=4,value=8,rank=16,queries=2,cached=33,dtype=bf16",
        "merge:states=3,rows=2",
        "rope:geometry=glm-5.2,heads=2,positions=0+3+77",
        "append:rank=16,rope=4,blocks=3,block=4",
    ],
)
def test_expected_of_a_case(backend, case_id):
    case = generate(case_id)
    truth = expected(case)
    for name, got in expected(case, precision="f32", backend=backend).items():
        assert_close(got, truth[name])


def test_the_command_line(backend, capsys, tmp_path):
    case = "paged:heads=2,row=20,value=16,scale=0.2,lens=5+40,block=16"
    assert cli.main(["run", case, "-o", str(tmp_path / "r"), "--backend", backend, "--precision", "f32"]) == 0
    assert json.loads(capsys.readouterr().out)["backend"] == backend
    assert cli.main(["check", case, str(tmp_path / "r")]) == 0
    capsys.readouterr()
    assert cli.main(["run", case, "--backend", backend]) == 0
    assert json.loads(capsys.readouterr().out)["precision"] == "f32"
    assert cli.main(["run", case, "--backend", backend, "--precision", "f64"]) == 3
    assert "precision is 'f64'" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_the_command_line_says_which_kernel_ran_and_takes_one_by_name(backend, capsys):
    def run(case, *kernel):
        code = cli.main(["run", case, "--backend", backend, "--precision", "f32", *kernel])
        answer = json.loads(capsys.readouterr().out)
        return code, answer["kernel"] if code == 0 else answer["error"]["message"]

    case = "paged:heads=2,row=32,value=16,scale=0.2,lens=5+40,block=16"
    assert run(f"{case},dtype=bf16") == (0, "paged_mma_bf16")
    assert run(f"{case},dtype=bf16", "--kernel", "scalar") == (0, "paged_decode_bf16")
    assert run(case) == (0, "paged_decode_f32")
    assert run("rope:geometry=glm-5.2") == (0, None)
    code, message = run(case, "--kernel", "mma")
    assert code == 3 and message.startswith("kernel 'mma' does not take this problem: q is f32 and kv_cache f32")
    assert run(case, "--kernel", "fast") == (2, "kernel is 'fast', expected scalar or mma or wgmma")
    assert run("rope:geometry=glm-5.2", "--kernel", "mma")[0] == 2


def test_the_command_line_runs_the_absorbed_form_on_tensor_cores_end_to_end(backend, capsys, tmp_path):
    def run(case, *more):
        code = cli.main(["run", case, "--backend", backend, *more])
        answer = json.loads(capsys.readouterr().out)
        return code, answer["kernel"] if code == 0 else answer["error"]["message"]

    sizes = "heads=2,nope=24,rope=16,value=8,rank=32,queries=2,cached=33"
    case = f"absorbed:{sizes},dtype=bf16"
    assert run(case, "-o", str(tmp_path / "r")) == (0, "absorbed_mma_bf16")
    assert cli.main(["check", case, str(tmp_path / "r")]) == 0
    capsys.readouterr()
    assert run(f"absorbed:{sizes},dtype=f16", "--kernel", "mma") == (0, "absorbed_mma_f16")
    assert run(case, "--kernel", "scalar") == (0, "absorbed_attend_bf16")
    assert run(f"absorbed:{sizes}") == (0, "absorbed_attend_f32")
    code, message = run(f"absorbed:{sizes}", "--kernel", "mma")
    assert code == 3 and message.startswith("kernel 'mma' does not take this problem: q_nope is f32")
    assert run(case, "--kernel", "wgmma")[0] == 3 and run(case, "--kernel", "fast")[0] == 2
    assert run(f"naive:{sizes}") == (0, None)
    assert run(f"naive:{sizes}", "--kernel", "mma") == (2, "kernel is 'mma', expected None for a naive case")


def test_the_command_line_runs_the_kernel_of_hopper_where_it_takes_the_problem(backend, capsys):
    if backend == "cuda" and backends.machine(backend).arch != "sm_90a":
        pytest.skip("the device is not of compute capability 9.0")
    case = "paged:heads=2,row=192,value=128,scale=0.2,lens=5+140,block=16"
    assert cli.main(["run", f"{case},dtype=bf16", "--backend", backend, "--kernel", "wgmma"]) == 0
    assert json.loads(capsys.readouterr().out)["kernel"] == "paged_wgmma_bf16"
    assert cli.main(["run", case, "--backend", backend, "--kernel", "wgmma"]) == 3
    message = json.loads(capsys.readouterr().out)["error"]["message"]
    assert message.startswith("kernel 'wgmma' does not take this problem: q is f32 and kv_cache f32")


@pytest.mark.parametrize("other", ["auto", "strict", "fast"])
def test_a_kernel_is_of_cuda_and_ptx_alone(other):
    with pytest.raises(InputError, match=f"^kernel is 'mma', expected None with backend '{other}'$"):
        mla_oracle.decode_paged(**paged(3, [5]), backend=other, kernel="mma")


# --- who is asked, and when


def test_auto_never_takes_cuda_or_ptx():
    assert {backends.choose("auto", size) for size in (0, 1 << 30, 1 << 62)} == {"strict", "fast"}
    assert backends.choose_kernels("auto") is None


def test_nothing_of_cuda_is_imported_until_it_is_asked_for():
    program = """
import sys, numpy as np, mla_oracle
mla_oracle.merge_states(np.ones((1, 1, 1), "f4"), np.ones((1, 1), "f4"))
from mla_oracle import oracle, cli, dense, paged, rope, append, backends
gpu = ("cuda", "mla_oracle.gpu", "mla_oracle.ptx")
print([name for name in sys.modules if any(name == x or name.startswith(x + ".") for x in gpu)])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", BACKENDS)
def test_f64_and_an_isa_are_refused(name):
    problem = paged(3, [5])
    with pytest.raises(UnsupportedError, match=f"precision is 'f64', backend '{name}' computes in f32"):
        mla_oracle.decode_paged(**problem, backend=name, precision="f64")
    with pytest.raises(InputError, match=f"isa is 'v2', expected None with backend '{name}'"):
        mla_oracle.decode_paged(**problem, backend=name, isa="v2")


def test_a_form_without_a_fast_tier_refuses_fast():
    with pytest.raises(InputError, match="backend is 'fast', expected auto or strict or cuda or ptx"):
        mla_oracle.merge_states(np.ones((1, 1, 1), "f4"), np.ones((1, 1), "f4"), backend="fast")


@pytest.mark.skipif(kernel_cases.missing("cuda") is None, reason="a CUDA device is here")
def test_cuda_without_a_device_is_missing(capsys):
    with pytest.raises(MissingError):
        mla_oracle.decode_paged(**paged(3, [5]), backend="cuda")
    case = "paged:heads=2,row=20,value=16,scale=0.2,lens=5"
    assert cli.main(["run", case, "--backend", "cuda", "--precision", "f32"]) == 4
    assert json.loads(capsys.readouterr().out)["error"]["code"] == 4
