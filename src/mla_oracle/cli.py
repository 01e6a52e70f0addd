# SPDX-License-Identifier: Apache-2.0
"""The command `mla-oracle`: one JSON object on stdout, words on stderr, and an exit code.

    0 pass   1 mismatch, after a verdict   2 bad input or usage   3 unsupported   4 no device   70 our own defect
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .errors import InputError, OracleError


class Parser(argparse.ArgumentParser):
    """Usage errors become InputError, so that they are answered like every other bad input."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see {self.prog} --help)")


class Intermixed(Parser):
    """Options may stand between the positional arguments."""

    _inside = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._inside:
            return super().parse_known_args(args, namespace)
        self._inside = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._inside = False


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="mla-oracle", description="Is my MLA decode kernel right, and if not, what did it compute?")
    top.add_argument("--version", action="store_true", help="print the version")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)

    case = commands.add_parser("case", help="generate the case an id stands for")
    case.add_argument("id", help="e.g. paged:geometry=glm-5.2,lens=4096,dtype=bf16,seed=7")
    case.add_argument("-o", "--out", required=True, metavar="FILE", help="the case file to write")
    case.add_argument("--dialect", metavar="NAME", help="write the arguments of an engine's call instead")

    run = commands.add_parser("run", help="compute the expected results of a case")
    run.add_argument("case", help="a case file, a folder with manifest.json, or an id")
    run.add_argument("-o", "--out", metavar="FILE", help="the result file to write")
    run.add_argument("--precision", choices=("f32", "f64"), help="default: f64, the truth; f32 on cuda and ptx")
    run.add_argument("--backend", default="auto", help="auto, strict, fast, cuda or ptx")
    run.add_argument("--kernel", help="of cuda and ptx, for paged: scalar, mma or wgmma; for absorbed: scalar or mma")
    run.add_argument("--isa", help="of fast: a build that info lists (default: the best)")
    run.add_argument("--threads", type=int, metavar="N", help="of fast and ptx (default: all CPUs)")
    run.add_argument("--out-dtype", metavar="DTYPE", help="round out to f32, f16 or bf16")
    _add_dialect(run)

    check = commands.add_parser("check", help="compare actual results with the f64 truth")
    check.add_argument("case", help="a case file, a folder with manifest.json, or an id")
    check.add_argument("actual", help="a result file: out, and lse if there is one")
    check.add_argument("--numerics", metavar="SPEC", help="what the kernel rounds: a preset, FIELD=VALUE,... or both")
    check.add_argument("--stages", action="store_true", help="CASE is a layer case, ACTUAL what an engine dumped of it")
    beside = check.add_argument_group("rules told beside the verdict, which is the budget's")
    beside.add_argument("--rules", metavar="NAMES", help="other projects' rules: all, or names joined by +")
    beside.add_argument("--tol", type=float, help="max |g - w| <= TOL * max(max |w|, 1)")
    beside.add_argument("--atol", type=float, help="|g - w| <= ATOL + RTOL * |w| for every element")
    beside.add_argument("--rtol", type=float)
    check.add_argument("--complete", action="store_true", help="a result that is missing, such as lse, fails")
    check.add_argument("--diagnose", action="store_true", help="say what a failing kernel computed instead")
    check.add_argument("--blind", action="store_true", help="say which wrong functions this case cannot tell")
    _add_dialect(check)

    diagnose = commands.add_parser("diagnose", help="say what a kernel computed instead")
    diagnose.add_argument("case", help="a case file, a folder with manifest.json, or an id")
    diagnose.add_argument("actual", help="a result file: out, and lse if there is one")
    diagnose.add_argument("--numerics", metavar="SPEC", help="what the kernel rounds, as for check")
    _add_dialect(diagnose)

    explain = commands.add_parser("explain", help="say what a case is, computing nothing")
    explain.add_argument("case", help="a case file, a folder with manifest.json, or an id")
    explain.add_argument("--blind", action="store_true", help="compute which wrong functions this case cannot tell")
    explain.add_argument("--numerics", metavar="SPEC", help="what the kernel rounds, as for check")
    _add_dialect(explain)

    dialects = commands.add_parser("dialects", help="the engines' calls known, and what each takes and returns")
    dialects.add_argument("--json", action="store_true", help="one JSON object in the place of a table")

    mutants = commands.add_parser("mutants", help="the wrong functions known, and what a case shows of them")
    mutants.add_argument("case", nargs="?", help="a case file, a folder with manifest.json, or an id")
    mutants.add_argument("--json", action="store_true", help="one JSON object in the place of a table")

    suite = commands.add_parser("suite", help="choose cases that see every mutant, or run an engine over them")
    _add_suite(suite)

    commands.add_parser("serve", help="answer JSON lines on stdin, many cases in one process")
    commands.add_parser("selftest", help="reproduce the published bits")
    info = commands.add_parser("info", help="versions, backends, paths")
    info.add_argument("--cuda", action="store_true", help="ask the CUDA driver as well")
    info.add_argument("--include-dir", action="store_true", help="print the folder of mla_oracle.hpp, nothing else")
    _add_ptx(commands)
    return top


