// SPDX-License-Identifier: Apache-2.0
// Paged decode of 16 heads by one block on tensor cores: what the interpreter is measured and tested with.
//
// bf16 queries and cache, keys of 576 numbers whose first 512 are the value, tiles of 64 keys, two of them in flight.
// Eight warps. Scores: each warp has 8 keys, and the queries in registers. Values: each warp has 64 columns.
// Chunk c (16 bytes) of a key lies at c ^ key % 8, so that ldmatrix meets no bank twice.
constexpr int D = 576, V = 512, HEADS = 16, TILE = 64, WARPS = 8, CHUNKS = D / 8, PITCH = TILE + 8;

struct Shared {
    unsigned short keys[2][TILE * D];
    unsigned short weights[HEADS * PITCH];
    float maxima[WARPS][HEADS], sums[WARPS][HEADS];
    long long rows[2][TILE];  // where a key lies in the cache, -1: nowhere
};

__device__ unsigned address_of(const void *shared) { return (unsigned)__cvta_generic_to_shared(shared); }

__device__ const unsigned short *key_chunk(const unsigned short *tile, int key, int chunk) {
    return tile + (key * CHUNKS + (chunk ^ key % 8)) * 8;
}

__device__ void copy_chunk(const void *shared, const void *global, int bytes) {  // 16, of which the rest are zeros
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address_of(shared)), "l"(global), "r"(bytes)
                 : "memory");
}

__device__ void load4(unsigned (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address_of(row)) : "memory");
}

__device__ void load4_turned(unsigned (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address_of(row)) : "memory");
}

