"""Named model shapes. `python -m models.presets` prints them with what they cost.

Each preset is a function, so that a caller changes a field in the open:
`dataclasses.replace(smollm2_135m(), remat="attention")`.
"""

from collections.abc import Callable

from models.config import ModelConfig
from models.cost import forward_flops_per_token, kv_bytes_per_token

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


def llama3_2_1b() -> ModelConfig:
    """The shape of Llama-3.2-1B (Meta 2024), without its RoPE scaling (factor 32).

    Hence `max_seq_len` is 8192, the length before that extension, and not 131,072.
    """
    return ModelConfig(
        vocab_size=128_256,
        num_layers=16,
        d_model=2048,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        ffn_dim=8192,
        max_seq_len=8192,
        rope_theta=500_000.0,
        tie_embeddings=True,
    )


PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "gpt2-124m": gpt2_124m,
    "smollm2-135m": smollm2_135m,
    "llama3.2-1b": llama3_2_1b,
}


def table() -> str:
    """The presets as an aligned text table, one row each."""
    header = ("preset", "L", "D", "N/K", "H", "F", "V", "tied", "params", "no embed", "GFLOP/tok")
    rows: list[tuple[str, ...]] = [(*header, "KV B/tok")]
    for name, make in PRESETS.items():
        c = make()
        rows.append(
            (
                name,
                str(c.num_layers),
                str(c.d_model),
                f"{c.num_heads}/{c.num_kv_heads}",
                str(c.head_dim),
                str(c.ffn_dim),
                f"{c.vocab_size:,}",
                "yes" if c.tie_embeddings else "no",
                f"{c.param_count():,}",
                f"{c.param_count(embeddings=False):,}",
                f"{forward_flops_per_token(c, min(_TABLE_SEQ_LEN, c.max_seq_len)) / 1e9:.3f}",
                f"{kv_bytes_per_token(c):,}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for name, *cells in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *aligned]))
    return "\n".join(lines)


def main() -> None:
    print(table())
    print(
        f"\nGFLOP/tok: forward, head counted, causal attention as half, sequences of "
        f"{_TABLE_SEQ_LEN} tokens (or the model's longest); training costs 3 times that.\n"
        "KV B/tok: bfloat16 cache.  no embed: without token embedding and untied head."
    )


if __name__ == "__main__":
    main()
