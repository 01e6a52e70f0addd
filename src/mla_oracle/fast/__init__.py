# SPDX-License-Identifier: Apache-2.0
"""The fast tier: the strict tier's functions, blocked for the machine; one source, many builds.

Every function here trusts its arguments: the public forms (mla_oracle.dense, mla_oracle.paged) check them.
"""
