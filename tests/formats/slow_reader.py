# SPDX-License-Identifier: Apache-2.0
"""What one row of a cache stands for, read byte by byte from the descriptions of the formats; slow, nothing vectorised.

row(name, reader, tensors, block, offset) -> [D] floats, tensors as `formats.read` takes them. Floats are decoded from
their fields; a product is exact in f64 (at most 4 + 24 bits) and rounded by `dtypes.round_to`, which has its own tests.
"""

import math
import struct

import numpy as np

from mla_oracle.dtypes import round_to

NAN, INF = math.nan, math.inf


def e4m3(code):
    if code & 0x7F == 0x7F:
        return NAN
    return small(code, mantissa=3, bias=7)


def e4m3fnuz(code):
    return NAN if code == 0x80 else small(code, mantissa=3, bias=8)


def e5m2(code):
    if code & 0x7C == 0x7C:
        return NAN if code & 3 else math.copysign(INF, -1 if code & 0x80 else 1)
    return small(code, mantissa=2, bias=15)


def e2m1(code):
    return small(code << 4, mantissa=1, bias=1, bits=2, shift=4)


def small(code, mantissa, bias, bits=None, shift=0):
    """A float of 8 bits by its fields; the low `shift` bits are none of it."""
    sign, rest = code >> 7, (code & 0x7F) >> shift
    exponent, fraction = rest >> mantissa, rest & (1 << mantissa) - 1
    if exponent:
        fraction += 1 << mantissa
    value = math.ldexp(fraction, max(exponent, 1) - bias - mantissa)
    return -value if sign else value


def bf16(two):
    return struct.unpack("<f", b"\0\0" + bytes(two))[0]


def f32(four):
    return struct.unpack("<f", bytes(four))[0]


def e8m0(code, reader):
    zero, top = {"bf16": (2.0**-127, NAN), "exp2": (2.0**-127, INF), "guarded": (0.0, NAN), "shift": (0.0, INF)}[reader]
    return zero if code == 0 else top if code == 255 else 2.0 ** (code - 127)


def rounded(x, *names):
    for name in names:
        x = float(round_to(np.float64(x), name).astype(np.float64))
    return x


def product(x, scale, reader):
    """x * scale, scale an f32."""
    if reader == "bf16":
        scale = rounded(scale, "bf16")
    if reader in ("exponent", "e8m0_rz"):
        code = struct.unpack("<I", struct.pack("<f", scale))[0] >> 23 & 0xFF
        if reader == "e8m0_rz" and scale == INF:
            code = 254
        scale = e8m0(code, "bf16")
    exact = x * scale if not (math.isinf(scale) and x == 0) else NAN
    steps = {"fold": (), "f32": ("f32",), "f32_bf16": ("f32", "bf16"), "f32_f16": ("f32", "f16")}
    return rounded(exact, *steps.get(reader, ("bf16",)))


def row_bytes(array, block, offset):
    return bytes(array[block, offset].view(np.uint8))


def per_tensor(element, reader, tensors, block, offset):
    def scale(name, otherwise):
        value = tensors.get(name)
        if value is None:
            return otherwise
        value = np.asarray(value)
        return float(value[block, offset] if value.ndim == 2 else value.reshape(-1)[0])

    codes = row_bytes(tensors["kv_cache"], block, offset)
    kv = scale("kv_scale", None)
    if tensors.get("kpe_cache") is not None:
        tail = row_bytes(tensors["kpe_cache"], block, offset)
        scales = [kv] * len(codes) + [scale("kpe_scale", kv)] * len(tail)
        codes += tail
    else:
        scales = [kv] * (len(codes) - 64) + [scale("kpe_scale", kv)] * min(64, len(codes))
    return [product(element(c), s, reader) for c, s in zip(codes, scales, strict=True)]