__device__ void multiply(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ unsigned pack(float low, float high) {
    unsigned y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

// The warp's 8 keys of a tile, on their way into `stage`.
__device__ void fetch(Shared &sm, int stage, int first, int len, const unsigned short *cache, long long page_stride,
                      const int *table, int block_size) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane < 8) {
        int token = first + warp * 8 + lane;
        bool there = token < len;
        long long page = there ? table[token / block_size] : 0;
        sm.rows[stage][warp * 8 + lane] = there ? page * page_stride + (long long)(token % block_size) * D : -1;
    }
    __syncwarp();
    for (int i = lane; i < 8 * CHUNKS; i += 32) {
        int key = warp * 8 + i / CHUNKS, chunk = i % CHUNKS;
        long long row = sm.rows[stage][key];
        copy_chunk(key_chunk(sm.keys[stage], key, chunk), cache + (row < 0 ? 0 : row) + chunk * 8, row < 0 ? 0 : 16);
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) tensor_decode(
    const unsigned short *q,      // [B, H, D]
    const unsigned short *cache,  // [num_blocks, block_size, D], pages page_stride elements apart
    const int *block_table,       // [B, max_blocks]
    const int *seq_lens,          // [B]
    float *out,                   // [B, H, V]
    float *lse,                   // [B, H], natural log
    int H, int block_size, int max_blocks, long long page_stride, float scale
) {
    extern __shared__ __align__(16) unsigned char dynamic[];
    Shared &sm = *(Shared *)dynamic;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    int b = blockIdx.y, head = blockIdx.x * HEADS, len = seq_lens[b], tiles = (len + TILE - 1) / TILE;
    const int *table = block_table + (long long)b * max_blocks;

    // Queries: through the first stage into registers, rows past H as zeros.
    for (int i = threadIdx.x; i < HEADS * CHUNKS; i += WARPS * 32) {
        int row = i / CHUNKS, chunk = i % CHUNKS;
        bool there = head + row < H;
        copy_chunk(key_chunk(sm.keys[0], row, chunk), q + ((long long)b * H + (there ? head + row : 0)) * D + chunk * 8,
                   there ? 16 : 0);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    unsigned query[D / 16][4];
    for (int k = 0; k < D / 16; k++) load4(query[k], key_chunk(sm.keys[0], lane % 16, 2 * k + lane / 16));
    __syncthreads();

    for (int stage = 0; stage < 2; stage++) {
        if (stage < tiles) fetch(sm, stage, stage * TILE, len, cache, page_stride, table, block_size);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    float o[V / WARPS / 8][4] = {}, m[2] = {-1e30f, -1e30f}, l[2] = {};
    for (int tile = 0; tile < tiles; tile++) {
        const unsigned short *keys = sm.keys[tile % 2];
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();  // the tile has arrived

        float s[4] = {};
        for (int k = 0; k < D / 32; k++) {
            unsigned r[4];
            load4(r, key_chunk(keys, warp * 8 + lane % 8, 4 * k + lane / 8));
            multiply(s, query[2 * k], r[0], r[1]);
            multiply(s, query[2 * k + 1], r[2], r[3]);
        }
        for (int i = 0; i < 4; i++) {
            int token = tile * TILE + warp * 8 + 2 * t + i % 2;
            s[i] = token < len ? s[i] * (scale * 1.44269504f) : -1e30f;  // tail
        }
        for (int half = 0; half < 2; half++) {
            float top = fmaxf(s[2 * half], s[2 * half + 1]);
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            if (t == 0) sm.maxima[warp][g + 8 * half] = top;
        }
        __syncthreads();  // maxima are there
        for (int half = 0; half < 2; half++) {
            float top = m[half];
            for (int w = 0; w < WARPS; w++) top = fmaxf(top, sm.maxima[w][g + 8 * half]);
            float rescale = exp2_of(m[half] - top);
            float p0 = exp2_of(s[2 * half] - top), p1 = exp2_of(s[2 * half + 1] - top);
            *(unsigned *)&sm.weights[(g + 8 * half) * PITCH + warp * 8 + 2 * t] = pack(p0, p1);
            l[half] = l[half] * rescale + p0 + p1;
            m[half] = top;
            for (int n = 0; n < V / WARPS / 8; n++) o[n][2 * half] *= rescale, o[n][2 * half + 1] *= rescale;
        }
        __syncthreads();  // weights are there

        for (int k = 0; k < TILE / 16; k++) {
            unsigned a[4];
            load4(a, &sm.weights[lane % 16 * PITCH + k * 16 + lane / 16 * 8]);
            for (int n = 0; n < V / WARPS / 16; n++) {
                unsigned r[4];
                load4_turned(r, key_chunk(keys, k * 16 + lane % 16, warp * 8 + 2 * n + lane / 16));
                multiply(o[2 * n], a, r[0], r[1]);
                multiply(o[2 * n + 1], a, r[2], r[3]);
            }
        }
        __syncthreads();  // the stage is free
        if (tile + 2 < tiles) fetch(sm, tile % 2, (tile + 2) * TILE, len, cache, page_stride, table, block_size);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

    for (int half = 0; half < 2; half++) {
        l[half] += __shfl_xor_sync(~0u, l[half], 1);
        l[half] += __shfl_xor_sync(~0u, l[half], 2);
        if (t == 0) sm.sums[warp][g + 8 * half] = l[half];
    }
    __syncthreads();  // sums are there
    for (int half = 0; half < 2; half++) {
        int row = head + g + 8 * half;
        float sum = 0;
        for (int w = 0; w < WARPS; w++) sum += sm.sums[w][g + 8 * half];
        if (row < H) {
            float *to = out + ((long long)b * H + row) * V + warp * (V / WARPS) + 2 * t;
            for (int n = 0; n < V / WARPS / 8; n++) {
                to[8 * n] = tiles ? o[n][2 * half] / sum : 0;
                to[8 * n + 1] = tiles ? o[n][2 * half + 1] / sum : 0;
            }
            if (warp == 0 && t == 0)
                lse[(long long)b * H + row] = tiles ? m[half] / 1.44269504f + logf(sum) : -__int_as_float(0x7f800000);
        }
    }
}
