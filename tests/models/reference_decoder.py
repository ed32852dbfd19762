"""The decoder in NumPy float64, one token and one head at a time: what the tests compare with."""

from typing import Any

import numpy as np

from models.config import ModelConfig


def forward(config: ModelConfig, params, tokens, segment_ids=None, positions=None) -> np.ndarray:
    """Logits `[B, T, V]`; every loop is written out so that no axis convention is shared."""
    params = _float64(params)
    rows = []
    for b, row in enumerate(tokens):
        segments = np.ones(len(row), int) if segment_ids is None else segment_ids[b]
        where = np.arange(len(row)) if positions is None else positions[b]
        x = params["embedding"]["table"][row]
        for layer in range(config.num_layers):
            block = _select(params["blocks"], layer)
            normed = _norm(config, x, block["attention_norm"]["scale"])
            window = config.windows[layer]
            x = x + _attention(config, block["attention"], normed, segments, where, window)
            normed = _norm(config, x, block["mlp_norm"]["scale"])
            gate = normed @ block["mlp"]["gate"]["kernel"]
            up = normed @ block["mlp"]["up"]["kernel"]
            x = x + (gate / (1 + np.exp(-gate)) * up) @ block["mlp"]["down"]["kernel"]
        x = _norm(config, x, params["final_norm"]["scale"])
        tied = config.tie_embeddings
        rows.append(x @ (params["embedding"]["table"].T if tied else params["head"]["kernel"]))
    return np.stack(rows)


def _attention(config, params, x, segments, positions, window):
    kernels = {name: params[name]["kernel"] for name in ("query", "key", "value", "output")}
    group = config.num_heads // config.num_kv_heads
    out = np.zeros_like(x)
    for n in range(config.num_heads):
        k_head = n // group
        query = x @ kernels["query"][:, n]
        key = x @ kernels["key"][:, k_head]
        value = x @ kernels["value"][:, k_head]
        if config.qkv_bias:
            query = query + params["query"]["bias"][n]
            key = key + params["key"]["bias"][k_head]
            value = value + params["value"]["bias"][k_head]
        if config.qk_norm:
            query = _norm(config, query, params["query_norm"]["scale"])
            key = _norm(config, key, params["key_norm"]["scale"])
        query, key = (_rotate(config, y, positions) for y in (query, key))
        for t in range(len(x)):
            first = 0 if window is None else max(0, t + 1 - window)
            visible = [s for s in range(first, t + 1) if segments[s] == segments[t] >= 0]
            if not visible:
                continue
            logits = key[visible] @ query[t] / np.sqrt(config.head_dim)
            weights = np.exp(logits - logits.max())
            out[t] += (weights / weights.sum()) @ value[visible] @ kernels["output"][n]
    return out


def _rotate(config, x, positions):
    dims = config.rotary_dim or config.head_dim
    half = dims // 2
    frequencies = config.rope_theta ** (-2 * np.arange(half) / dims)
    turned = (x[:, :half] + 1j * x[:, half:dims]) * np.exp(1j * np.outer(positions, frequencies))
    return np.concatenate([turned.real, turned.imag, x[:, dims:]], axis=-1)


def _norm(config, x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * scale


def _float64(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _float64(value) for key, value in tree.items()}
    return np.asarray(tree, np.float64)


def _select(tree: Any, index: int) -> Any:
    if isinstance(tree, dict):
        return {key: _select(value, index) for key, value in tree.items()}
    return tree[index]