def grouped(reader, tensors, block, offset):
    codes = row_bytes(tensors["kv_cache"], block, offset)
    tail = row_bytes(tensors["kpe_cache"], block, offset)
    kpe = float(np.asarray(tensors["kpe_scale"]).reshape(-1)[0])
    latent = [
        product(e4m3(c), float(tensors["ckv_scale"][block, offset, i // 128]), reader) for i, c in enumerate(codes)
    ]
    return latent + [product(e4m3(c), kpe, "bf16") for c in tail]


def ds_mla(reader, tensors, block, offset):
    data = row_bytes(tensors["kv_cache"], block, offset)
    scales = [f32(data[512 + 4 * t : 516 + 4 * t]) for t in range(4)]
    latent = [product(e4m3(data[i]), scales[i // 128], reader) for i in range(512)]
    return latent + [bf16(data[528 + 2 * i : 530 + 2 * i]) for i in range(64)]


def aiter(reader, tensors, block, offset):
    data = row_bytes(tensors["kv_cache"], block, offset)
    rope = row_bytes(tensors["kpe_cache"], block, offset)
    latent = [product(e4m3(data[i]), e8m0(data[448 + i // 32], reader), "e8m0") for i in range(448)]
    return latent + [bf16(rope[2 * i : 2 * i + 2]) for i in range(64)]


def page_of(tensors, block, token_bytes):
    """The bytes of a page, however the array is shaped, and its block size where the shape tells it."""
    array = tensors["kv_cache"].view(np.uint8)
    if array.ndim == 2:
        return bytes(array[block]), None
    return b"".join(bytes(part) for part in array[block].reshape(-1, token_bytes)), array.shape[1]


def model1(reader, tensors, block, offset, size=None):
    page, found = page_of(tensors, block, 584)
    size = size or found
    data = page[offset * 576 : offset * 576 + 576]
    scales = page[size * 576 + offset * 8 : size * 576 + offset * 8 + 8]
    latent = [product(e4m3(data[i]), e8m0(scales[i // 64], reader), "e8m0") for i in range(448)]
    return latent + [bf16(data[448 + 2 * i : 450 + 2 * i]) for i in range(64)]


def v41(reader, tensors, block, offset, size=None):
    page, found = page_of(tensors, block, 528)
    size = size or found
    data = page[offset * 512 : offset * 512 + 512]
    scales = page[size * 512 + offset * 16 : size * 512 + offset * 16 + 16]
    return [product(e4m3(data[i]), e8m0(scales[i // 32], reader), "e8m0") for i in range(512)]


def v41_fp4(reader, tensors, block, offset, size=None):
    page, found = page_of(tensors, block, 288)
    size = size or found
    data = page[offset * 256 : offset * 256 + 256]
    scales = page[size * 256 + offset * 32 : size * 256 + offset * 32 + 32]
    return [e2m1(data[i // 2] >> 4 * (i % 2) & 15) * e4m3(scales[i // 16]) for i in range(512)]


def nvfp4_ds_mla(reader, tensors, block, offset):
    data = row_bytes(tensors["kv_cache"], block, offset)
    latent = []
    for i in range(512):
        s = i // 16
        scale = e4m3(data[320 + 8 * (s % 4) + s // 4])
        latent.append(e2m1(data[i // 2] >> 4 * (i % 2) & 15) * scale)
    return latent + [e4m3(data[256 + i]) for i in range(64)]


def nvfp4_sglang(reader, tensors, block, offset):
    data = row_bytes(tensors["kv_cache"], block, offset)
    outer = float(np.asarray(tensors["kv_scale"]).reshape(-1)[0])
    inner = [e2m1(data[i // 2] >> 4 * (i % 2) & 15) * e4m3(data[256 + i // 16]) for i in range(512)]
    return [product(x, outer, reader) for x in inner] + [bf16(data[288 + 2 * i : 290 + 2 * i]) for i in range(64)]


def q8_0(reader, tensors, block, offset):
    data = row_bytes(tensors["kv_cache"], block, offset)
    values = []
    for k in range(len(data) // 34):
        d, *q = struct.unpack("<e32b", data[34 * k : 34 * k + 34])
        values += [NAN if math.isinf(d) and x == 0 else d * x for x in q]
    return values


def q6_0(reader, tensors, block, offset):
    data = row_bytes(tensors["kv_cache"], block, offset)
    values = []
    for k in range(len(data) // 26):
        (d,) = struct.unpack("<e", data[26 * k : 26 * k + 2])
        high, low = data[26 * k + 2 : 26 * k + 10], data[26 * k + 10 : 26 * k + 26]
        for j in range(32):
            nibble = low[j % 16] >> (4 if j >= 16 else 0) & 15
            two = high[j % 8] >> (0, 4, 2, 6)[j // 8] & 3
            q = nibble + 16 * two - 32
            values.append(NAN if math.isinf(d) and q == 0 else d * q)
    return values


def q8_kv(reader, tensors, block, offset):
    data = row_bytes(tensors["kv_cache"], block, offset)
    return [product(q, f32(data[:4]), reader) for q in struct.unpack(f"<{len(data) - 8}b", data[8:])]


READERS = {
    "fp8_e4m3": lambda *a: per_tensor(e4m3, *a),
    "fp8_e4m3fnuz": lambda *a: per_tensor(e4m3fnuz, *a),
    "fp8_e5m2": lambda *a: per_tensor(e5m2, *a),
    "flashinfer_fp8": lambda *a: per_tensor(e4m3, *a),
    "flashinfer_fp8_grouped": grouped,
    "fp8_ds_mla": ds_mla,
    "aiter_v4": aiter,
    "model1": model1,
    "v4.1": v41,
    "v4.1_fp4": v41_fp4,
    "nvfp4_ds_mla": nvfp4_ds_mla,
    "nvfp4_sglang": nvfp4_sglang,
    "q8_0": q8_0,
    "q6_0": q6_0,
    "q8_KV": q8_kv,
}


def row(name, reader, tensors, block, offset, **page):
    return np.array(READERS[name](reader, tensors, block, offset, **page))
