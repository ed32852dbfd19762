"""FLOPs per token by convention, against XLA's own count and against published formulas."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.scaling.flops import (
    CONVENTIONS,
    FlopsConvention,
    forward_flops_per_token,
    parameter_count,
    training_flops_per_token,
)
from models import ModelConfig, apply, init_params
from models.cost import forward_flops_by_part

CONFIG = ModelConfig(
    vocab_size=512,
    num_layers=2,
    d_model=256,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    ffn_dim=512,
    max_seq_len=256,
    compute_dtype="float32",
    attention_implementation="reference",
    scan_layers=False,  # XLA counts the body of a loop once
)
FULL = CONVENTIONS["full_attention"]


@pytest.mark.parametrize(
    ("change", "seq_len"),
    [({}, 128), ({"num_kv_heads": 8, "vocab_size": 2048, "tie_embeddings": True}, 64)],
)
def test_forward_agrees_with_xla(change, seq_len: int):
    """XLA's count of the compiled forward pass of standard attention, which does all T² pairs.

    Its surplus is what we leave out on purpose: norms, RoPE, softmax, mask, SwiGLU product and
    residual additions, which count one FLOP an element there.
    """
    config = dataclasses.replace(CONFIG, **change)
    params = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((2, seq_len), jnp.int32)
    compiled = jax.jit(partial(apply, config)).lower(params, tokens).compile()
    analysis = compiled.cost_analysis()
    assert analysis is not None
    counted = analysis["flops"] / tokens.size
    assert forward_flops_per_token(config, seq_len, convention=FULL) <= counted
    assert forward_flops_per_token(config, seq_len, convention=FULL) == pytest.approx(
        counted, rel=0.02
    )


dims = st.integers(1, 512)


@given(layers=dims, d_model=dims, heads=dims, vocab=dims, seq_len=st.integers(1, 10**5))
def test_conventions_are_the_published_formulas(layers, d_model, heads, vocab, seq_len):
    """With N·H = D, F = 8/3 D (here 3 D·F = 8 D²) the literature's closed forms hold exactly."""
    d_model = 6 * d_model
    config = ModelConfig(
        vocab_size=vocab,
        num_layers=layers,
        d_model=d_model,
        num_heads=3,
        num_kv_heads=3,
        head_dim=d_model // 3,
        ffn_dim=8 * d_model // 3,
        max_seq_len=8,
    )
    matrices = 12 * layers * d_model**2
    attention = 4 * layers * d_model * seq_len
    head = 2 * d_model * vocab
    count = partial(forward_flops_per_token, config, seq_len)
    assert count(convention="kaplan") == 2 * matrices
    assert count(convention="full_attention") == 2 * matrices + attention + head
    assert count(convention="exact") == count() == 2 * matrices + attention / 2 + head
    softmax = 3 * layers * 3 * seq_len
    assert count(convention="hoffmann") == 2 * matrices + attention + 2 * head + softmax
    deepseek = training_flops_per_token(config, seq_len, convention="deepseek")
    assert deepseek == 72 * layers * d_model**2 + 12 * layers * d_model * seq_len


@given(st.booleans(), st.booleans(), st.integers(1, 4096))
def test_training_is_three_forward_passes_and_6n_plus_attention(tied, qk_norm, seq_len):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied, qk_norm=qk_norm)
    training = training_flops_per_token(config, seq_len)
    assert training == 3 * forward_flops_per_token(config, seq_len)
    norms = config.param_groups()["norm"]
    matrices = 6 * (parameter_count(config, "blocks_and_head") - norms)
    attention = 3 * forward_flops_by_part(config, seq_len)["attention"] / 2
    assert training == pytest.approx(matrices + attention, rel=1e-12)


def test_causal_is_half_of_full():
    none, causal, full = (
        forward_flops_per_token(CONFIG, 64, convention=FlopsConvention(attention=kind))
        for kind in ("none", "causal", "full")
    )
    assert causal - none == full - causal > 0


@pytest.mark.parametrize("tied", [False, True])
def test_parameter_conventions(tied: bool):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    matrix = config.vocab_size * config.d_model
    assert parameter_count(config, "all") == config.param_count()
    assert parameter_count(config, "non_embedding") == config.param_count() - (2 - tied) * matrix
    assert parameter_count(config) == parameter_count(config, "non_embedding") + matrix


def test_unknown_conventions_are_named():
    with pytest.raises(ValueError, match=r"convention must be one of \['exact'.*got 'palm'"):
        forward_flops_per_token(CONFIG, 8, convention="palm")
    with pytest.raises(ValueError, match=r"convention must be one of .*got 'active'"):
        parameter_count(CONFIG, "active")
    with pytest.raises(ValueError, match=r"attention must be one of .*got 'half'"):
        FlopsConvention(attention="half")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seq_len must be at least 1"):
        training_flops_per_token(CONFIG, 0)
