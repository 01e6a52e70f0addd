# SPDX-License-Identifier: Apache-2.0
"""What of CUDA is there, for `mla-oracle info`: `packages` looks at what is installed, `machine` asks the driver."""

from __future__ import annotations

from typing import Any

from mla_oracle.errors import MissingError


def packages() -> dict[str, Any]:
    """The versions of the extra's packages, None for one that is missing, and where compiled kernels are kept."""
    from importlib import metadata

    from mla_oracle.gpu.cache import folder

    def version(*names: str) -> str | None:
        for name in names:
            try:
                return metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return None

    return {
        "bindings": version("cuda-bindings"),
        "nvrtc": version("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
        "cache": str(folder()),
    }


def machine() -> dict[str, Any]:
    """The compiler, the driver and its devices; `missing` says what is not there."""
    from mla_oracle.gpu import driver, nvrtc

    found: dict[str, Any] = {"compiler": None, "driver": None, "devices": [], "missing": []}
    try:
        found["compiler"] = ".".join(map(str, nvrtc.version()))
    except MissingError as error:
        found["missing"].append(str(error))
    try:
        found |= driver.describe()
    except MissingError as error:
        found["missing"].append(str(error))
    return found
