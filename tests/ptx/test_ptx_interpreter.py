# SPDX-License-Identifier: Apache-2.0
"""The interpreter as a machine: what it refuses before anything runs, and the command that runs a file on it."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from snippets import one, text

from mla_oracle import cli
from mla_oracle.errors import InputError, UnsupportedError
from mla_oracle.ptx import Fault, Interpreter, _opcodes, interpreter
from mla_oracle.ptx.memory import PIECE
from mla_oracle.ptx.parser import parse
from mla_oracle.ptx.program import INSTR
from mla_oracle.ptx.syntax import Address, Pair

DECODE = Path(__file__).with_name("tensor_decode.cu")
LANE = np.arange(32, dtype=np.uint32)


def test_structures_are_as_large_here_as_in_the_machine():
    assert interpreter._machine().sizes() == (INSTR.itemsize, PIECE.itemsize)


def test_every_operation_has_a_number_of_its_own():
    assert len({int(op) for op in _opcodes.Op}) == len(_opcodes.Op.__members__)


def snippet(body="", **options):
    return Interpreter("sm_90", **options).load(text(body, {"x": np.uint32}, {"a": LANE}), "snippet", file="x.ptx")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("tcgen05.shift.down;", r"PTX line \d+: tcgen05.shift.down is not supported by the interpreter"),
        ("add.cc.u32 x, a, a;", r"PTX line \d+: add.cc.u32 is not supported"),
        ("add.f16x4 x, a, a;", r"PTX line \d+: add.f16x4 is not supported"),
        ("ld.global.b32.unheard x, [d1];", r"PTX line \d+: ld.global.b32.unheard is not supported"),
        ("cp.async.bulk.wait_all;", r"PTX line \d+: cp.async.bulk.wait_all is not supported"),
        ("shfl.bfly.b32 x, a, 1, 31;", r"PTX line \d+: shfl.bfly.b32 is not supported"),
        ("call vprintf, (a);", r"PTX line \d+: a call of vprintf is not supported"),
        ("mov.u32 x, %envreg0;", r"PTX line \d+: %envreg0 is not supported"),
        (".surf x;", r"PTX line \d+: .surf is not supported"),
        (".reg .b7 %z;", r"PTX line \d+: .reg .b7 is not supported"),
    ],
)
def test_what_is_not_known_is_refused_by_name_and_line(body, message):
    with pytest.raises(UnsupportedError, match=message):
        snippet(body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (".reg .b32 %z; mov.b64 %z, d1;", "register %z of mov.b64 has 32 bits, expected 64"),
        (".reg .b32 %z; ld.global.u64 %z, [d1];", "register %z of ld.global.u64 has 32 bits, expected 64"),
        (".reg .b16 %h; add.u32 x, %h, 1;", "register %h of add.u32 has 16 bits, expected 32"),
        ("mov.u32 %nowhere, 1;", "register %nowhere of mov.u32 is not declared"),
        (".reg .b32 %z<900000000>;", "are more than 1048576 registers"),
        (".shared .align 0 .b8 z[8]; mov.u32 x, z;", "z is aligned to 0 bytes, expected a power of two"),
        (".local .b8 z[9999999999999999999]; mov.u32 x, z;", "z is 9999999999999999999 bytes, expected at most"),
        (f"ld.global.u32 x, [d1+{1 << 64}];", "18446744073709551616 has more than 64 bits"),
        ("mov.b32 x, " + "{" * 5000 + "a" + "}" * 5000 + ";", "not PTX"),
    ],
)
def test_registers_that_do_not_fit_are_refused(body, message):
    with pytest.raises(InputError, match=message):
        snippet(body)


@pytest.mark.parametrize(
    "body",
    [
        "bra NOWHERE;", "mov.u32 x, nothing;", "add.u32 x, a, b, c", "mov.u32;", "}", "@p1;", "ld.u32 x, [;",
        "add.u32 x, %q\n a;", "mov.u32 x, {};",
    ],
)
def test_what_is_no_ptx_is_refused_in_one_line(body):
    with pytest.raises((InputError, UnsupportedError)) as caught:
        snippet(body)
    assert "\n" not in str(caught.value)


def test_any_part_of_a_module_is_read_or_refused():
    whole = text("add.u32 x, a, a;", {"x": np.uint32}, {"a": LANE})
    for end in range(0, len(whole), 7):
        try:
            Interpreter().load(whole[:end], "snippet")
        except (InputError, UnsupportedError) as error:
            assert "\n" not in str(error)


def test_an_unknown_kernel_is_refused_with_those_there_are():
    with pytest.raises(InputError, match="there is no kernel other, the module has snippet"):
        Interpreter().load(text("", {}, {"a": LANE}), "other")


@pytest.mark.parametrize(
    ("grid", "block", "smem", "args", "message"),
    [
        ((1, 1, 1), (32, 1, 1), 0, "a", "snippet takes 2 arguments, 1 given"),
        ((1, 1, 1), (32, 1, 1), 0, "a3", "argument 1 of snippet is a int, expected a Buffer, a numpy scalar or None"),
        ((1, 1, 1), (32, 1, 1), 0, "ai", "argument 1 of snippet is 4 bytes, expected 8"),
        ((1, 1, 1), (1024, 2, 1), 0, "aa", "block of snippet is .1024, 2, 1., expected 1024 threads or fewer"),
        ((1, 1, 1), (0, 1, 1), 0, "aa", "block.x of snippet is 0, expected 1 to 1024"),
        ((0, 1, 1), (32, 1, 1), 0, "aa", "grid.x of snippet is 0"),
        ((1, 65536, 1), (32, 1, 1), 0, "aa", "grid.y of snippet is 65536"),
        ((1, 1, 1), (32, 1, 1), 227 * 1024 + 1, "aa", "0 . 232449 bytes of shared memory, sm_90 has 232448"),
        ((1, 1, 1), (32, 1, 1), -1, "aa", "dynamic shared memory of snippet is -1 bytes"),
    ],
)
def test_a_launch_that_cannot_be_is_refused(grid, block, smem, args, message):
    machine = Interpreter("sm_90")
    kernel = machine.load(text("mov.u32 x, a;", {"x": np.uint32}, {"a": LANE}), "snippet")
    values = {"a": machine.upload(LANE), "3": 3, "i": np.int32(3)}
    with pytest.raises((InputError, UnsupportedError), match=message):
        machine.launch(kernel, grid, block, smem, *(values[name] for name in args))


@pytest.mark.parametrize(
    ("arch", "most"), [("sm_80", 163), ("sm_86", 99), ("sm_90a", 227), ("sm_100", 227), ("sm_121", 99)]
)
def test_shared_memory_ends_where_the_architecture_has_no_more(arch, most):
    machine = Interpreter(arch)
    kernel = machine.load(text("", {}, {"a": LANE}), "snippet")
    argument = machine.upload(LANE)
    machine.launch(kernel, (1, 1, 1), (32, 1, 1), most << 10, argument)
    with pytest.raises(UnsupportedError, match=f"{arch} has {most << 10}$"):
        machine.launch(kernel, (1, 1, 1), (32, 1, 1), (most << 10) + 1, argument)


def test_the_number_of_threads_a_kernel_declares_is_its_limit():
    ptx = text("", {}, {"a": LANE}).replace(")\n{", ")\n.maxntid 64, 1, 1\n{", 1)
    machine = Interpreter()
    with pytest.raises(InputError, match="expected the 64 threads it declares or fewer"):
        machine.launch(machine.load(ptx, "snippet"), (1, 1, 1), (96, 1, 1), 0, machine.upload(LANE))


def test_blocks_know_their_place_in_the_grid():
    body = """
        mov.u32 r1, %ctaid.x; mov.u32 r2, %ctaid.y; mov.u32 r3, %ctaid.z; mov.u32 r4, %nctaid.x; mov.u32 r5, %nctaid.y;
        mad.lo.u32 r6, r3, r5, r2; mad.lo.u32 r6, r6, r4, r1; mul.wide.u32 d1, r6, 4; add.s64 d1, d1, a;
        st.global.u32 [d1], r6;
    """
    machine = Interpreter("sm_90")
    out = machine.empty((24,), np.uint32)
    pointer = machine.upload(np.array([out.pointer], np.uint64))
    kernel = machine.load(text(body, {}, {"a": np.zeros(1, np.uint64)}), "snippet")
    machine.launch(kernel, (4, 3, 2), (1, 1, 1), 0, pointer)
    assert machine.download(out).tolist() == list(range(24))


def test_the_parser_reads_operands_scopes_and_places():
    module = parse("""
        .version 8.0
        .target sm_80
        .file 1 "cuda/x.cu"
        .file 2 "cuda_fp16.hpp"
        .visible .entry k(.param .u64 .ptr .align 16 p) .maxntid 32, 2, 1
        { .reg .b32 %r<3>; .reg .pred q;
          .loc 1 7 3
          ld.global.v2.u32 {%r0, _}, [%rd1+-8];
          .loc 2 90 1, function_name $L__info_string0, inlined_at 1 12 5
          { .reg .b32 %r1; @!q mov.u32 %r1, -0x10; }
          shfl.sync.idx.b32 %r2|q, %r1, 0f3F800000, 1.5, %r0; // a comment; with a semicolon
        }""")
    kernel = module.functions["k"]
    load, move, shuffle = kernel.statements
    assert module.target == "sm_80" and kernel.max_threads == 64 and kernel.params[0].align in (8, 16)
    assert load.operands == [("%r0", "_"), Address("%rd1", -8)] and load.source[:2] == (1, 7)
    assert move.guard == "q" and move.negated and move.operands[1] == -16 and move.source[:2] == (1, 12)
    assert move.operands[0] != "%r1" and kernel.registers[move.operands[0]] == "b32"
    assert shuffle.operands == [Pair("%r2", "q"), "%r1", 0x3F800000, 1.5, "%r0"]


CASE = "paged:geometry=glm-5.2,heads=16,lens=100+0+33,dtype=bf16,seed=3"
WORDS = "q kv_cache block_table seq_lens out lse H block_size max_blocks kv_cache.0 softmax_scale"
LAUNCH = ["--kernel", "tensor_decode", "--grid", "1,3", "--block", "256", "--smem", "151808"]


def test_a_register_written_under_a_predicate_keeps_its_row_around_a_loop():
    # x holds a from the first round on; r10 .. r15 are needed between its last use in a round and the next round.
    others = [f"r{n}" for n in range(10, 16)]
    body = f"""
        mov.u32 r1, 0; mov.u32 r2, 0; mov.u32 x, 0;
        AGAIN: setp.eq.u32 p1, r1, 0; @p1 mov.u32 r3, a; add.u32 x, x, r3;
        {" ".join(f"add.u32 {r}, a, 7;" for r in others)} {" ".join(f"add.u32 r2, r2, {r};" for r in others)}
        add.u32 r1, r1, 1; setp.lt.u32 p2, r1, 3; @p2 bra AGAIN; sub.u32 r2, r2, r2; add.u32 x, x, r2;
    """
    assert one(body, np.uint32, a=LANE).tolist() == (3 * LANE).tolist()


def test_the_fault_of_the_lowest_block_is_reported_though_another_came_first(monkeypatch):
    machine, both = interpreter._machine(), threading.Barrier(2)

    def run(*args):
        both.wait(60)
        return machine.run(*args)

    monkeypatch.setattr(interpreter, "_machine", lambda: SimpleNamespace(run=run))
    body = """
        mov.u32 r1, %ctaid.x; setp.ne.u32 p1, r1, 0; @p1 bra BAD; mov.u32 r2, 0;
        WAIT: add.u32 r2, r2, 1; setp.lt.u32 p1, r2, 300000; @p1 bra WAIT;
        BAD: ld.global.u32 x, [0];
    """
    with pytest.raises(Fault, match=r"block \(0, 0, 0\)"):
        one(body, np.uint32, a=LANE, blocks=2, machine=Interpreter("sm_90", threads=2))


def command(*args, capsys):
    code = cli.main(["ptx", "run", *args])
    return code, json.loads(capsys.readouterr().out)


def test_the_command_runs_a_case_and_gives_a_verdict(capsys):
    pytest.importorskip("cuda.bindings")
    code, answer = command(str(DECODE), *LAUNCH, "--args", WORDS, CASE, capsys=capsys)
    assert (code, answer["verdict"], answer["fault"], answer["warnings"]) == (0, "pass", None, [])
    assert set(answer["comparison"]["figures"]) == {"out", "lse"}


def test_the_command_reports_a_fault_and_wrong_numbers(capsys, tmp_path):
    pytest.importorskip("cuda.bindings")
    source = DECODE.read_text()
    for old, new, verdict in (
        ("__syncthreads();  // weights are there", "", "race"),
        ("token < len ? s[i]", "true ? s[i]", None),
    ):
        file = tmp_path / "bad.cu"
        file.write_text(source.replace(old, new))
        code, answer = command(str(file), *LAUNCH, "--args", WORDS, CASE, capsys=capsys)
        assert code == 1 and answer["verdict"] == "fail"
        assert (
            answer["fault"].startswith("race: ldmatrix") and "bad.cu:" in answer["fault"]
            if verdict
            else answer["fault"] is None
        )


def test_the_command_runs_a_ptx_file_without_a_case(capsys, tmp_path):
    file = tmp_path / "x.ptx"
    file.write_text(text("add.u32 x, a, a;", {"x": np.uint32}, {"a": LANE}))
    launch = ["--kernel", "snippet", "--grid", "1", "--block", "32"]
    code, answer = command(str(file), *launch, "--args", "zeros:u32:32 zeros:u32:32", capsys=capsys)
    assert code == 0 and answer["verdict"] == "clean" and answer["comparison"] is None
    code, answer = command(str(file), *launch, "--args", "empty:u32:32 zeros:u32:32", capsys=capsys)
    assert code == 1 and answer["fault"].startswith("never written: ld.global.b32")
    code, answer = command(str(file), *launch, "--args", "null zeros:u32:32", capsys=capsys)
    assert code == 1 and "a null pointer" in answer["fault"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--grid": "0"}, "--grid is '0', expected X, X,Y or X,Y,Z, each 1 or more"),
        ({"--block": "a"}, "--block is 'a', expected"),
        ({"--kernel": "no"}, "there is no kernel no, the module has snippet"),
        ({"--args": "zeros:u32:32"}, "snippet takes 2 arguments, 1 given"),
        ({"--args": "zeros:u32:32 what"}, "--args has 'what', expected a number"),
        ({"--args": "zeros:u32:x null"}, "--args has 'zeros:u32:x', expected a number there"),
        ({"--args": "zeros:u32:4 i64:99999999999999999999"}, "expected a number there"),
    ],
)
def test_the_command_refuses_bad_input_in_one_line(change, message, capsys, tmp_path):
    file = tmp_path / "x.ptx"
    file.write_text(text("mov.u32 x, a;", {"x": np.uint32}, {"a": LANE}))
    options = {"--kernel": "snippet", "--grid": "1", "--block": "32", "--args": "zeros:u32:32 zeros:u32:32"} | change
    code, answer = command(str(file), *(word for pair in options.items() for word in pair), capsys=capsys)
    assert code == 2 and message in answer["error"]["message"]


def test_a_missing_file_is_one_line(capsys):
    code, answer = command("nowhere.cu", *LAUNCH, capsys=capsys)
    assert code == 2 and "nowhere.cu cannot be read" in answer["error"]["message"]


def test_the_help_tells_the_arguments():
    done = subprocess.run([sys.executable, "-m", "mla_oracle", "ptx", "run", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "kv_cache.0" in done.stdout and "softmax_scale" in done.stdout


def test_a_label_is_known_in_its_own_block_of_statements():
    # 5.2: inline assembly may bring the same label along several times
    loop = "{ .reg .pred p; AGAIN: add.u32 x, x, 1; setp.lt.u32 p, x, %d; @p bra AGAIN; bra OVER; OVER: }"
    skip = "{ bra OVER; add.u32 x, x, 100; { bra OVER; OVER: } OVER: }"
    assert set(one("mov.u32 x, 0;" + loop % 3 + skip + loop % 9, np.uint32, a=LANE).tolist()) == {9}
