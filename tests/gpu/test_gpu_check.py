# SPDX-License-Identifier: Apache-2.0
"""python -m mla_oracle.gpu.check, the interpreter standing in for a GPU: its parts, its ends, what it must notice."""

import json
import os
import re

import ml_dtypes
import numpy as np
import pytest

from mla_oracle.errors import MissingError
from mla_oracle.gpu import driver, nvrtc, sources
from mla_oracle.gpu.arguments import signatures
from mla_oracle.gpu.check import __main__ as command
from mla_oracle.gpu.check import accumulation, barriers, instructions, limits, products, supervisor, table, trials
from mla_oracle.gpu.check.part import Bench
from mla_oracle.gpu.check.report import Report
from mla_oracle.gpu.check.table import INSTRUCTIONS, Instruction
from mla_oracle.ptx import Interpreter

pytest.importorskip("cuda.bindings", reason="the extra cuda is not installed")

GOOD = "def findings(bench):\n    yield {'name': 'sound', 'ok': True}\n"
PLANTED = {
    "good": GOOD,
    "told": "def findings(bench):\n    yield {'name': 'speed', 'ok': None, 'tflops': float('inf')}\n",
    "wrong": "def findings(bench):\n    yield {'name': 'this one', 'ok': False, 'reason': '1, expected 2'}\n",
    "hangs": GOOD
    + """    import os, pathlib, signal, time
    pathlib.Path(__file__).with_name("pid").write_text(str(os.getpid()))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(100)
""",
    "dies": GOOD + "    import os\n    os.abort()\n",
    "faults": GOOD
    + """    from mla_oracle.ptx import Interpreter
    import numpy as np
    machine = Interpreter("sm_90")
    kernel = machine.kernel("check/bench.cu", "bench_fill_f32")
    machine.launch(kernel, (1, 1, 1), (128, 1, 1), 0, machine.empty((5,), np.float32), np.int64(6), np.uint32(0),
                   np.float32(1))
""",
    "prints": "print('a banner')\n" + GOOD,
}


@pytest.fixture
def check(tmp_path, monkeypatch):
    """check(part, ...) runs planted parts by name; returns the exit code and the report."""
    for name, text in PLANTED.items():
        (tmp_path / f"planted_{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(*parts, seconds=60):
        report = tmp_path / "report.json"
        arguments = ["--machine", "ptx", "--report", str(report), "--seconds", str(seconds)]
        code = command.main(arguments, {name: (f"planted_{name}", 1.0) for name in parts})
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
        return code, json.loads(report.read_text())

    return run


def ends(report):
    return {name: (part["status"], len(part["findings"])) for name, part in report["parts"].items()}


# --- the command


def test_exit_code_0_where_all_is_good(check, capsys):
    code, report = check("good", "told")
    assert (code, report["good"], ends(report)) == (0, True, {"good": ("done", 1), "told": ("done", 1)})
    assert report["parts"]["told"]["findings"][0]["tflops"] == "inf"  # JSON has no such number
    assert re.search(r"^good +done +\d+\.\d +1 +0 +0$", capsys.readouterr().out, re.MULTILINE)


def test_exit_code_1_and_the_reason_where_something_differs(check, capsys):
    code, report = check("wrong", "good")
    assert (code, report["good"]) == (1, False)
    assert "differs: this one: 1, expected 2" in capsys.readouterr().out.splitlines()


def test_a_part_that_hangs_is_ended_by_its_budget_and_named(check, tmp_path):
    code, report = check("hangs", "good", seconds=6)
    assert (code, ends(report)) == (1, {"hangs": ("out of time", 1), "good": ("done", 1)})
    assert report["parts"]["hangs"]["note"] == "ended by its budget of 3 s, after sound"
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):  # gone, though it ignores the polite signal
        os.kill(pid, 0)


def test_a_part_that_dies_or_faults_leaves_the_others_results(check):
    code, report = check("dies", "faults", "good")
    assert code == 1
    assert ends(report) == {"dies": ("failed", 1), "faults": ("failed", 1), "good": ("done", 1)}
    assert report["parts"]["dies"]["note"].startswith("signal 6: ")
    note = report["parts"]["faults"]["note"]
    assert note.startswith("exit code 2: Fault: out of bounds") and "cuda/check/bench.cu:" in note


def test_what_a_part_prints_is_no_finding(check):
    assert ends(check("prints")[1]) == {"prints": ("done", 1)}


