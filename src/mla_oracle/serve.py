# SPDX-License-Identifier: Apache-2.0
"""Many cases in one process: a JSON object a line on stdin, its answer a line on stdout, until stdin ends.

    {"id": 7, "op": "check", "case": "case.safetensors", "actual": "out.safetensors"}
    {"id": 7, "ok": true, "exit_code": 1, "result": {"verdict": "fail", ...}}
    {"id": 8, "ok": false, "error": {"code": 2, "message": "seq_lens[3] is -1, expected 0 or more"}}

An error is an answer; the process goes on.
"""

from __future__ import annotations

import json
import math
import os
from typing import IO, Any

from . import commands
from .errors import InputError, OracleError

# op -> (function, request keys by the function's argument names)
OPERATIONS: dict[str, tuple[Any, dict[str, str]]] = {
    "case": (commands.make_case, {"case_id": "case", "out": "out", "dialect": "dialect"}),
    "run": (commands.run, {"source": "case", "out": "out", "precision": "precision", "backend": "backend",
                           "out_dtype": "out_dtype", "kernel": "kernel", "isa": "isa", "threads": "threads",
                           "dialect": "dialect"}),
    "check": (commands.check, {"source": "case", "actual": "actual", "tol": "tol", "atol": "atol", "rtol": "rtol",
                               "numerics": "numerics", "rules": "rules", "diagnose": "diagnose", "blind": "blind",
                               "complete": "complete", "stages": "stages", "dialect": "dialect"}),
    "diagnose": (commands.diagnose, {"source": "case", "actual": "actual", "numerics": "numerics",
                                     "dialect": "dialect"}),
    "explain": (commands.explain, {"source": "case", "blind": "blind", "numerics": "numerics", "dialect": "dialect"}),
    "dialects": (commands.dialects, {}),
    "info": (commands.info, {}),
}
REQUIRED = {"case": ("case", "out"), "run": ("case",), "check": ("case", "actual"), "diagnose": ("case", "actual"),
            "explain": ("case",), "dialects": (), "info": ()}
TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(("tol", "atol", "rtol"), ((int, float), "a number")),
    "threads": ((int,), "an integer"),
}


def serve(requests: IO[bytes], answers: IO[str]) -> int:
    """Answer every line of `requests`; 0 when they end."""
    for line in requests:
        if line.strip():
            try:
                answers.write(json.dumps(answer(line), allow_nan=False) + "\n")
                answers.flush()
            except OSError as error:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                raise InputError(f"stdout cannot be written: {error.strerror}") from None
    return 0


def answer(line: bytes) -> dict[str, Any]:
    """The answer to one request."""
    identity = None
    try:
        request = _parse(line)
        identity = request.pop("id", None)
        result = _perform(request)
        failed = result.get("verdict") == "fail"
        return {"id": identity, "ok": True, "exit_code": int(failed), "result": result}
    except OracleError as error:
        code, message = error.exit_code, str(error)
    except MemoryError:
        code, message = 4, "not enough memory for this case"
    except Exception as error:
        code, message = 70, f"internal error: {type(error).__name__}: {error}"
    return {"id": identity, "ok": False, "error": {"code": code, "message": " ".join(message.split())}}


def _parse(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        raise InputError("the request is not JSON, expected one object on one line") from None
    if not isinstance(request, dict):
        raise InputError(f"the request is a JSON {type(request).__name__}, expected an object")
    return request


def _refuse(text: str) -> None:
    raise ValueError(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _perform(request: dict[str, Any]) -> dict[str, Any]:
    op = request.pop("op", None)
    if not isinstance(op, str) or op not in OPERATIONS:
        raise InputError(f"op is {op!r}, expected {', '.join(OPERATIONS)}")
    function, names = OPERATIONS[op]
    for key, value in request.items():
        if key not in names.values():
            raise InputError(f"{op} does not take {key}, expected {', '.join(names.values()) or 'nothing'}")
        if key in ("diagnose", "blind", "complete", "stages"):
            if not isinstance(value, bool):
                raise InputError(f"{key} is {value!r}, expected true or false")
            continue
        if isinstance(value, int) and abs(value) >= 2**64:
            raise InputError(f"{key} is an integer of more than 64 bits, expected a number")
        kinds, words = TYPES.get(key, ((str,), "a string"))
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise InputError(f"{key} is {value!r}, expected {words}")
    for key in REQUIRED[op]:
        if key not in request:
            raise InputError(f"{op} needs {key}")
    result: dict[str, Any] = function(**{argument: request[key] for argument, key in names.items() if key in request})
    return result
