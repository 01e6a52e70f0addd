# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, one class per exit code of the command line.

    0   pass
    1   mismatch: only ever after a verdict was computed, so it is never an exception
    2   bad input or usage            InputError
    3   unsupported                   UnsupportedError
    4   no GPU, driver or package     MissingError
    70  a defect of the oracle        anything else
"""


class OracleError(Exception):
    """Base of every error the oracle raises on purpose; its text is one line."""

    exit_code = 70


class InputError(OracleError, ValueError):
    """The input is wrong: the text names the tensor, the index and the value, and what was expected."""

    exit_code = 2


class UnsupportedError(OracleError):
    """The input is valid, but what was asked to compute it cannot."""

    exit_code = 3


class MissingError(OracleError):
    """The machine lacks a device, a driver or a package."""

    exit_code = 4
