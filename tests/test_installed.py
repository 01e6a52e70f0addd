# SPDX-License-Identifier: Apache-2.0
"""What is installed, from a wheel or for editing, is all that the source tree has: meson.build lists files by name."""

from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_module_kernel_and_header_of_the_source_is_installed() -> None:
    package = files("mla_oracle")
    sources = [
        ("" if tree.name == "mla_oracle" else "cuda/") + path.relative_to(tree).as_posix()
        for tree, patterns in ((ROOT / "src" / "mla_oracle", ("*.py", "*.hpp")), (ROOT / "cuda", ("*.cu", "*.cuh")))
        for pattern in patterns
        for path in tree.rglob(pattern)
    ]
    assert "gpu/device.py" in sources and "cuda/paged.cu" in sources and "include/mla_oracle.hpp" in sources
    assert [name for name in sources if not (package / name).is_file()] == []


def test_every_module_is_in_a_list() -> None:
    """Where modules were copied beside installed ones, the test above does not see that a list lacks them."""
    source = ROOT / "src" / "mla_oracle"
    lists = {path.parent: path.read_text() for path in source.rglob("meson.build")}

    def listed(module: Path) -> bool:
        folder = next(parent for parent in module.parents if parent in lists)
        return f"'{module.relative_to(folder).as_posix()}'" in lists[folder]

    assert [str(module.relative_to(source)) for module in sorted(source.rglob("*.py")) if not listed(module)] == []
