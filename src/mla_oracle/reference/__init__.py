# SPDX-License-Identifier: Apache-2.0
"""The strict tier: sequential loops in the order the definitions give, float and double from one source.

Every function here trusts its arguments: the public forms (mla_oracle.dense, mla_oracle.paged) check them.
"""
