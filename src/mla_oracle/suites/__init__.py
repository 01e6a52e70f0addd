# SPDX-License-Identifier: Apache-2.0
"""Suites: cases that together see every applicable mutant, and engines run over them."""
