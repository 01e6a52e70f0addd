# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels kept on disk: `compile` is gpu.nvrtc's, with a memory.

One file per source, options, NVRTC and architecture, under MLA_ORACLE_CACHE, or mla-oracle in XDG_CACHE_HOME or
~/.cache. A file holds the digest of its key and content: one that was cut off or altered is compiled again.
Files appear whole, under a temporary name first, so that any number of processes may compile at once. A folder
that cannot be written is said once, by logging, and done without.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from mla_oracle.gpu import nvrtc
from mla_oracle.gpu.nvrtc import Compiled

VARIABLE = "MLA_ORACLE_CACHE"
_MAGIC = b"mla-oracle-kernel/1\n"
_log = logging.getLogger("mla_oracle")
_said: set[str] = set()  # folders that cannot be written


def compile(
    source: str, arch: str, *, name: str, lineinfo: bool = True, options: Sequence[str] = ()
) -> Compiled:
    """`nvrtc.compile` of the same arguments, from the disk if it was compiled before."""
    key = _key([source, arch, name, lineinfo, list(options), list(nvrtc.OPTIONS), nvrtc.identity(source)])
    path = folder() / f"{key}.kernel"
    compiled = _load(path, key)
    if compiled is None:
        compiled = nvrtc.compile(source, arch, name=name, lineinfo=lineinfo, options=options)
        _store(path, key, compiled)
    return compiled


def folder() -> Path:
    """Where compiled kernels are kept; it need not exist yet. Without a home they go with the process."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home and os.path.isabs(home) else Path.home() / ".cache") / "mla-oracle"
    except RuntimeError:  # a user without a home, as in a container
        return Path(_temporary())


def subfolder(name: str) -> Path:
    """A folder of the cache that exists; where the cache cannot be written, one that goes with the process."""
    path = folder() / name
    try:
        path.mkdir(parents=True, exist_ok=True)
        if os.access(path, os.W_OK) or any(path.iterdir()):
            return path
    except OSError as error:
        _say_unwritable(error)
    return Path(_temporary())


def _key(parts: list[object]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + content).hexdigest().encode() + b"\n"


def _load(path: Path, key: str) -> Compiled | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    start = len(_MAGIC) + 65
    content = data[start:]
    if data[:start] != _MAGIC + _digest(key, content):
        return None
    parts = json.loads(content)
    return Compiled(parts["ptx"], base64.b85decode(parts["cubin"]), parts["log"])


def _store(path: Path, key: str, compiled: Compiled) -> None:
    parts = {"ptx": compiled.ptx, "cubin": base64.b85encode(compiled.cubin).decode(), "log": compiled.log}
    content = json.dumps(parts).encode()
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem[:16]}-")
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + _digest(key, content) + content)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        _say_unwritable(error)


def _say_unwritable(error: OSError) -> None:
    where = str(folder())
    if where not in _said:
        _said.add(where)
        _log.warning("mla-oracle: compiled kernels are not kept: %s: %s (see %s)", where, error.strerror, VARIABLE)


@lru_cache(maxsize=1)
def _temporary() -> str:
    where = tempfile.mkdtemp(prefix="mla-oracle-")
    atexit.register(shutil.rmtree, where, ignore_errors=True)
    return where
