"""Named model shapes. `python -m models.presets` prints them with what they cost.

Each preset is a function, so that a caller changes a field in the open:
`dataclasses.replace(smollm2_135m(), remat="attention")`.
"""

from collections.abc import Callable

from models.config import ModelConfig
from models.cost import (
    forward_flops_per_token,
    kv_bytes_per_token,
    serving_bytes,
    training_state_bytes,
)
from models.recipes import RECIPES, Recipe
from models.rope_scaling import RopeScaling

_TABLE_SEQ_LEN = 2048


def gpt2_124m() -> ModelConfig:
    """The size of GPT-2 small (Radford et al. 2019) in today's block: RoPE, RMSNorm, SwiGLU.

    The vocabulary is GPT-2's 50,257 padded to a multiple of 128, and F = 8/3 D keeps the MLP's
    parameters at GPT-2's 8 D².
    """
    return ModelConfig(
        vocab_size=50_304,
        num_layers=12,
        d_model=768,
        num_heads=12,
        num_kv_heads=12,
        head_dim=64,
        ffn_dim=2048,
        max_seq_len=1024,
        tie_embeddings=True,
    )


def smollm2_135m() -> ModelConfig:
    """SmolLM2-135M (Ben Allal et al., arXiv:2502.02737)."""
    return ModelConfig(
        vocab_size=49_152,
        num_layers=30,
        d_model=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        ffn_dim=1536,
        max_seq_len=8192,
        rope_theta=100_000.0,
        tie_embeddings=True,
    )


def qwen2_5_0_5b() -> ModelConfig:
    """Qwen2.5-0.5B (Qwen team, arXiv:2412.15115)."""
    return ModelConfig(
        vocab_size=151_936,
        num_layers=24,
        d_model=896,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        ffn_dim=4864,
        max_seq_len=32_768,
        rope_theta=1_000_000.0,
        tie_embeddings=True,
        qkv_bias=True,
        norm_eps=1e-6,
    )


def qwen3_0_6b() -> ModelConfig:
    """Qwen3-0.6B (Qwen team, arXiv:2505.09388): heads of 128 where D / N is 64, QK-norm."""
    return ModelConfig(
        vocab_size=151_936,
        num_layers=28,
        d_model=1024,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        ffn_dim=3072,
        max_seq_len=40_960,
        rope_theta=1_000_000.0,
        tie_embeddings=True,
        qk_norm=True,
        norm_eps=1e-6,
    )


def llama3_2_1b() -> ModelConfig:
    """Llama-3.2-1B (Meta 2024): 131,072 tokens by Llama-3 RoPE scaling of 8,192."""
    return ModelConfig(
        vocab_size=128_256,
        num_layers=16,
        d_model=2048,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        ffn_dim=8192,
        max_seq_len=131_072,
        rope_theta=500_000.0,
        rope_scaling=_llama3_scaling(32.0),
        tie_embeddings=True,
    )


def phi3_mini() -> ModelConfig:
    """Phi-3-mini-4k (Abdin et al., arXiv:2404.14219); a query sees 2,047 keys."""
    return ModelConfig(
        vocab_size=32_064,
        num_layers=32,
        d_model=3072,
        num_heads=32,
        num_kv_heads=32,
        head_dim=96,
        ffn_dim=8192,
        max_seq_len=4096,
        sliding_window=2047,
    )


def llama2_7b() -> ModelConfig:
    """Llama-2-7B (Touvron et al., arXiv:2307.09288)."""
    return ModelConfig(
        vocab_size=32_000,
        num_layers=32,
        d_model=4096,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        ffn_dim=11_008,
        max_seq_len=4096,
    )


def mistral_7b() -> ModelConfig:
    """Mistral-7B-v0.1 (Jiang et al., arXiv:2310.06825): a query sees 4,096 keys."""
    return ModelConfig(
        vocab_size=32_000,
        num_layers=32,
        d_model=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_dim=14_336,
        max_seq_len=32_768,
        sliding_window=4096,
    )


def llama3_8b() -> ModelConfig:
    """Meta-Llama-3-8B (Llama team, arXiv:2407.21783, table 3)."""
    return ModelConfig(
        vocab_size=128_256,
        num_layers=32,
        d_model=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_dim=14_336,
        max_seq_len=8192,
        rope_theta=500_000.0,
    )


def llama3_70b() -> ModelConfig:
    """Meta-Llama-3-70B (Llama team, arXiv:2407.21783, table 3)."""
    return ModelConfig(
        vocab_size=128_256,
        num_layers=80,
        d_model=8192,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        ffn_dim=28_672,
        max_seq_len=8192,
        rope_theta=500_000.0,
    )


