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
    * `attention`: 4·N·H·seq_len for each of the L layers, both products with every key, i.e.
      before any causal saving; in a layer with a sliding window W < seq_len, 2 W - W²/seq_len
      keys, twice what a causal query sees in the mean, so that half of it is again the work;
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
    keys = sum(_keys(seq_len, window) for window in config.windows)
    return {
        "projections": 2 * groups["attention"],
        "attention": round(4 * config.num_heads * config.head_dim * keys),
        "mlp": 2 * groups["mlp"],
        "head": vocabulary,
        "embedding": vocabulary,
    }


def _keys(seq_len: int, window: int | None) -> float:
    if window is None or window >= seq_len:
        return seq_len
    return 2 * window - window**2 / seq_len


def forward_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """What the hardware must do: blocks and head, half of attention (causal), lookup free."""
    parts = forward_flops_by_part(config, seq_len)
    return parts["projections"] + parts["attention"] / 2 + parts["mlp"] + parts["head"]


def kv_bytes_per_token(config: ModelConfig, dtype: str = "bfloat16") -> int:
    """Bytes of keys and values that a cache keeps per token: 2·L·K·H elements of `dtype`.

    Windowed layers count in full: only a cache that drops keys behind the window saves them.

    Raises:
        ValueError: `dtype` is not one of those in `DTYPE_BYTES`.
    """
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype must be one of {sorted(DTYPE_BYTES)}, got {dtype!r}.")
    elements = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return elements * DTYPE_BYTES[dtype]


def training_state_bytes(config: ModelConfig) -> int:
    """Bytes that AdamW training keeps between steps: parameters, gradients and two moments.

    All four in `config.param_dtype`, 16 bytes a parameter in float32. Activations come on top.
    """
    return 4 * DTYPE_BYTES[config.param_dtype] * config.param_count()


def serving_bytes(config: ModelConfig, tokens: int, dtype: str = "bfloat16") -> int:
    """Bytes to serve: the weights and the keys and values of `tokens` tokens, both in `dtype`.

    Raises:
        ValueError: tokens is negative, or `dtype` is unknown.
    """
    if tokens < 0:
        raise ValueError(f"tokens must be at least 0, got {tokens}.")
    cache = tokens * kv_bytes_per_token(config, dtype)
    return DTYPE_BYTES[dtype] * config.param_count() + cache
