# SPDX-License-Identifier: Apache-2.0
"""An engine of whole layers that shares no code with the oracle: plain numpy, one method a step, made to be got wrong.

    engine = Engine(config, weights, "bf16")     weights by their names in the checkpoint, without the prefix
    dump = engine(hidden_states, positions)      every stage as the engine stored it

It computes in f32 and rounds every stage to its dtype. wrong_layers.py overrides single steps. Rows rotated in adjacent
pairs stay where they are; rope turns complex numbers in f64.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

STORED = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f64": np.float64}

CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
    },
}
PLAIN = {key: value for key, value in CONFIG.items() if key != "rope_scaling"}
WIDE = {**CONFIG, "q_lora_rank": 512}
BIASED = {**CONFIG, "attention_bias": True}
DIRECT = {**PLAIN, "q_lora_rank": None}
LONGCAT = {**PLAIN, "model_type": "longcat_flash"}
INDEXED = {**CONFIG, "model_type": "deepseek_v32", "index_n_heads": 4, "index_head_dim": 16, "index_topk": 4}
GLM = {**PLAIN, "model_type": "glm_moe_dsa", "index_n_heads": 4, "index_head_dim": 16, "index_topk": 4}
POOLED = {
    **PLAIN, "model_type": "glm5_next_text", "qk_rope_head_dim": 0, "index_n_heads": 4, "index_head_dim": 16,
    "index_topk": 4, "index_kpool": 2,
}  # fmt: skip


def random_weights(config: dict, seed: int = 3) -> dict[str, np.ndarray]:
    """f32, by the names of the checkpoint: projections that keep the size of their input, norms near 1."""
    rng = np.random.default_rng(seed)
    heads, hidden, rank = config["num_attention_heads"], config["hidden_size"], config["q_lora_rank"]
    P, R, V, L = (config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
    shapes = {"q_proj.weight": (heads * (P + R), hidden)}
    if rank is not None:
        shapes = {
            "q_a_proj.weight": (rank, hidden),
            "q_a_layernorm.weight": (rank,),
            "q_b_proj.weight": (heads * (P + R), rank),
        }
    shapes |= {
        "kv_a_proj_with_mqa.weight": (L + R, hidden),
        "kv_a_layernorm.weight": (L,),
        "kv_b_proj.weight": (heads * (P + V), L),
        "o_proj.weight": (hidden, heads * V),
    }
    if config.get("attention_bias"):
        names = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")
        shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in names if f"{name}.weight" in shapes}
    if "index_n_heads" in config:
        n, d = config["index_n_heads"], config["index_head_dim"]
        shapes |= {
            "indexer.wq_b.weight": (n * d, rank),
            "indexer.wk.weight": (d, hidden),
            "indexer.k_norm.weight": (d,),
            "indexer.k_norm.bias": (d,),
            "indexer.weights_proj.weight": (n, hidden),
        }
    if "index_kpool" in config:
        shapes |= {
            "indexer.index_kpool_compress_ape": (config["index_kpool"], d),
            "indexer.index_kpool_compress_gate": (d, hidden),
        }
    weights = {}
    for name, shape in shapes.items():
        x = rng.standard_normal(shape)
        if len(shape) == 1:
            x = x / (1 if "proj.bias" in name or "mqa.bias" in name else 5) if name.endswith("bias") else 1 + x / 5
        else:
            x *= (3 if name.startswith(("q_b", "q_proj")) else 1) / math.sqrt(shape[-1])
        weights[name] = x.astype(np.float32)
    return weights


def random_states(config: dict, tokens: int, seed: int = 5, size: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (size * rng.standard_normal((tokens, config["hidden_size"]))).astype(np.float32)


class Engine:
    def __init__(self, config: dict, weights: dict[str, np.ndarray], dtype: str = "f32", naive: bool = True) -> None:
        self.config, self.dtype, self.naive = config, STORED[dtype], naive
        self.real = np.float64 if dtype == "f64" else np.float32
        self.weights = {name: w.astype(self.dtype).astype(self.real) for name, w in weights.items()}
        self.H, self.P, self.R, self.V, self.L = (
            config[f"{k}"]
            for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
        )
        self.rope_scaling = config.get("rope_scaling")

    def __call__(self, hidden_states, positions, past=None):
        self.stages = {}
        x = np.asarray(hidden_states).astype(self.real)
        past_c, past_pe = (past or {}).get("past_c_kv"), (past or {}).get("past_k_pe")
        past_c = np.zeros((0, self.L), self.real) if past_c is None else past_c.astype(self.real)
        past_pe = np.zeros((0, self.R), self.real) if past_pe is None else past_pe.astype(self.real)
        if self.config["q_lora_rank"] is None:
            q = self.keep("q", self.heads(self.linear(x, "q_proj")))
        else:
            q_a = self.keep("q_a", self.linear(x, "q_a_proj"))
            q_a = self.keep("q_a_norm", self.norm(q_a, "q_a_layernorm"))
            q = self.keep("q", self.heads(self.linear(q_a, "q_b_proj")))
        kv_a = self.keep("kv_a", self.linear(x, "kv_a_proj_with_mqa"))
        latent, pe = self.split_kv(kv_a)
        c_kv = self.keep("c_kv", self.scale_kv(self.keep("kv_a_norm", self.norm_kv(latent))))
        q_nope, q_pe = self.split_q(q)
        q_nope = self.keep("q_nope", self.scale_q(q_nope))
        q_pe = self.keep("q_pe", self.scale_q(self.rope_q(q_pe, positions)))
        k_pe = self.keep("k_pe", self.rope_k(pe[:, None], positions)[:, 0])
        before, new = np.concatenate([past_c, past_pe], 1), np.concatenate([c_kv, k_pe], 1)
        cache = self.keep("kv_cache", self.append(before, new))
        seen = self.seen(len(x), len(cache))
        if "index_n_heads" in self.config:
            seen = seen & self.index(x, q_a, positions, past or {}, seen)
        w_uk, w_uv = self.parts()
        c, pe = cache[:, : self.L], cache[:, self.L :]
        if self.naive:
            k = self.keep("k_nope", np.einsum("nl,hpl->nhp", c, w_uk))
            v = self.keep("v", np.einsum("nl,hvl->nhv", c, w_uv))
            scores = np.einsum("thp,nhp->thn", q_nope, k)
        else:
            q_lat = self.keep("q_lat", np.einsum("thp,hpl->thl", q_nope, w_uk))
            scores = np.einsum("thl,nl->thn", q_lat, c)
        scores = (scores + np.einsum("thr,nr->thn", q_pe, pe)) * self.real(self.softmax_scale())
        scores = np.where(seen[:, None], scores, -np.inf).astype(self.real)
        self.stages["scores"] = scores
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        total = weights.sum(-1, keepdims=True)
        self.stages["lse"] = (scores.max(-1, keepdims=True) + np.log(total))[..., 0]
        p = self.keep("p", weights / total)
        if self.naive:
            attn = np.einsum("thn,nhv->thv", p, v)
        else:
            attn = np.einsum("thl,hvl->thv", self.keep("o_lat", np.einsum("thn,nl->thl", p, c)), w_uv)
        attn = self.keep("attn", attn)
        self.keep("out", self.linear(self.joined(attn), "o_proj"))
        return self.stages

    def keep(self, name, value):
        stored = value.astype(self.real).astype(self.dtype)
        self.stages[name] = stored
        return stored.astype(self.real)

    def linear(self, x, name):
        found = x @ self.weights[f"{name}.weight" if f"{name}.weight" in self.weights else name].T
        return found + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else found

    def norm(self, x, name):
        mean = np.mean(np.square(x), axis=-1, keepdims=True)
        return x / np.sqrt(mean + self.real(self.eps())) * self.weights[f"{name}.weight"]

    def eps(self):
        return self.config["rms_norm_eps"]

    def heads(self, q):
        return q.reshape(len(q), self.H, self.P + self.R)

    def split_q(self, q):
        return q[..., : self.P], q[..., self.P :]

    def split_kv(self, kv):
        return kv[:, : self.L], kv[:, self.L :]

    def norm_kv(self, latent):
        return self.norm(latent, "kv_a_layernorm")

    def scale_kv(self, c):
        return c * self.real(math.sqrt(self.config["hidden_size"] / self.L)) if self.longcat else c

    def scale_q(self, q):
        return q * self.real(math.sqrt(self.config["hidden_size"] / self.config["q_lora_rank"])) if self.longcat else q

    @property
    def longcat(self):
        return self.config["model_type"] == "longcat_flash"

    def angles(self, positions):
        """[T, R/2] in f64, and the amplitude."""
        j = np.arange(self.R // 2)
        base = self.config["rope_theta"]
        frequency = base ** (-2.0 * j / self.R)
        amplitude = 1.0
        if self.rope_scaling:
            y = self.rope_scaling
            edge = [
                self.R * math.log(y["original_max_position_embeddings"] / (beta * 2 * math.pi)) / (2 * math.log(base))
                for beta in (y["beta_fast"], y["beta_slow"])
            ]
            low, high = max(math.floor(edge[0]), 0), min(math.ceil(edge[1]), self.R - 1)
            ramp = np.clip((j - low) / max(high - low, 1e-3), 0, 1)
            frequency = frequency / y["factor"] * ramp + frequency * (1 - ramp)
            m = [0.1 * y[key] * math.log(y["factor"]) + 1 for key in ("mscale", "mscale_all_dim")]
            amplitude = m[0] / m[1]
        return np.asarray(positions)[:, None] * frequency, amplitude

    def rope(self, x, positions):
        theta, amplitude = self.angles(positions)
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * (amplitude * np.exp(1j * theta))[:, None]
        return np.stack([turned.real, turned.imag], -1).reshape(x.shape).astype(self.real)

    def rope_halves(self, x, positions):
        half = self.R // 2
        theta, amplitude = self.angles(positions)
        turned = (x[..., :half] + 1j * x[..., half:]) * (amplitude * np.exp(1j * theta))[:, None]
        return np.concatenate([turned.real, turned.imag], -1).astype(self.real)

    def rope_q(self, x, positions):
        return self.rope(x, positions) if self.R else x

    def rope_k(self, x, positions):
        return self.rope(x, positions) if self.R else x

    def append(self, past, new):
        return np.concatenate([past, new])

    def seen(self, queries, rows):
        return np.arange(rows) <= (rows - queries + np.arange(queries))[:, None]

    def parts(self):
        w = self.weights["kv_b_proj.weight"].reshape(self.H, self.P + self.V, self.L)
        return w[:, : self.P], w[:, self.P :]

    def softmax_scale(self):
        y = self.rope_scaling
        m = 0.1 * y["mscale_all_dim"] * math.log(y["factor"]) + 1 if y else 1.0
        return m * m / math.sqrt(self.P + self.R)

    def joined(self, attn):
        return attn.reshape(len(attn), -1)

    # The indexer.

    def index(self, x, q_a, positions, past, seen):
        """[T, N] bool."""
        n, d = self.config["index_n_heads"], self.config["index_head_dim"]
        q = self.linear(q_a, "indexer.wq_b").reshape(len(x), n, d)
        q = self.keep("index_q", self.index_transform(self.index_rope(q, positions)))
        k = self.index_norm(self.linear(x, "indexer.wk"))
        k = self.keep("index_k", self.index_transform(self.index_rope(k[:, None], positions))[:, 0])
        keys = np.concatenate([past["past_index_k"].astype(self.real), k]) if "past_index_k" in past else k
        size = self.config.get("index_kpool", 1)
        if "index_kpool" in self.config:
            gate = self.keep("index_gate", self.linear(x, "indexer.index_kpool_compress_gate"))
            if "past_index_gate" in past:
                gate = np.concatenate([past["past_index_gate"].astype(self.real), gate])
            pools = []
            for i in range(len(keys) // size):
                part = slice(i * size, (i + 1) * size)
                logits = gate[part] + self.weights["indexer.index_kpool_compress_ape"]
                e = np.exp(logits - logits.max(0))
                pools.append((e / e.sum(0) * keys[part]).sum(0))
            keys = self.keep("index_keys", np.array(pools, self.real).reshape(-1, d))
        weights = self.linear(x, "indexer.weights_proj") * self.real(self.index_scale())
        self.stages["index_weights"] = weights
        products = np.einsum("tnd,kd->tnk", self.index_multiplied(q), self.index_multiplied(keys))
        products = self.relu(products / self.real(math.sqrt(d)))
        scores = np.einsum("tn,tnk->tk", weights, products).astype(self.real)
        visible = seen[:, size - 1 :: size]
        self.stages["index_scores"] = np.where(visible, scores, -np.inf).astype(self.real)
        chosen = np.zeros(seen.shape, bool)
        width = self.config["index_topk"] + (size - 1 if "index_kpool" in self.config else 0)
        topk = np.full((len(x), width), -1)
        for t in range(len(x)):
            candidates = np.flatnonzero(visible[t])
            best = self.best(scores[t], candidates)[: self.config["index_topk"] // size]
            tokens = [size * i + j for i in sorted(best) for j in range(size)]
            if "index_kpool" in self.config:
                count = int(seen[t].sum())
                tokens += list(range(count - count % size, count))
            chosen[t, tokens] = True
            topk[t, : len(tokens)] = tokens
        self.stages["topk"] = topk
        return chosen

    def index_transform(self, x):
        return x

    def index_multiplied(self, x):
        return x

    def best(self, scores, candidates):
        return sorted(candidates, key=lambda i: (-scores[i], i))

    def relu(self, x):
        return np.maximum(x, 0)

    def index_scale(self):
        return self.config["index_n_heads"] ** -0.5

    def index_rope(self, x, positions):
        if not self.R:
            return x
        turn = self.rope if self.config["model_type"] == "glm_moe_dsa" else self.rope_halves
        return np.concatenate([turn(x[..., : self.R], positions), x[..., self.R :]], -1)

    def index_norm(self, k):
        centred = k - k.mean(-1, keepdims=True)
        variance = np.mean(np.square(centred), -1, keepdims=True)
        scaled = centred / np.sqrt(variance + self.real(1e-6))
        return scaled * self.weights["indexer.k_norm.weight"] + self.weights["indexer.k_norm.bias"]


class TransformedEngine(Engine):
    """The indexer as DeepSeek published it: Hadamard, and q and k in e4m3 with a power of two a row."""

    def index_transform(self, x):
        matrix = np.array([[1.0]])
        while len(matrix) < x.shape[-1]:
            matrix = np.kron([[1, 1], [1, -1]], matrix)
        return (x.astype(np.float64) @ matrix / math.sqrt(len(matrix))).astype(self.real)

    def index_multiplied(self, x):
        largest = np.maximum(np.abs(x).max(-1, keepdims=True), 1e-4).astype(np.float64)
        scale = 2.0 ** np.ceil(np.log2(largest / 448))
        held = np.clip(x / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        return (held.astype(np.float64) * scale).astype(self.real)