def qwen2_5_72b() -> ModelConfig:
    """Qwen2.5-72B (Qwen team, arXiv:2412.15115)."""
    return ModelConfig(
        vocab_size=152_064,
        num_layers=80,
        d_model=8192,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        ffn_dim=29_568,
        max_seq_len=131_072,
        rope_theta=1_000_000.0,
        qkv_bias=True,
    )


def llama3_1_405b() -> ModelConfig:
    """Llama-3.1-405B (Llama team, arXiv:2407.21783, table 3), released with 131,072 tokens."""
    return ModelConfig(
        vocab_size=128_256,
        num_layers=126,
        d_model=16_384,
        num_heads=128,
        num_kv_heads=8,
        head_dim=128,
        ffn_dim=53_248,
        max_seq_len=131_072,
        rope_theta=500_000.0,
        rope_scaling=_llama3_scaling(8.0),
    )


def _llama3_scaling(factor: float) -> RopeScaling:
    return RopeScaling(
        type="llama3",
        factor=factor,
        original_max_seq_len=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )


PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "gpt2-124m": gpt2_124m,
    "smollm2-135m": smollm2_135m,
    "qwen2.5-0.5b": qwen2_5_0_5b,
    "qwen3-0.6b": qwen3_0_6b,
    "llama3.2-1b": llama3_2_1b,
    "phi3-mini": phi3_mini,
    "llama2-7b": llama2_7b,
    "mistral-7b": mistral_7b,
    "llama3-8b": llama3_8b,
    "llama3-70b": llama3_70b,
    "qwen2.5-72b": qwen2_5_72b,
    "llama3.1-405b": llama3_1_405b,
}

_HEADER = (
    *("preset", "L", "D", "N/K", "H", "F", "V", "context", "tied", "params", "no embed"),
    *("GFLOP/tok", "KV B/tok", "train GB", "serve GB"),
    *("tokens", "batch", "peak LR", "schedule", "decay", "trained at"),
)


def table() -> str:
    """The presets as an aligned text table, one row each: shape, cost, recipe."""
    rows: list[tuple[str, ...]] = [_HEADER]
    for name, make in PRESETS.items():
        rows.append((name, *_shape_cells(make()), *_cost_cells(make()), *_recipe_cells(name)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    lines = []
    for name, *cells in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *aligned]))
    return "\n".join(lines)


def _shape_cells(c: ModelConfig) -> tuple[str, ...]:
    return (
        str(c.num_layers),
        str(c.d_model),
        f"{c.num_heads}/{c.num_kv_heads}",
        str(c.head_dim),
        str(c.ffn_dim),
        f"{c.vocab_size:,}",
        f"{c.max_seq_len:,}",
        "yes" if c.tie_embeddings else "no",
    )


def _cost_cells(c: ModelConfig) -> tuple[str, ...]:
    return (
        f"{c.param_count():,}",
        f"{c.param_count(embeddings=False):,}",
        f"{forward_flops_per_token(c, min(_TABLE_SEQ_LEN, c.max_seq_len)) / 1e9:.3f}",
        f"{kv_bytes_per_token(c):,}",
        f"{training_state_bytes(c) / 1e9:,.1f}",
        f"{serving_bytes(c, c.max_seq_len) / 1e9:,.1f}",
    )


def _recipe_cells(name: str) -> tuple[str, ...]:
    recipe: Recipe = RECIPES[name]

    def cell(value: float | None, text: str) -> str:
        return "-" if value is None else text.format(value)

    return (
        cell(None if recipe.tokens is None else recipe.tokens / 1e12, "{:g}T"),
        cell(None if recipe.batch_tokens is None else recipe.batch_tokens / 1e6, "{:.2g}M"),
        cell(recipe.peak_lr, "{:g}"),
        recipe.schedule or "-",
        cell(recipe.weight_decay, "{:g}"),
        cell(recipe.context, "{:,}"),
    )


def main() -> None:
    print(table())
    print(
        f"\nGFLOP/tok: forward, head counted, causal attention as half, sequences of "
        f"{_TABLE_SEQ_LEN} tokens (or the model's longest); training costs 3 times that.\n"
        "KV B/tok: bfloat16 cache.  no embed: without token embedding and untied head.\n"
        "train GB: float32 parameters, gradients and AdamW moments (1e9 bytes), activations not "
        "counted.  serve GB: bfloat16 weights and one sequence of the whole context.\n"
        "tokens ... trained at: the recipe as published (models/recipes.py names the sources); "
        "- is not published."
    )


if __name__ == "__main__":
    main()
