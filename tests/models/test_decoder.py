"""The decoder: equal to a float64 NumPy one, causal, isolated by segment, equal to itself."""

import dataclasses
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from reference_decoder import forward

from models import Decoder, ModelConfig, apply, bind, init_params, next_token_loss
from models.config import Remat
from pallas_flash import dot_product_attention

CONFIG = ModelConfig(
    vocab_size=32,
    num_layers=2,
    d_model=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_dim=24,
    max_seq_len=12,
    compute_dtype="float32",
)
B, T = 2, 12
SEGMENTS = jnp.array([[1] * 5 + [2] * 4 + [3] * 3, [1] * 1 + [2] * 8 + [-1] * 3])
VARIANTS = {
    "gqa": CONFIG,
    "mqa-tied": dataclasses.replace(CONFIG, num_kv_heads=1, tie_embeddings=True),
    "mha-qk_norm": dataclasses.replace(CONFIG, num_kv_heads=4, qk_norm=True, rope_theta=50.0),
    "bias-window-partial": dataclasses.replace(
        CONFIG, qkv_bias=True, sliding_window=(None, 5), rotary_dim=6
    ),
}


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@lru_cache
def _params(config: ModelConfig, seed: int = 0):
    """Random parameters without compiling `init_params`; norm scales are not 1, to be seen."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        if "scale" in jax.tree_util.keystr(path):
            return jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape), leaf.dtype)
        return jnp.asarray(rng.normal(size=leaf.shape) * leaf.shape[-1] ** -0.5, leaf.dtype)

    abstract = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    return jax.tree_util.tree_map_with_path(draw, abstract)


def _tokens(batch: int = B, length: int = T) -> jax.Array:
    rng = np.random.default_rng(3)
    return jnp.asarray(rng.integers(0, CONFIG.vocab_size, (batch, length)), jnp.int32)


def _vectors(batch: int, seed: int = 4) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(batch, T, 16)), jnp.float32)


@lru_cache
def _jitted(config: ModelConfig):
    return jax.jit(partial(apply, config))


@lru_cache
def _loss_and_grad(config: ModelConfig):
    def loss(params, tokens):
        return next_token_loss(apply(config, params, tokens), jnp.roll(tokens, -1, 1))[0]

    return jax.jit(jax.value_and_grad(loss))


def _assert_trees_close(got, want, atol: float):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for path, leaf in jax.tree_util.tree_leaves_with_path(got):
        other = want
        for key in path:
            other = other[key.key]
        np.testing.assert_allclose(leaf, other, atol=atol, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_the_numpy_decoder(name: str):
    config = VARIANTS[name]
    params, tokens = _params(config), _tokens()
    got = _jitted(config)(params, tokens)
    assert got.dtype == jnp.float32
    want = forward(config, params, np.asarray(tokens))
    np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("name", ["gqa", "bias-window-partial"])
def test_equals_the_numpy_decoder_with_segments_and_positions(name: str):
    config = VARIANTS[name]
    params, tokens = _params(config), _tokens()
    positions = jnp.tile(jnp.arange(T) * 3 + 7, (B, 1))
    got = _jitted(config)(params, tokens, segment_ids=SEGMENTS, positions=positions)
    arrays = (np.asarray(array) for array in (tokens, SEGMENTS, positions))
    np.testing.assert_allclose(got, forward(config, params, *arrays), atol=2e-5)


def test_causality_by_gradient():
    """d state[t] / d vector[>t] is exactly 0, and of every vector up to t it is not."""
    params = _params(CONFIG)
    direction = _vectors(1, seed=5)[0]

    @jax.jit
    def gradients(x):
        _, pull = jax.vjp(lambda x: bind(CONFIG, params).backbone(x)[0], x)
        one_row = jnp.eye(T)[:, :, None] * direction
        return jax.vmap(lambda cotangent: pull(cotangent)[0][0])(one_row)

    size = np.abs(gradients(_vectors(1))).max(-1)  # [t of the state, t of the vector]
    later = np.triu(np.ones((T, T), bool), 1)
    assert (size[later] == 0).all()
    assert (size[~later] > 0).all()


def test_packed_segments_equal_separate_documents():
    params, tokens = _params(CONFIG), _tokens()
    packed = _jitted(CONFIG)(params, tokens, segment_ids=SEGMENTS)
    ids = np.asarray(SEGMENTS)
    for b in range(B):
        for segment in np.unique(ids[b][ids[b] >= 0]):
            (where,) = np.nonzero(ids[b] == segment)
            alone = forward(CONFIG, params, np.asarray(tokens)[b : b + 1, where])
            np.testing.assert_allclose(packed[b, where], alone[0], atol=2e-5)


def test_no_gradient_crosses_a_segment_boundary():
    params = _params(CONFIG)
    inside = np.asarray(SEGMENTS == 2)
    weight = _vectors(B, seed=5) * inside[..., None]

    def total(x):
        return jnp.sum(weight * bind(CONFIG, params).backbone(x, segment_ids=SEGMENTS))

    grad = np.asarray(jax.jit(jax.grad(total))(_vectors(B)))
    assert not grad[~inside].any()
    assert (np.abs(grad).max(-1)[inside] > 0).all()


def test_permuting_the_batch_permutes_the_logits():
    params, tokens = _params(CONFIG), _tokens()
    forward_pass = _jitted(CONFIG)
    got = forward_pass(params, tokens[::-1])
    np.testing.assert_allclose(got, forward_pass(params, tokens)[::-1], atol=1e-6)


def test_scan_equals_loop():
    params, tokens = _params(CONFIG), _tokens()
    looped = dataclasses.replace(CONFIG, scan_layers=False)
    np.testing.assert_allclose(
        _jitted(CONFIG)(params, tokens), _jitted(looped)(params, tokens), atol=1e-6
    )
    (loss, grads), (loop_loss, loop_grads) = (
        _loss_and_grad(config)(params, tokens) for config in (CONFIG, looped)
    )
    assert float(loss) == pytest.approx(float(loop_loss), abs=1e-6)
    _assert_trees_close(grads, loop_grads, atol=1e-6)


@pytest.mark.parametrize("remat", ["full", "attention"])
def test_remat_changes_no_value(remat: Remat):
    params, tokens = _params(CONFIG), _tokens()
    loss, grads = _loss_and_grad(CONFIG)(params, tokens)
    config = dataclasses.replace(CONFIG, remat=remat)
    remat_loss, remat_grads = _loss_and_grad(config)(params, tokens)
    assert float(remat_loss) == pytest.approx(float(loss), rel=1e-6)
    _assert_trees_close(remat_grads, grads, atol=2e-7)


def _count(jaxpr, counts: dict[str, int]) -> dict[str, int]:
    """Occurrences of every primitive, and of every checkpoint name, at any depth."""
    for eqn in jaxpr.eqns:
        key = eqn.params["name"] if eqn.primitive.name == "name" else eqn.primitive.name
        counts[key] = counts.get(key, 0) + 1
        for inner in jaxprs_in_params(eqn.params):
            _count(inner, counts)
    return counts


def test_attention_remat_runs_the_attention_forward_once():
    """Counted in the jaxpr of the gradient: what is saved by name is not computed again."""
    params, tokens = _params(CONFIG), _tokens()
    counts = {}
    for remat in ("none", "full", "attention"):
        config = dataclasses.replace(CONFIG, remat=remat)
        jaxpr = jax.make_jaxpr(_loss_and_grad(config))(params, tokens)
        counts[remat] = _count(jaxpr.jaxpr, {})
    assert {remat: counts[remat]["attention_out"] for remat in counts} == {
        "none": 1,
        "full": 2,
        "attention": 1,
    }

    shape = (B, T, CONFIG.num_heads, CONFIG.head_dim)
    kv_shape = (B, T, CONFIG.num_kv_heads, CONFIG.head_dim)
    attend = partial(dot_product_attention, is_causal=True)
    alone = jax.make_jaxpr(attend)(jnp.ones(shape), jnp.ones(kv_shape), jnp.ones(kv_shape))
    products = _count(alone.jaxpr, {})["dot_general"]
    assert products > 0
    assert counts["full"]["dot_general"] - counts["attention"]["dot_general"] == products
    assert counts["attention"]["dot_general"] > counts["none"]["dot_general"]


def test_bfloat16_policy():
    """Parameters and gradients in float32, products in bfloat16, logits in float32."""
    config = dataclasses.replace(CONFIG, compute_dtype="bfloat16")
    params, tokens = _params(CONFIG), _tokens()
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    abstract = jax.eval_shape(partial(apply, config), params, tokens)
    assert abstract.dtype == jnp.float32
    x = jax.ShapeDtypeStruct((B, T, config.d_model), jnp.bfloat16)
    backbone = jax.eval_shape(lambda p, x: bind(config, p).backbone(x), params, x)
    assert backbone.dtype == jnp.bfloat16

    seen = set()
    record = partial(_product_dtypes, seen=seen)
    record(jax.make_jaxpr(lambda p, x: bind(config, p).logits(x))(params, x).jaxpr)
    block = jax.tree.map(lambda leaf: leaf[0], bind(config, params).blocks)
    record(jax.make_jaxpr(lambda x: block.mlp(x))(x).jaxpr)
    record(jax.make_jaxpr(lambda x: block.attention.query(x))(x).jaxpr)
    assert seen == {jnp.dtype("bfloat16")}

    _, grads = jax.eval_shape(_loss_and_grad(config), params, tokens)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    got, exact = (_jitted(c)(params, tokens) for c in (config, CONFIG))
    assert float(jnp.abs(got - exact).max()) < 0.05 * float(jnp.abs(exact).max())


def _product_dtypes(jaxpr, *, seen: set) -> None:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            seen.update(var.aval.dtype for var in eqn.invars)
        for inner in jaxprs_in_params(eqn.params):
            _product_dtypes(inner, seen=seen)


def test_qk_norm_makes_attention_blind_to_query_scale():
    config = VARIANTS["mha-qk_norm"]
    params, tokens = _params(config), _tokens()
    scaled = jax.tree.map(lambda leaf: leaf, params)
    scaled["blocks"]["attention"]["query"]["kernel"] *= 10.0
    forward_pass = _jitted(config)
    got, want = forward_pass(scaled, tokens), forward_pass(params, tokens)
    np.testing.assert_allclose(got, want, atol=2e-3)  # norm_eps is not scaled with them


def test_vmap_over_models_equals_each_model():
    models = [_params(CONFIG, seed) for seed in (0, 1)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)
    logits = jax.jit(jax.vmap(partial(apply, CONFIG), in_axes=(0, None)))(stacked, _tokens())
    for got, params in zip(logits, models, strict=True):
        np.testing.assert_allclose(got, _jitted(CONFIG)(params, _tokens()), atol=1e-5)
    assert not np.allclose(logits[0], logits[1])


def test_init_is_a_function_of_the_key_and_layers_differ():
    keys = jnp.stack([jax.random.key(seed) for seed in (0, 0, 1)])
    stacked = jax.jit(jax.vmap(partial(init_params, CONFIG)))(keys)
    for leaf in jax.tree.leaves(stacked):
        np.testing.assert_array_equal(leaf[0], leaf[1])
    kernel = stacked["blocks"]["mlp"]["up"]["kernel"]
    assert not np.allclose(kernel[0], kernel[2])
    assert not np.allclose(kernel[0, 0], kernel[0, 1])

    @jax.jit
    def module_params(key):
        return nnx.to_pure_dict(nnx.split(Decoder(CONFIG, rngs=nnx.Rngs(params=key)))[1])

    alone = module_params(keys[2])
    _assert_trees_close(alone, jax.tree.map(lambda leaf: leaf[2], stacked), atol=1e-6)


def test_module_and_functions_are_one_model():
    params = _params(CONFIG)
    module = bind(CONFIG, params)
    assert isinstance(module, Decoder)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.split(module)[1]), params)
    got = jax.jit(module.__call__)(_tokens())
    np.testing.assert_allclose(got, _jitted(CONFIG)(params, _tokens()), atol=1e-6)


def test_unknown_token_poisons_its_row_only():
    params, tokens = _params(CONFIG), _tokens()
    logits = _jitted(CONFIG)(params, tokens.at[0, 3].set(CONFIG.vocab_size))
    assert bool(jnp.isnan(logits[0, 3:]).all())
    assert bool(jnp.isfinite(logits[1]).all())


def test_bad_calls_are_named():
    call = partial(apply, CONFIG, _params(CONFIG))
    tokens = _tokens()
    with pytest.raises(TypeError, match="tokens must be integers, got dtype float32"):
        call(tokens.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"tokens must have shape \[B, T\], got \[12\]"):
        call(tokens[0])
    with pytest.raises(ValueError, match="13 tokens, more than max_seq_len=12"):
        call(_tokens(length=13))
    with pytest.raises(ValueError, match=r"segment_ids must have shape .*\[2, 12\], got \[2, 11\]"):
        call(tokens, segment_ids=SEGMENTS[:, :-1])
    with pytest.raises(TypeError, match="positions must be integers"):
        call(tokens, positions=jnp.zeros((B, T)))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_attention_implementation_reaches_the_kernel_call(monkeypatch, implementation):
    asked = []

    def spy(*arrays, implementation=None, **options):
        asked.append(implementation)
        return dot_product_attention(*arrays, implementation=implementation, **options)

    monkeypatch.setattr("models.sharded_attention.dot_product_attention", spy)
    config = dataclasses.replace(CONFIG, attention_implementation=implementation)
    jax.eval_shape(partial(apply, config), _params(CONFIG), _tokens())
    assert set(asked) == {implementation}