def _add_dialect(command: argparse.ArgumentParser) -> None:
    command.add_argument("--dialect", metavar="NAME", help="files are an engine's call and its results: see dialects")


def _add_ptx(commands: argparse._SubParsersAction[Parser]) -> None:
    ptx = commands.add_parser("ptx", help="run CUDA kernels without a GPU")
    run = ptx.add_subparsers(dest="ptx_command", metavar="COMMAND", parser_class=Intermixed, required=True).add_parser(
        "run",
        help="launch a kernel of a .cu or .ptx file, report what it does wrong, compare what it computes",
        description="The kernel runs on the CPU, under checks for bounds, alignment, memory never written, races, "
        "divergent barriers and cp.async. Exit code 1: a fault, or wrong numbers.",
        epilog=_argument_words(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("file", help="FILE.cu, compiled with NVRTC, or FILE.ptx")
    run.add_argument("case", nargs="?", help="a case file, a folder with manifest.json, or an id")
    run.add_argument("--kernel", required=True, metavar="NAME")
    run.add_argument("--grid", required=True, metavar="X[,Y,Z]", help="blocks")
    run.add_argument("--block", required=True, metavar="X[,Y,Z]", help="threads of a block")
    run.add_argument("--smem", type=int, default=0, metavar="N", help="bytes of dynamic shared memory")
    run.add_argument("--args", metavar="WORDS", help="the kernel's arguments, see below")
    run.add_argument("--arch", default="sm_90", help="default: sm_90")
    run.add_argument("--threads", type=int, help="default: all CPUs")
    run.add_argument("--no-checks", action="store_true", help="bounds and alignment alone, faster")
    run.add_argument("--numerics", metavar="SPEC", help="what the kernel rounds, as for check")


def _argument_words() -> str:
    """The help of --args, read when it is asked for."""
    if "ptx" not in sys.argv:
        return ""
    from .ptx import convention

    return convention.__doc__ or ""


def _add_suite(suite: argparse.ArgumentParser) -> None:
    suite.add_argument("--geometry", metavar="G", help="a preset, or heads=H,row=D,value=V,scale=S")
    suite.add_argument("--dtype", default="bf16", help="of query and cache: bf16, f16 or f32 (default: bf16)")
    suite.add_argument("--block", type=int, default=64, help="rows of a page (default: 64)")
    suite.add_argument("--max-tokens", type=int, default=4200, metavar="N", help="keys of a case (default: 4200)")
    suite.add_argument("--with", dest="beyond", metavar="SETS", help="cases beyond the plain problem in their place:"
                       " sparse, sparse-fp8, window, sinks, formats, ..., joined by +")
    suite.add_argument("--kinds", default="paged", help="kinds of case, joined by + (default: paged)")
    suite.add_argument("--numerics", metavar="SPEC", help="what the kernel rounds, as for check")
    suite.add_argument("-o", "--out", metavar="DIR", help="write the cases and suite.json there")
    runs = suite.add_subparsers(dest="action", metavar="run", parser_class=Parser)
    run = runs.add_parser("run", help="run an engine over cases")
    run.add_argument("cases", nargs="+", help="folders with suite.json or case files, case files, or ids")
    run.add_argument("--exec", required=True, dest="line", metavar="CMD", help="a command with {case} and {out}")
    run.add_argument("--jobs", type=int, default=1, metavar="N", help="cases at a time (default: 1)")
    _add_dialect(run)
    run.add_argument("--timeout", type=float, default=300.0, metavar="S", help="seconds a case may take (default: 300)")
    run.add_argument("--numerics", metavar="SPEC", help="what the kernel rounds, as for check")
    for name, what in (("junit", "JUnit XML"), ("json", "JSON"), ("html", "one HTML page")):
        run.add_argument(f"--{name}", metavar="FILE", help=f"write the report as {what}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the return value is the process's exit code."""
    try:
        return _print_last(*_dispatch(parser().parse_args(argv)))
    except OracleError as error:
        return _print_error(error.exit_code, str(error))
    except MemoryError:
        return _print_error(4, "not enough memory for this case")
    except KeyboardInterrupt:
        _say("mla-oracle: interrupted")
        return 130
    except Exception as error:
        import traceback

        traceback.print_exc()
        return _print_error(70, f"internal error: {type(error).__name__}: {error}")


def _dispatch(args: argparse.Namespace) -> tuple[int, dict[str, Any] | str]:
    from . import commands

    if args.version:
        from . import __version__

        return 0, __version__
    match args.command:
        case "case":
            return 0, commands.make_case(args.id, args.out, dialect=args.dialect)
        case "run":
            return 0, commands.run(
                args.case,
                args.out,
                precision=args.precision,
                backend=args.backend,
                kernel=args.kernel,
                isa=args.isa,
                threads=args.threads,
                out_dtype=args.out_dtype,
                dialect=args.dialect,
            )
        case "check":
            from .verdict.rules import in_words

            asked = ("tol", "atol", "rtol", "numerics", "rules", "diagnose", "blind", "complete", "stages", "dialect")
            how = {name: getattr(args, name) for name in asked}
            verdict = commands.check(args.case, args.actual, **how)
            _say(f"{verdict['verdict']}: {verdict['case']}: {verdict['reason']}")
            if args.stages:
                for found in verdict["stages"]:
                    _say(f"  {found['verdict']} {found['stage']} {found['dtype']}: {found['units']:.3g} of its budget")
                    if found["blind"]:
                        _say(f"    blind: {found['blind']}")
                return int(verdict["verdict"] == "fail"), verdict
            for line in in_words(verdict["rules"]):
                _say(line)
            _say_diagnosis(verdict.get("diagnosis"))
            _say_blind(verdict.get("discrimination"))
            return int(verdict["verdict"] == "fail"), verdict
        case "diagnose":
            found = commands.diagnose(args.case, args.actual, numerics=args.numerics, dialect=args.dialect)
            _say_diagnosis(found)
            return 0, found
        case "explain":
            plan = commands.explain(args.case, blind=args.blind, numerics=args.numerics, dialect=args.dialect)
            for sentence in plan["meaning"]:
                _say(sentence)
            _say_blind(plan.get("discrimination"))
            return 0, plan
        case "dialects":
            return 0, commands.dialects() if args.json else commands.dialects_table()
        case "mutants":
            return 0, commands.mutants(args.case) if args.json else commands.mutants_table(args.case)
        case "suite":
            return _suite(args)
        case "serve":
            from .serve import serve

            if sys.stdin is None or sys.stdout is None:
                raise InputError("stdin or stdout is closed, expected requests on one and answers on the other")
            return serve(sys.stdin.buffer, sys.stdout), ""
        case "selftest":
            from .selftest import selftest

            report = selftest(_say)
            return (0 if report["passed"] else 70), report
        case "info":
            return 0, commands.include_dir() if args.include_dir else commands.info(cuda=args.cuda)
        case "ptx":
            from .ptx import command

            answer = command.run(
                args.file, args.kernel, args.grid, args.block, args.smem, args.case, args=args.args, arch=args.arch,
                checks=not args.no_checks, threads=args.threads, numerics=args.numerics,
            )  # fmt: skip
            for line in filter(None, [answer["fault"], *answer["warnings"]]):
                _say(line)
            return int(answer["verdict"] == "fail"), answer
    raise InputError("no command given (see mla-oracle --help)")


def _suite(args: argparse.Namespace) -> tuple[int, dict[str, Any] | str]:
    from .suites import command

    if args.action is None:
        if args.geometry is None:
            raise InputError("suite needs --geometry, or run (see mla-oracle suite --help)")
        asked = ("dtype", "block", "max_tokens", "kinds", "beyond", "numerics", "out")
        how = {name: getattr(args, name) for name in asked}
        return 0, command.make_suite(args.geometry, **how, say=_say)
    how = {name: getattr(args, name) for name in ("jobs", "timeout", "numerics", "dialect")}
    files = {name: getattr(args, name) for name in ("junit", "json", "html")}
    report, answer = command.run_command(args.cases, args.line, **how, files=files, say=_say)
    return int(not report.passed), answer


def _say_diagnosis(found: dict[str, Any] | None) -> None:
    """Facts, then what is suspected, then the other classes."""
    if found is None:
        return
    for fact in found["facts"]:
        _say(f"  {fact['text']}")
    _say(found["summary"])
    for other in found["classes"][int(found["named"]):]:
        _say(f"  also {other['class']} ({other['mutant']}), {100 * other['share']:.3g} % of the error")
    for rival, case in (found["classes"][0]["apart"] if found["classes"] else {}).items():
        _say(f"  {rival} is told from it by {case}")


def _say_blind(found: dict[str, Any] | None) -> None:
    for sentence in [] if found is None else found["sentences"]:
        _say(sentence)


def _say(line: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError):  # words that cannot be said change no answer
            print(line, file=sys.stderr, flush=True)


def _print_last(code: int, answer: dict[str, Any] | str) -> int:
    text = answer if isinstance(answer, str) else json.dumps(answer, allow_nan=False)
    if text and sys.stdout is None:
        raise InputError("stdout is closed, expected somewhere to print the answer")
    try:
        if text:
            print(text)
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise InputError(f"stdout cannot be written: {error.strerror}") from None
    return code


def _print_error(code: int, message: str) -> int:
    line = " ".join(message.split())
    _say(f"mla-oracle: {line}")
    if sys.stdout is not None:
        try:
            print(json.dumps({"error": {"code": code, "message": line}}), flush=True)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return code
