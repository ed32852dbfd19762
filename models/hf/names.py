"""Which tensor of a Hugging Face checkpoint holds which of our parameters, and in what layout.

A linear layer of torch stores `[out, in]`; ours is `[in..., out...]` with heads as an axis of its
own. RoPE is half-split on both sides, so no row of the query and key weights moves. Phi-3 stacks
query, key and value (and gate and up) along `out`: one tensor, several parts.
"""

import math
from dataclasses import dataclass

import numpy as np

from models.config import ModelConfig
from models.hf.config import FAMILIES

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Part:
    """A run of rows of a stored tensor that is one parameter, or one layer of it.

    Args:
        path: keys of the parameter in the nested dict.
        layer: index along its leading axis L, or None for a parameter without one.
        shape: of that parameter, without L.
        inputs: how many leading axes of `shape` a linear layer contracts; 0 is stored as it is.
    """

    path: tuple[str, ...]
    layer: int | None
    shape: tuple[int, ...]
    inputs: int = 0

    @property
    def rows(self) -> int:
        """Length of the part along the first axis of the stored tensor."""
        return math.prod(self.shape[self.inputs :]) if self.inputs else self.stored[0]

    @property
    def stored(self) -> tuple[int, ...]:
        """Shape in the file."""
        if self.inputs:
            return self.rows, math.prod(self.shape[: self.inputs])
        # The embedding is a matrix that no linear layer contracts; all else here is a vector.
        return self.shape if self.path[-1] == "table" else (math.prod(self.shape),)

    def from_stored(self, x: np.ndarray) -> np.ndarray:
        """The parameter of the stored rows `x`."""
        return (x.T if self.inputs else x).reshape(self.shape)

    def to_stored(self, x: np.ndarray) -> np.ndarray:
        """The stored rows of the parameter `x`."""
        if not self.inputs:
            return x.reshape(self.stored)
        return x.reshape(self.stored[::-1]).T


Tensors = dict[str, tuple[Part, ...]]
"""Stored name to its parts, in the order of their rows."""


def stored_shape(parts: tuple[Part, ...]) -> tuple[int, ...]:
    """Shape of a stored tensor of these parts."""
    return sum(part.rows for part in parts), *parts[0].stored[1:]


def tensors(config: ModelConfig, family: str) -> Tensors:
    """Every tensor of a checkpoint of this model. Tied embeddings have no `lm_head.weight`."""
    model, vocab = config.d_model, config.vocab_size
    named: Tensors = {EMBEDDING: (Part(("embedding", "table"), None, (vocab, model)),)}
    for layer in range(config.num_layers):
        for suffix, parts in _layer(config, family, layer).items():
            named[f"model.layers.{layer}.{suffix}"] = parts
    named["model.norm.weight"] = (Part(("final_norm", "scale"), None, (model,)),)
    if not config.tie_embeddings:
        named[HEAD] = (Part(("head", "kernel"), None, (model, vocab), 1),)
    return named


def _layer(config: ModelConfig, family: str, layer: int) -> Tensors:
    model, hidden, traits = (config.d_model,), (config.ffn_dim,), FAMILIES[family]
    heads, kv = (config.num_heads, config.head_dim), (config.num_kv_heads, config.head_dim)

    def part(room: str, name: str, leaf: str, shape: tuple[int, ...], inputs: int = 0) -> Part:
        path = ("blocks", room, name, leaf) if name else ("blocks", room, leaf)
        return Part(path, layer, shape, inputs)

    query, key, value = (
        part("attention", name, "kernel", model + shape, 1)
        for name, shape in (("query", heads), ("key", kv), ("value", kv))
    )
    gate, up = (part("mlp", name, "kernel", model + hidden, 1) for name in ("gate", "up"))
    named: Tensors = {
        "input_layernorm.weight": (part("attention_norm", "", "scale", model),),
        "post_attention_layernorm.weight": (part("mlp_norm", "", "scale", model),),
        "self_attn.o_proj.weight": (part("attention", "output", "kernel", heads + model, 2),),
        "mlp.down_proj.weight": (part("mlp", "down", "kernel", hidden + model, 1),),
    }
    if traits.fused:
        named["self_attn.qkv_proj.weight"] = (query, key, value)
        named["mlp.gate_up_proj.weight"] = (gate, up)
    else:
        for name, one in (("q", query), ("k", key), ("v", value)):
            named[f"self_attn.{name}_proj.weight"] = (one,)
        named["mlp.gate_proj.weight"], named["mlp.up_proj.weight"] = (gate,), (up,)
    if config.qkv_bias:
        for name, ours, shape in (("q", "query", heads), ("k", "key", kv), ("v", "value", kv)):
            named[f"self_attn.{name}_proj.bias"] = (part("attention", ours, "bias", shape),)
    if config.qk_norm:
        for name, ours in (("q", "query_norm"), ("k", "key_norm")):
            scale = part("attention", ours, "scale", (config.head_dim,))
            named[f"self_attn.{name}_norm.weight"] = (scale,)
    return named
