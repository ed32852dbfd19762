"""How the models of `models.presets` were trained, as far as their makers published it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A pre-training recipe. None is "not published", never "the default".

    Args:
        source: where the figures come from.
        tokens: training tokens.
        batch_tokens: tokens a step; the largest where it was raised on the way.
        peak_lr: highest learning rate.
        schedule: shape of the learning rate over the run.
        weight_decay: AdamW's, times the learning rate.
        context: sequence length of most of the run.
    """

    source: str
    tokens: float | None = None
    batch_tokens: float | None = None
    peak_lr: float | None = None
    schedule: str | None = None
    weight_decay: float | None = None
    context: int | None = None


_LLAMA3 = "arXiv:2407.21783"

RECIPES: dict[str, Recipe] = {
    "gpt2-124m": Recipe(
        source="nanoGPT, config/train_gpt2.py",
        tokens=300e9,
        batch_tokens=491_520,
        peak_lr=6e-4,
        schedule="cosine to 10%",
        weight_decay=0.1,
        context=1024,
    ),
    "smollm2-135m": Recipe(
        source="arXiv:2502.02737, section 6",
        tokens=2e12,
        peak_lr=3e-3,
        schedule="WSD, 20% decay",
    ),
    "qwen2.5-0.5b": Recipe(source="arXiv:2412.15115", tokens=18e12, context=4096),
    "qwen3-0.6b": Recipe(source="arXiv:2505.09388", tokens=36e12, context=4096),
    "llama3.2-1b": Recipe(source="Llama 3.2 model card", tokens=9e12),
    "phi3-mini": Recipe(source="arXiv:2404.14219", tokens=3.3e12, context=4096),
    "llama2-7b": Recipe(
        source="arXiv:2307.09288, section 2.2",
        tokens=2e12,
        batch_tokens=4e6,
        peak_lr=3e-4,
        schedule="cosine to 10%",
        weight_decay=0.1,
        context=4096,
    ),
    "mistral-7b": Recipe(source="arXiv:2310.06825", context=8192),
    "llama3-8b": Recipe(
        source=f"model card; {_LLAMA3}, table 3", tokens=15e12, peak_lr=3e-4, context=8192
    ),
    "llama3-70b": Recipe(
        source=f"model card; {_LLAMA3}, table 3", tokens=15e12, peak_lr=1.5e-4, context=8192
    ),
    "qwen2.5-72b": Recipe(source="arXiv:2412.15115", tokens=18e12, context=4096),
    "llama3.1-405b": Recipe(
        source=f"{_LLAMA3}, section 3.4",
        tokens=15.6e12,
        batch_tokens=16e6,
        peak_lr=8e-5,
        schedule="cosine to 1%",
        context=8192,
    ),
}
