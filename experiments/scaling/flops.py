"""FLOPs per token and parameter counts of a model, by the conventions that papers use.

A scaling exponent depends on what is counted: published fits of one data set differ by .2 in the
exponent of N through this alone (Porian et al., arXiv:2406.19146; Pearce & Song,
arXiv:2406.12907). So a convention is a value with a name, and a report prints it.

A multiply-add is 2 FLOPs. A training step is 3 forward passes: the backward pass forms two
products, for the input's and the weight's gradient, where the forward pass forms one.
Recomputation (remat, the flash backward pass) is not counted: FLOPs are the model's, so that the
utilisation computed from them does not rise by working twice.

| convention | lookup | head | attention | softmax | who counts so |
|---|---|---|---|---|---|
| `exact` | 0 | 2·D·V | causal: half | - | the products a causal model needs; our default |
| `full_attention` | 0 | 2·D·V | full | - | 6·N + 12·L·D·T (PaLM, Megatron-LM, nanochat) |
| `kaplan` | 0 | - | - | - | 2·N, N without embeddings (arXiv:2001.08361) |
| `deepseek` | 0 | - | full | - | M = 72·L·D² + 12·L·D·T (arXiv:2401.02954) |
| `hoffmann` | 2·D·V | 2·D·V | full | 3·N·T | Chinchilla (arXiv:2203.15556), appendix F |
"""

from dataclasses import dataclass
from typing import Literal, get_args

from models.config import ModelConfig
from models.cost import forward_flops_by_part

AttentionCount = Literal["causal", "full", "none"]
ParameterCount = Literal["all", "non_embedding", "blocks_and_head"]

_ATTENTION_SHARE: dict[str, float] = {"causal": 0.5, "full": 1.0, "none": 0.0}


@dataclass(frozen=True, kw_only=True)
class FlopsConvention:
    """Which parts of a forward pass are counted.

    Args:
        embedding: the token lookup, as if it were a product with one-hot rows.
        head: the product with the vocabulary matrix.
        attention: the two products of queries with keys and weights with values. "causal": half
            of all pairs, T/2 keys a token (a tile-skipping kernel does (T+1)/2 and part of the
            diagonal tiles besides); "full": all pairs; "none": not at all.
        softmax: 3 FLOPs for each query-key pair and head, all pairs.
    """

    embedding: bool = False
    head: bool = True
    attention: AttentionCount = "causal"
    softmax: bool = False

    def __post_init__(self) -> None:
        if self.attention not in get_args(AttentionCount):
            raise ValueError(
                f"attention must be one of {get_args(AttentionCount)}, got {self.attention!r}."
            )


CONVENTIONS: dict[str, FlopsConvention] = {
    "exact": FlopsConvention(),
    "full_attention": FlopsConvention(attention="full"),
    "kaplan": FlopsConvention(head=False, attention="none"),
    "deepseek": FlopsConvention(head=False, attention="full"),
    "hoffmann": FlopsConvention(embedding=True, attention="full", softmax=True),
}


def forward_flops_per_token(
    config: ModelConfig, seq_len: int, *, convention: FlopsConvention | str = "exact"
) -> float:
    """FLOPs of one forward pass divided by its tokens, for sequences of `seq_len` tokens.

    Args:
        config: the model.
        seq_len: T, tokens of one training sequence. For packed documents it is the mean over
            tokens of the length of the token's own document.
        convention: what to count; a `FlopsConvention` or a name in `CONVENTIONS`.

    Raises:
        ValueError: seq_len is below 1, or the name is unknown.
    """
    counted = _convention(convention)
    parts = forward_flops_by_part(config, seq_len)
    flops = float(parts["projections"] + parts["mlp"])
    flops += _ATTENTION_SHARE[counted.attention] * parts["attention"]
    flops += parts["head"] if counted.head else 0
    flops += parts["embedding"] if counted.embedding else 0
    flops += 3 * config.num_layers * config.num_heads * seq_len if counted.softmax else 0
    return flops


def training_flops_per_token(
    config: ModelConfig, seq_len: int, *, convention: FlopsConvention | str = "exact"
) -> float:
    """FLOPs of forward and backward pass per token: 3 · `forward_flops_per_token`."""
    return 3 * forward_flops_per_token(config, seq_len, convention=convention)


def parameter_count(
    config: ModelConfig, convention: ParameterCount | str = "blocks_and_head"
) -> int:
    """N, the number of parameters, as a scaling law may count it.

    * `all`: every stored parameter; a tied matrix once.
    * `non_embedding`: blocks and final norm, without token embedding and without head (Kaplan).
    * `blocks_and_head`: `non_embedding` and one V·D head, tied or not. It counts what multiplies,
      so 6·N is the training FLOPs per token but for attention; tying changes nothing.

    Raises:
        ValueError: the convention is not one of these.
    """
    if convention == "all":
        return config.param_count()
    if convention == "non_embedding":
        return config.param_count(embeddings=False)
    if convention == "blocks_and_head":
        return config.param_count(embeddings=False) + config.vocab_size * config.d_model
    raise ValueError(f"convention must be one of {get_args(ParameterCount)}, got {convention!r}.")


def _convention(convention: FlopsConvention | str) -> FlopsConvention:
    if isinstance(convention, FlopsConvention):
        return convention
    if convention not in CONVENTIONS:
        raise ValueError(f"convention must be one of {list(CONVENTIONS)}, got {convention!r}.")
    return CONVENTIONS[convention]
