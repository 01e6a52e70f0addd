# SPDX-License-Identifier: Apache-2.0
"""The verdict: compare.py gives it, metrics.py measures, and budget.py says what an honest kernel may miss.

A budget stands on numerics.py (what a kernel rounds; kernels.py has the known ones), emulate.py (an honest kernel, with
options.py and roundings.py), noise.py (its error from first principles) and parts.py (what is emulated alone).
"""
