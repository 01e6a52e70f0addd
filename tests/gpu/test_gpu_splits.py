# SPDX-License-Identifier: Apache-2.0
"""paged_mma.split_keys: the splits that fill a machine, against every other choice."""

import re

import pytest

from mla_oracle.gpu import paged, paged_mma, sources

MACHINES = {"A100": ("sm_80", 108), "H200": ("sm_90a", 132), "B200": ("sm_100", 148), "RTX 4090": ("sm_89", 128)}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("queries", [16, 64, 128])
def test_one_request_has_a_block_for_nearly_every_multiprocessor_and_one_wave_of_them(name, queries):
    arch, multiprocessors = MACHINES[name]
    keys = paged_mma.split_keys(1, queries, 32768, arch, multiprocessors)
    blocks = -(-queries // paged_mma.tile(576, arch)[0]) * -(-32768 // keys)
    assert 0.85 * multiprocessors <= blocks <= multiprocessors


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("B", [1, 3, 32, 128, 200])
@pytest.mark.parametrize("longest", [1, 63, 1024, 4097, 32768])
def test_no_other_split_takes_less_time_by_its_own_reckoning(name, B, longest):
    arch, multiprocessors = MACHINES[name]
    rows, tile = paged_mma.tile(576, arch)
    groups = B * -(-80 // rows)

    def time(keys):
        waves = -(-groups * -(-longest // keys) // multiprocessors)
        return waves * (keys + paged_mma.START * rows)

    keys = paged_mma.split_keys(B, 80, longest, arch, multiprocessors)
    assert keys % tile == 0 and keys - tile < longest
    assert time(keys) == min(map(time, range(tile, longest + tile, tile)))


def test_requests_that_fill_the_machine_are_not_split():
    assert paged_mma.split_keys(132, 64, 32768, "sm_90", 132) == 32768
    assert paged_mma.split_keys(128, 128, 4096, "sm_90", 132) == 4096


def test_no_keys_are_one_split():
    assert paged_mma.split_keys(1, 16, 0, "sm_90", 132) == 64


@pytest.mark.parametrize("file", ["paged_mma.cu", "paged_wgmma.cu"])
def test_the_headers_say_what_decode_runs(file):
    said = " ".join(re.findall(r"^// (.*)", sources.read(file), re.MULTILINE))
    assert f"Decode takes splits of {paged.SPLIT_KEYS} keys whatever the batch and the machine" in said


def test_the_kernels_header_says_what_the_rule_gives():
    said = " ".join(re.findall(r"^// (.*)", sources.read("paged_mma.cu"), re.MULTILINE))
    for B, words in ((1, r"at B = 1 and T x H = 16, 64, 128, an A100 takes (.*?), an H200 (.*?), a B200 (.*?);"),):
        for name, numbers in zip(("A100", "H200", "B200"), re.search(words, said).groups(), strict=True):
            rule = [paged_mma.split_keys(B, queries, 32768, *MACHINES[name]) for queries in (16, 64, 128)]
            assert numbers == ", ".join(map(str, rule))
    many = [[paged_mma.split_keys(128, queries, 32768, *MACHINES[n]) for queries in (16, 64, 128)] for n in MACHINES]
    assert many[:3] == [[6560] * 3, [32768] * 3, [4096, 4096, 8192]]
    assert "at B = 128 an A100 6560, an H200 all of them, a B200 4096, 4096, 8192." in said


def test_the_header_of_the_kernel_of_hopper_says_what_the_rule_gives():
    said = " ".join(re.findall(r"^// (.*)", sources.read("paged_wgmma.cu"), re.MULTILINE))
    rule = [[paged_mma.split_keys(B, queries, 32768, "sm_90a", 132) for queries in (16, 64, 128)] for B in (1, 128)]
    assert rule[1] == [32768] * 3
    assert f"an H100 and an H200 take {', '.join(map(str, rule[0]))}; at B = 128 all of them." in said
