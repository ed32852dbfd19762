"""What one token costs in a decoder: matrix-product FLOPs by part, and key/value bytes.

One multiply-add is 2 FLOPs. Only matrix products are counted; norms, RoPE, softmax and the SwiGLU
product are not (at model sizes of interest they are under a percent, and no matrix unit runs
them). Which parts make up "the FLOPs of a model" is a convention: `experiments.scaling.flops`
names them and adds up.
"""

from models.config import ModelConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def forward_flops_by_part(config: ModelConfig, seq_len: int) -> dict[str, int]:
    """Forward FLOPs per token of each part, for sequences of `seq_len` tokens.

    * `projections`: L·2·(2·D·N·H + 2·D·K·H), query, key, value and output;
    * `attention`: L·4·N·H·seq_len, both products with every key, i.e. before any causal saving;
    * `mlp`: L·2·3·D·F;
    * `head`: 2·D·V, tied or not;
    * `embedding`: 2·D·V, what the lookup would cost as a product with one-hot rows.

    Raises:
        ValueError: seq_len is below 1.
    """
    if seq_len < 1:
        raise ValueError(f"seq_len must be at least 1, got {seq_len}.")
    groups = config.param_groups()
    vocabulary = 2 * config.d_model * config.vocab_size
    return {
        "projections": 2 * groups["attention"],
        "attention": 4 * config.num_layers * config.num_heads * config.head_dim * seq_len,
        "mlp": 2 * groups["mlp"],
        "head": vocabulary,
        "embedding": vocabulary,
    }


def forward_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """What the hardware must do: blocks and head, half of attention (causal), lookup free."""
    parts = forward_flops_by_part(config, seq_len)
    return parts["projections"] + parts["attention"] / 2 + parts["mlp"] + parts["head"]


def kv_bytes_per_token(config: ModelConfig, dtype: str = "bfloat16") -> int:
    """Bytes of keys and values that a cache keeps per token: 2·L·K·H elements of `dtype`.

    Raises:
        ValueError: `dtype` is not one of those in `DTYPE_BYTES`.
    """
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype must be one of {sorted(DTYPE_BYTES)}, got {dtype!r}.")
    elements = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return elements * DTYPE_BYTES[dtype]
