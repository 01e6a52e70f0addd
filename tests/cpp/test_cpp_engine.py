# SPDX-License-Identifier: Apache-2.0
"""An engine with its own kernel in front of the real oracle."""

import subprocess
from pathlib import Path

import pytest
from fakes import CLIENTS, COMMAND, Run

FLAGS = {"oracle": [], "server": ["--server"]}


@CLIENTS
@pytest.mark.parametrize("cache", ["f32", "bf16"])
@pytest.mark.parametrize("base", [[], ["--lse-base-2"]])
def test_a_right_engine_passes(probe: Run, client: str, cache: str, base: list[str]) -> None:
    probe("engine", "--oracle", COMMAND, *FLAGS[client], "--cache", cache, *base)


@CLIENTS
@pytest.mark.parametrize("bug", ["rope", "tail", "scale"])
def test_a_wrong_engine_is_a_mismatch(probe: Run, client: str, bug: str) -> None:
    done = probe("engine", "--oracle", COMMAND, *FLAGS[client], "--bug", bug, code=1)
    assert done.stdout.startswith("mismatch: ")


def test_a_glm_5_2_cache_of_4096_tokens_goes_through_a_cpp_engine(probe: Run, engine: Path, tmp_path: Path) -> None:
    path = tmp_path / "case.safetensors"
    probe("ask", "oracle", COMMAND, f"generate|paged:geometry=glm-5.2,lens=4096,dtype=bf16|{path}")
    for bug, code in [([], 0), (["--bug", "rope"], 1), (["--bug", "tail"], 1)]:
        done = subprocess.run([engine, path, "--oracle", COMMAND, "--server", *bug], capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr


def test_both_clients_say_the_same(probe: Run, tmp_path: Path) -> None:
    case, out = tmp_path / "case", tmp_path / "out"
    (tmp_path / "short").write_bytes(b"1234")
    questions = {
        f"generate|paged:heads=0|{case}": "BadInput: case id",
        f"generate|paged:heads=2,row=24,value=16,lens=0+5+33,block=16,scale=0.25|{case}": "generated",
        f"run|{case}|{out}|precision=f32": "ran lse:f32 out:f32",
        f"check|{case}|{out}": "pass ",
        f"check|{case}|{out}|tol=1e-30|rules=all": "pass ",
        f"check|{case}|{tmp_path / 'short'}": "BadInput: cannot read",
        f"check|{case}|{tmp_path / 'nothing'}": "BadInput: cannot read",
        f"check|{out}|{out}": "BadInput: ",
        f"run|{case}|{tmp_path / 'no' / 'out'}": "BadInput: cannot write",
        f"check|{case}|{out}|numerics=out=f32": "pass ",
    }
    said = [probe("ask", client, COMMAND, *questions).stdout.splitlines()[1:] for client in ("oracle", "server")]
    assert said[0] == said[1]
    assert [line for line, start in zip(said[0], questions.values(), strict=True) if not line.startswith(start)] == []


@CLIENTS
def test_an_option_that_is_wrong_is_bad_input(probe: Run, tmp_path: Path, client: str) -> None:
    wrong = ["check|case|out|tol=nan", "check|case|out|tol=-1", "check|case|out|nope=1", "run|case|out|precision=f16"]
    said = probe("ask", client, COMMAND, *wrong, cwd=tmp_path).stdout.splitlines()[1:]
    assert [line.split(":")[0] for line in said] == ["BadInput"] * len(wrong)
