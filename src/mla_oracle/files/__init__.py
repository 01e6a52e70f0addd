# SPDX-License-Identifier: Apache-2.0
"""Cases and results in files: exchange.py, what they hold; tensorfile.py and rawfile.py, how it is read and written."""
