# SPDX-License-Identifier: Apache-2.0
"""Published bits: sha256 (first 16 hex digits) of little-endian f32 arrays, each with the case that gives them.

DENSE: id without its kind, all six inputs joined, out of the naive form, out of the absorbed form.
PAGED: id without its kind, q, out, lse.
Measured from the two published implementations these forms are defined by, compiled without contraction.
"""

LITE = "row=576,value=512,block=16,scale=0.06623442471027374,inputs=lcg,pages=descending"

DENSE = [
    ("heads=4,nope=24,rope=8,value=32,rank=64,inputs=xorshift,seed=7",
     "0f2d10f2d3468ae6", "36afea43c167f1ca", "5703b2d38f7fc210"),
    ("heads=4,nope=24,rope=8,value=32,rank=64,inputs=xorshift,seed=186537453",
     "7364927f0ff72cb6", "071f9381a90a1abe", "abfe483e0c00158e"),
    ("heads=2,nope=16,rope=16,value=16,rank=32,inputs=xorshift,seed=8",
     "72bf19b70375eb5c", "1bbe7bdbcb11128c", "8727769160f351f6"),
    ("heads=2,nope=16,rope=16,value=16,rank=32,inputs=xorshift,seed=186537454",
     "1b8faee6c0bad6a6", "98baed5add8671ad", "3a0f2a24808cfe81"),
    ("heads=3,nope=12,rope=4,value=20,rank=48,inputs=xorshift,seed=9",
     "4fbf65d50fe1ef0e", "1aa6bb9d7741df41", "a3546829ed3ca3f8"),
    ("heads=3,nope=12,rope=4,value=20,rank=48,inputs=xorshift,seed=186537455",
     "f81e19cdc1f5b9f2", "b60b7c03fe0a2acf", "a4d78b443f79e0f4"),
    ("heads=4,nope=24,rope=8,value=32,rank=64,queries=5,cached=9,inputs=xorshift,seed=42",
     "9b1af237369f6bc5", "778fb37da9a2bc23", "60a5d3e451ca3478"),
    ("heads=2,nope=16,rope=16,value=16,rank=32,queries=3,cached=11,inputs=xorshift,seed=44",
     "06904149796f61ec", "22a8ab032304d810", "50c423d69b737c53"),
    ("heads=64,nope=192,rope=64,value=256,rank=512,cached=8,inputs=xorshift,seed=20260801",
     "bcc485ffb092d687", "b78525c7af8d7730", "5b0ec5a111ba7086"),
    ("heads=4,nope=32,rope=0,value=32,rank=64,cached=13,inputs=xorshift,seed=11",
     "230fa5059e4e92b2", "7cf78d090b6690a1", "531eaf961d49504b"),
    ("heads=4,nope=32,rope=0,value=32,rank=64,queries=5,cached=5,inputs=xorshift,seed=18",
     "48593b026fca5d8c", "633c2eb8ad9e6004", "60ddea10458c29c6"),
    ("heads=4,nope=32,rope=0,value=32,rank=64,queries=3,cached=9,inputs=xorshift,seed=24",
     "245448b0572fb171", "152e4b00d4f6e873", "a1c9ccaecfd3d9c9"),
    ("heads=4,nope=32,rope=0,value=32,rank=64,cached=13,inputs=xorshift,seed=24301",
     "962992782221b1a7", "4d582c7cded102cb", "2dd53ff187650a5b"),
    ("heads=4,nope=32,rope=0,value=32,rank=64,queries=5,cached=5,inputs=xorshift,seed=24308",
     "86b0f2a8409d4296", "da970008e033447e", "00e44682016346fd"),
    ("heads=4,nope=32,rope=0,value=32,rank=64,queries=3,cached=9,inputs=xorshift,seed=24314",
     "9572771f307827bd", "808c72e43e294518", "3c0ee7c02e7027d0"),
    ("heads=3,nope=16,rope=0,value=24,rank=48,cached=13,inputs=xorshift,seed=12",
     "154570d78df6110a", "388753079155a154", "ad13903aa4b9c6d2"),
    ("heads=3,nope=16,rope=0,value=24,rank=48,queries=5,cached=5,inputs=xorshift,seed=19",
     "5caa7db7d835ffa7", "b863cc560c365fc1", "c4ecd93b844a4754"),
    ("heads=3,nope=16,rope=0,value=24,rank=48,queries=3,cached=9,inputs=xorshift,seed=25",
     "b7a96f2270201f51", "f0949186fe0d127a", "6be0c42a3e0a8545"),
    ("heads=3,nope=16,rope=0,value=24,rank=48,cached=13,inputs=xorshift,seed=24302",
     "be7c78ceade4a8ff", "23878af8dc75f0d4", "34e251a0261d8c44"),
    ("heads=3,nope=16,rope=0,value=24,rank=48,queries=5,cached=5,inputs=xorshift,seed=24309",
     "e9444e43c7005fac", "6bafc8fbffc9faa2", "715ca4a8a2148ac5"),
    ("heads=3,nope=16,rope=0,value=24,rank=48,queries=3,cached=9,inputs=xorshift,seed=24315",
     "45878dcd25c614ee", "f668351ba621666f", "e06066f1909e1401"),
    ("heads=64,nope=256,rope=0,value=256,rank=512,cached=8,inputs=xorshift,seed=20260827",
     "40851c8f5bc67fdf", "59abda0c7d7676d0", "abe84f11c857133c"),
]

PAGED = [
    (f"heads=16,lens=256x4,{LITE},seed=11",
     "788fd7ce52a2d44e", "db82070793e5c1e0", "d341aa23141c064d"),
    (f"heads=16,lens=1+15+16+17+255+256+257+300,{LITE},seed=23",
     "a29b025169ca3174", "8798e81d56af26f9", "7dbcc95a7c1cd999"),
    (f"heads=16,lens=1+16+17+63+64+65+300,{LITE},seed=47",
     "8b82097b35f82119", "4db13b2c6806a680", "efaa3b700ad5f805"),
    (f"heads=1,lens=5+40,{LITE},seed=83",
     "0dbc82f9a4f02808", "c9d7b39c74453f92", "c95a4ff2c7300165"),
    (f"heads=17,lens=5+40,{LITE},seed=83",
     "200441ea2e623974", "1691f5183db95870", "f8f95ea19ee2fea1"),
    ("heads=8,row=288,value=256,lens=7+96+129,block=32,scale=0.05892556509887897,inputs=lcg,pages=descending,seed=97",
     "02e099aecede51fa", "60b0c5f6f284255d", "5ddfa5196cd05f6f"),
]