def test_exit_code_4_where_there_is_no_device(tmp_path, capsys):
    try:
        driver.load()
    except MissingError as error:
        assert command.main(["--report", str(tmp_path / "report.json")]) == 4
        assert capsys.readouterr().err == f"mla_oracle.gpu.check: {error}\n"
        assert list(tmp_path.iterdir()) == []
    else:
        pytest.skip("there is a CUDA device")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "trials,speed"], f"--parts has 'speed', expected some of {','.join(command.PARTS)}"),
        (["--seconds", "0"], "--seconds is 0.0, expected a positive finite number"),
        (["--seconds", "inf"], "--seconds is inf, expected a positive finite number"),
        (["--report", "/nowhere/report.json"], "--report cannot be written: "),
    ],
)
def test_usage(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        command.main(["--machine", "ptx", "--report", str(tmp_path / "report.json"), *arguments])
    assert message in capsys.readouterr().err


def test_the_report_is_whole_after_every_finding(tmp_path):
    path = tmp_path / "report.json"
    report = Report(path, {})
    report.begin("part", 5)
    for index in range(3):
        report.add("part", {"name": str(index), "ok": True})
        assert len(json.loads(path.read_text())["parts"]["part"]["findings"]) == index + 1
    assert not json.loads(path.read_text())["good"]  # it has not come to its end
    report.end("part", "done", 1.0)
    assert json.loads(path.read_text())["good"]


def test_the_parts_on_the_interpreter(tmp_path, capsys):
    code = command.main(["--machine", "ptx", "--report", str(tmp_path / "report.json"), "--seconds", "600"])
    report = json.loads((tmp_path / "report.json").read_text())
    assert (code, report["good"]) == (0, True), capsys.readouterr().out
    found = {name: part["findings"] for name, part in report["parts"].items()}
    assert list(found) == list(command.PARTS)
    assert {finding["ok"] for part in ("compile", "trials") for finding in found[part]} == {True}
    compiled = {finding["name"].split()[2] for finding in found["compile"]}
    assert set(sources.names()) < {*compiled, "for"} and all("registers" in finding for finding in found["compile"])
    assert len(found["trials"]) == len(trials.trials(small=True, arch="sm_90a")) + 4
    assert found["timing"][0]["by"] == "wall clock, interpreted: no speed"
    assert all(finding["microseconds"] > 0 for finding in found["timing"][1:])
    splits = {finding["subject"]: (finding["splits"], finding["split_keys"])
              for finding in found["timing"] if finding.get("subject", "").startswith("paged")}  # fmt: skip
    own, filling = ("decode's own", 512), ("filling", 64)
    assert splits.pop("paged mma bf16 filling") == splits.pop("paged wgmma bf16 filling") == filling
    assert set(splits.values()) == {own} and {"paged mma bf16", "paged wgmma bf16", "paged scalar f32"} < set(splits)
    printed = capsys.readouterr().out.splitlines()
    for instruction in ("mma.m16n8k16.f16", "wgmma.m64n8k16.bf16"):
        assert f"{instruction} order: 1 products are added at once" in printed
    assert len(found["barriers"]) == len(barriers.INSTRUCTIONS)
    assert len(found["products"]) == len(list(products.probes())) + 10
    assert "ex2.approx.f32: 0 ulp at most, 2048 of 2048 as rounded once" in printed
    for kernel in ("mma", "wgmma"):
        for splits in ("", "filling "):
            assert sum(line.startswith(f"paged {kernel} bf16 {splits}B=") for line in printed) == 2


# --- instructions


class Bent(Interpreter):
    """Results as `bend` makes them of an instruction's name and its words."""

    def __init__(self, bend):
        super().__init__("sm_90")
        self.bend = bend

    def launch(self, kernel, *args):
        self.last = kernel.name
        super().launch(kernel, *args)

    def download(self, buffer):
        return self.bend(self.last, super().download(buffer).copy())


def differing(bend, *names):
    """The findings of these instructions on a machine bent so."""
    chosen = [instruction for instruction in INSTRUCTIONS if instruction.name in names]
    machine, reference, found = Bent(bend), Interpreter("sm_90"), {}
    for instruction in chosen:
        words = instruction.operands(np.random.default_rng(0), 2048)
        got, expected = (instructions.run(where, instruction, words) for where in (machine, reference))
        found[instruction.name] = instructions.compare(instruction, words, got, expected)
    return found


def flip(name, words):
    words[1000] ^= 1
    return words


EXACT = ["add_rn_f32", "cvt_rn_bf16x2_f32", "prmt_b32", "shfl_sync_up_b32", "ldmatrix_x4", "cp_async_cg_16"]


@pytest.mark.parametrize("name", EXACT)
def test_one_bit_of_an_exact_instruction_is_a_difference(name):
    assert differing(lambda name, words: words, name)[name]["ok"]
    found = differing(flip, name)[name]
    assert (found["ok"], found["differ"]) == (False, 1)
    word = "0x[0-9a-f]{8}"
    assert re.fullmatch(rf"1 of \d+ differ, first of ({word}(, |: )){{3}}{word}, expected {word}", found["reason"])


def test_the_bits_of_a_nan_are_counted_and_let_pass():
    def other(name, words):
        words[words == 0x7FFFFFFF] = 0x7FC00000
        return words

    found = differing(other, "add_rn_f32")["add_rn_f32"]
    assert found["ok"] and found["other_nan"] > 20 and found["differ"] == 0


def test_approximations_have_a_table_and_differ_beyond_what_the_isa_promises():
    def away(step):
        def bend(name, words):
            normal = (words & 0x7F800000 != 0) & (words & 0x7F800000 != 0x7F800000)
            words[1000:1010] += np.where(normal[1000:1010], step, 0).astype(np.uint32)
            return words

        return bend

    near, far = (differing(away(step), "ex2_approx_f32")["ex2_approx_f32"] for step in (2, 4))
    assert near["ok"] and near["max_ulp"] == 2 and near["ulp"]["2"] > 0 and near["differ"] == near["ulp"]["2"]
    assert not far["ok"] and far["max_ulp"] == 4 and far["ulp"]["3 to 4"] > 0


def test_an_infinity_for_a_number_differs_and_nothing_is_promised_of_sin_beyond_pi():
    a = np.array([0x3F800000, 0x43000000], np.uint32)  # 1 and 128
    words, right = (a, a, a), np.array([0x3F576AA4, 0x3F38BEE6], np.uint32)
    sine = next(instruction for instruction in INSTRUCTIONS if instruction.name == "sin_approx_f32")
    for index, is_good in ((1, True), (0, False)):
        for bits in (right[index] ^ (1 << 22), 0x7FFFFFFF):
            wrong = right.copy()
            wrong[index] = bits
            assert instructions.compare(sine, words, wrong, right)["ok"] == is_good
    reciprocal = Instruction("rcp", "f32", allowed=lambda a, b, result: np.abs(result))
    infinity = np.full(2, 0x7F800000, np.uint32)
    assert not instructions.compare(reciprocal, words, infinity, right)["ok"]
    assert not instructions.compare(reciprocal, words, right, infinity)["ok"]


def test_every_kernel_of_the_file_has_its_line_in_the_table():
    for arch in ("sm_80", "sm_90"):
        compiled = nvrtc.compile(sources.flatten(table.FILE), arch, name=table.FILE)
        known = {instruction.name for instruction in INSTRUCTIONS if instruction.arch <= int(arch[3:])}
        assert set(signatures(compiled.ptx)) == known | {"mma_m16n8k16_f16", "mma_m16n8k16_bf16"}


# --- how mma adds


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize(
    ("width", "bits", "by", "cut"),
    [(4, 0, "value", True), (8, 1, "exponents", True), (16, 2, "value", True), (16, 3, "value", False)],
)
def test_an_adder_is_recognised(dtype, width, bits, by, cut):
    def multiply(machine, dtype, a, b, c):
        with np.errstate(invalid="ignore"):
            return accumulation.emulate(*(np.asarray(x, np.float64) for x in (a, b, c)), width, bits, by, cut)

    order = {"told": f"{width} products are added at once", "block_width": width}
    assert accumulation.order(multiply, None, dtype) == order
    found = accumulation.last_bits(multiply, None, dtype)
    assert (found["rounding"], found["further_bits"]) == ("towards zero" if cut else "to nearest", bits)
    end = "cut" if cut else "nearest"
    best = {"share": 1.0, "width": width, "further_bits": bits, "aligned_by": by, "end": end}
    assert accumulation.model(multiply, None, dtype)["best"][0] == best
    assert accumulation.whole_numbers(multiply, None, dtype, "whole")["ok"]
    assert accumulation.random_products(multiply, None, None, dtype, "bound")["ok"]


def test_an_adder_of_eight_bits_is_beyond_the_bound():
    def multiply(machine, dtype, a, b, c):
        return (c + a @ b).astype(ml_dtypes.bfloat16).astype(np.float32)

    found = accumulation.random_products(multiply, None, None, "bf16", "bound")
    assert not found["ok"] and "expected at most 18" in found["reason"]
    assert not accumulation.whole_numbers(multiply, None, "bf16", "whole")["ok"]
    order = accumulation.order(multiply, None, "bf16")
    assert order["block_width"] is None and len(order["outliving"]) == 136


# --- trials and timings


PAGED = trials.Trial("paged:heads=3,row=48,value=32,scale=0.125,lens=70+5,block=16,dtype=bf16", "mma", 64)


def test_a_wrong_result_is_no_good_trial(monkeypatch):
    bench, run = Bench("ptx"), trials.run
    assert trials.judge(bench, PAGED)["ok"]

    def wrong(*args):
        results = run(*args)
        results["out"][0, 1] *= 1.05
        return results

    monkeypatch.setattr(trials, "run", wrong)
    found = trials.judge(bench, PAGED)
    assert not found["ok"] and found["reason"].startswith("out")


def test_other_bits_the_second_time_are_no_good_trial(monkeypatch):
    bench, run, count = Bench("ptx"), trials.run, iter(range(9))

    def unsteady(*args):
        results = run(*args)
        results["out"].view(np.uint32)[...] ^= next(count) % 2
        return results

    monkeypatch.setattr(trials, "run", unsteady)
    found = trials.judge(bench, PAGED)
    assert (found["ok"], found["reason"]) == (False, "two runs differ in their bits")


def test_a_number_where_a_row_sees_nan_is_no_good_trial(monkeypatch):
    trial, run = trials.Trial(PAGED.id, "mma", 64, np.nan), trials.run
    assert trials.judge(Bench("ptx"), trial)["ok"] and "nan in a row" in str(trial)
    monkeypatch.setattr(trials, "run", lambda *args: {name: np.nan_to_num(x) for name, x in run(*args).items()})
    found = trials.judge(Bench("ptx"), trial)
    assert not found["ok"] and "nan" in found["reason"].lower()


def test_a_trial_that_faults_is_told_and_the_next_one_runs(monkeypatch):
    ids = ["paged:heads=1,row=16,value=17,scale=1,lens=1", "merge:states=1,rows=3,heads=2,value=5"]
    monkeypatch.setattr(trials, "trials", lambda small, arch: [trials.Trial(id) for id in ids])
    first, second, *_ = trials.findings(Bench("ptx"))
    assert not first["ok"] and first["name"] == ids[0] and second["ok"]


def test_the_ends_on_tensor_cores_are_held_to_their_bounds(monkeypatch):
    bench, sizes = Bench("ptx"), (3, 2, 40, 24, 16, 72)
    assert trials.judge_end(bench, "query", "bf16", sizes)["ok"]
    assert trials.judge_end(bench, "project", "f16", sizes)["ok"]
    monkeypatch.setattr(trials.absorbed_mma, "up_project", lambda machine, o, w, out: _zero(machine, out))
    assert "of its bound" in trials.judge_end(bench, "project", "f16", sizes)["reason"]


def _zero(machine, out):
    n, kernel = np.prod(out.shape), machine.kernel("check/bench.cu", "bench_fill_f32")
    arguments = out, np.int64(n), np.uint32(0), np.float32(0)
    machine.launch(kernel, (int(-(-n // 128)), 1, 1), (128, 1, 1), 0, *arguments)


def test_limits_are_measured_before_anything_else():
    limit, found = limits.measure(Bench("ptx"))
    assert limit.copy > 0 and limit.matmul > 0 and [finding["name"] for finding in found] == [
        "limit: copy", "limit: mma from registers",
    ]  # fmt: skip


def test_a_form_is_timed_by_events_behind_a_busy_stream(on_fake):
    script = """
from mla_oracle.gpu.check import clock
from mla_oracle.gpu.check.part import Bench
bench = Bench("cuda")
none = load(bench.machine, "none")
print(clock.microseconds(bench, lambda index: bench.machine.launch(none, (index + 1, 1, 1), (1, 1, 1), 0)))
"""
    from scripts import HEAD

    ran = on_fake(HEAD + script, ARCH=90)
    assert ran.stdout == "1500.0\n", ran.stderr
    order = [call[:3] for call in ran.calls if call[0] in ("cuLaunchKernel", "cuEventRecord")]
    assert [call[1] for call in order[:3]] == ["none", "none", "bench_wait"]
    assert [call[1] for call in order[3:11]] == ["bench_read", "0xe0", "none", "0xe0"] * 2
    assert len(order) == 3 + 30 * 4  # what takes no time is repeated as often as anything is


def test_an_interrupt_ends_the_part_and_leaves_a_report_that_says_so(tmp_path, monkeypatch):
    report = Report(tmp_path / "report.json", {})

    def interrupted(child, report, part, deadline):
        report.add(part, {"name": "first", "ok": True})
        raise KeyboardInterrupt

    monkeypatch.setattr(supervisor, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        supervisor.run(report, "trials", "mla_oracle.gpu.check.trials", "ptx", 60)
    ended = json.loads((tmp_path / "report.json").read_text())["parts"]["trials"]
    assert ended["status"] == "interrupted" and ended["findings"][0]["name"] == "first"
