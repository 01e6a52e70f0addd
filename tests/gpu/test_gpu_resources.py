# SPDX-License-Identifier: Apache-2.0
"""Every kernel for every architecture, against the committed table of one NVRTC's registers and memory."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from mla_oracle.gpu import layout, nvrtc, paged_wgmma, resources, sources

pytest.importorskip("cuda.bindings", reason="the extra cuda is not installed")

ROOT = Path(__file__).parents[2]
COMMITTED: dict[str, Any] = json.loads((ROOT / "tests" / "gpu" / "resources.json").read_text())
FORCED = """
extern "C" __global__ void {name}(float *x) {{
    float a[96];
    for (int i = 0; i < 96; i++) a[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
    for (int i = 0; i < 96; i++) x[i * 1024 + threadIdx.x] = a[95 - i] * a[i];
}}
"""


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLA_ORACLE_CACHE", str(tmp_path_factory.mktemp("resources")))
        return resources.table()


def rows(table: dict[str, Any]) -> list[tuple[str, str, str, dict[str, int]]]:
    return [
        (file, kernel, arch, row)
        for file, kernels in table["kernels"].items()
        for kernel, archs in kernels.items()
        for arch, row in archs.items()
    ]


def test_the_table_is_what_this_nvrtc_makes(table: dict[str, Any]) -> None:
    if table["nvrtc"] != COMMITTED["nvrtc"]:
        pytest.skip(f"the table is of NVRTC {COMMITTED['nvrtc']}, installed is {table['nvrtc']}")
    assert resources.text(table) == resources.text(COMMITTED)


def test_every_kernel_compiles_for_every_architecture_and_spills_nothing(table: dict[str, Any]) -> None:
    assert list(table["kernels"]) == list(sources.names())
    for file, kernel, arch, row in rows(table):
        assert (row["spill_stores"], row["spill_loads"]) == (0, 0), f"{kernel} of {file} spills on {arch}: {row}"
        assert row["static_smem"] + row["dynamic_smem"] <= layout.most_smem(arch), (kernel, arch, row)
    for file, kernels in table["kernels"].items():
        assert all(list(archs) == list(resources.ONLY.get(file, resources.ARCHS)) for archs in kernels.values())


def test_the_committed_table_has_no_spills() -> None:
    assert [row for *row, values in rows(COMMITTED) if values["spill_stores"] or values["spill_loads"]] == []


def test_the_accumulators_of_the_tensor_core_kernels_are_in_registers() -> None:
    """With every tile: 64 rows, 16 of plain rows where 99 KiB is all, 32 of packed ones there."""
    for file in ("paged_mma.cu", "paged_wgmma.cu"):
        assert [row for of, *row, values in rows(COMMITTED) if of == file and values["stack"]] == []


@pytest.mark.parametrize("file", ["paged_mma.cu", "paged_wgmma.cu"])
def test_the_kernels_header_says_its_registers_and_shared_memory(file: str) -> None:
    said = re.findall(r"^// +\w+ (sm_\w+) +\d+ +\d+ +(\d+) KiB +(\d+) ", sources.read(file), re.MULTILINE)
    kernels = COMMITTED["kernels"][file]
    assert said
    for arch, smem, registers in said:
        row = kernels[file.replace(".cu", "_bf16")].get(arch)
        assert (round(row["dynamic_smem"] / 1024), row["registers"]) == (int(smem), int(registers)), arch


def test_the_registers_that_warpgroups_pass_on_are_those_that_a_block_begins_with() -> None:
    """setmaxnreg.inc waits for registers that the block gave back: were there too few, it would wait for ever."""
    text, kernels = sources.read("paged_wgmma.cu"), COMMITTED["kernels"]["paged_wgmma.cu"]
    (kept,) = map(int, re.findall(r"keep_registers<(\d+)>", text))
    (taken,) = map(int, re.findall(r"take_registers<(\d+)>", text))
    assert kept % 8 == taken % 8 == 0 and 24 <= kept <= taken <= 256
    for row in kernels.values():
        begun = row["sm_90a"]["registers"] // -8 * -8
        assert kept <= begun <= taken
        assert 128 * kept + 2 * 128 * taken <= paged_wgmma.THREADS * begun


def test_a_spill_is_seen() -> None:
    wide = FORCED.format(name="wide")
    assert resources.of(nvrtc.compile(wide, "sm_90", name="wide.cu"))["wide"]["spill_loads"] == 0
    row = resources.of(nvrtc.compile(wide, "sm_90", name="wide.cu", options=["--maxrregcount=32"]))["wide"]
    assert row["registers"] <= 32 and row["spill_stores"] > 0 and row["spill_loads"] > 0 and row["stack"] > 0


def test_each_kernel_of_a_file_has_its_own_numbers() -> None:
    source = """
    extern "C" __device__ const unsigned b_smem = 70000;
    extern "C" __global__ void a(float *x) { __shared__ float s[8]; s[threadIdx.x] = *x; __syncthreads(); *x = s[1]; }
    extern "C" __global__ void b(float *x) { extern __shared__ float s[]; s[threadIdx.x] = *x; *x = s[1]; }
    """
    found = resources.of(nvrtc.compile(source, "sm_80", name="two.cu"))
    assert {name: (row["static_smem"], row["dynamic_smem"]) for name, row in found.items()} == {
        "a": (32, 0),
        "b": (0, 70000),
    }


def test_everything_that_pins_the_compiler_pins_the_one_of_the_table() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    pins = [text for text in groups["test"] if text.startswith("nvidia-cuda-nvrtc")]
    assert pins == [f"nvidia-cuda-nvrtc=={COMMITTED['nvrtc']}"]
    found = re.findall(r"nvidia-cuda-nvrtc==[\d.]+", (ROOT / "README.md").read_text())
    assert set(found) == set(pins)
