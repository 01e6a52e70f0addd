# SPDX-License-Identifier: Apache-2.0
"""The fast tier: the strict tier's functions, blocked for the machine. One source, one build per instruction set.

Every function here trusts its arguments: `mla_oracle.forms` checks them.
"""
