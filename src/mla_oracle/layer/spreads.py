# SPDX-License-Identifier: Apache-2.0
"""The errors of every stage, by its name (spread.py says how they are found)."""

from . import spread_attention, spread_indexer, spread_projections

SPREADS = spread_projections.SPREADS | spread_attention.SPREADS | spread_indexer.SPREADS
