"""What is specific to the Triton kernels, run in the Pallas interpreter."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import assert_close, draw

import pallas_flash
from pallas_flash import reference, shapes
from pallas_flash.call import AttentionCall
from pallas_flash.mask import Mask
from pallas_flash.row_statistics import row_statistics
from pallas_flash.triton import Tile, TileSizes, attention, default_tile_sizes, unsupported
from pallas_flash.triton.backward import Saved, key_value_gradients, query_gradient
from pallas_flash.triton.forward import forward
from pallas_flash.triton.problem import split_call

TALL = Tile(query=32, key=16, warps=4, stages=1)
WIDE = Tile(query=16, key=32, warps=4, stages=1)
T, S = 80, 112


def random_call(*, B=1, T=T, S=S, N=2, K=1, H=16, Hv=None, dtype=jnp.float32, **fields):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    return AttentionCall(
        query=normal(B, T, N, H),
        key=normal(B, S, K, H),
        value=normal(B, S, K, Hv or H),
        static_scale=H**-0.5,
        **fields,
    )


# ---- which tiles are visited --------------------------------------------------------------------

MASKS = {
    "causal": Mask(is_causal=True),
    "window": Mask(window=(20, 9)),
    "causal window, bottom right": Mask(
        is_causal=True, window=(30, None), causal_alignment="bottom_right"
    ),
    "lengths": Mask(query_lengths=jnp.array([50]), key_value_lengths=jnp.array([37])),
}


def visible_tiles(mask, tile):
    """bool (query tiles, key tiles): does any query of the one see any key of the other?"""
    lengths = {
        "q_length": T if mask.query_lengths is None else 50,
        "kv_length": S if mask.key_value_lengths is None else 37,
    }
    seen = mask.visible(np.arange(T)[:, None], np.arange(S)[None, :], **lengths)
    rows = -(-T // tile.query) * tile.query - T
    columns = -(-S // tile.key) * tile.key - S
    seen = np.pad(np.asarray(seen), ((0, rows), (0, columns)))
    return seen.reshape(-1, tile.query, seen.shape[1] // tile.key, tile.key).any(axis=(1, 3))


def one_tile_of_nan(array, size):
    """Copies of (1, length, heads, dim) along the batch; copy i has NaN in its tile i alone."""
    length = array.shape[1]
    tiles = -(-length // size)
    spoilt = (np.arange(length) // size)[None, :] == np.arange(tiles)[:, None]
    return np.where(spoilt[:, :, None, None], np.nan, np.asarray(array)).astype(np.float32)


def repeat_batch(tree, times):
    return jax.tree.map(lambda x: np.repeat(x, times, axis=0), tree)


def spoilt_tiles(result, size):
    """bool (copies, tiles) of a (copies, length, heads, dim) result: which tiles hold NaN?"""
    nan = np.isnan(np.asarray(result)).any(axis=(2, 3))
    nan = np.pad(nan, ((0, 0), (0, -nan.shape[1] % size)))
    return nan.reshape(len(nan), -1, size).any(axis=2)


@pytest.mark.parametrize(
    ("mask", "tile"), list(zip(MASKS, [TALL, WIDE, TALL, WIDE], strict=True)), ids=list(MASKS)
)
def test_a_tile_is_visited_iff_something_in_it_is_visible(mask, tile):
    """A visited tile multiplies its values even by P = 0, so NaN in one tile shows who read it."""
    mask = MASKS[mask]
    call = random_call(mask=mask)
    problem, operands = split_call(call, interpret=True)
    out, lse = forward(problem, operands, tile)
    dout = jnp.ones_like(out)
    saved = Saved(dout, *row_statistics(out, lse, dout, None))
    want = visible_tiles(mask, tile)
    assert 0 < want.sum() < want.size

    value = one_tile_of_nan(call.value, tile.key)
    many = repeat_batch(dataclasses.replace(call, value=None), len(value))
    problem, operands = split_call(dataclasses.replace(many, value=value), interpret=True)
    if mask.key_value_lengths is None:  # else NaN behind the length is not even loaded
        out, _ = forward(problem, operands, tile)
        np.testing.assert_array_equal(spoilt_tiles(out, tile.query).T, want)
        dq, _ = query_gradient(problem, operands, repeat_batch(saved, len(value)), tile)
        np.testing.assert_array_equal(spoilt_tiles(dq, tile.query).T, want)

    dout = one_tile_of_nan(saved.dout, tile.query)
    many = repeat_batch(call, len(dout))
    problem, operands = split_call(many, interpret=True)
    saved = repeat_batch(saved, len(dout))._replace(dout=dout)
    _, dv, _ = key_value_gradients(problem, operands, saved, tile)
    np.testing.assert_array_equal(spoilt_tiles(dv, tile.key), want)


@pytest.mark.parametrize(
    ("mask", "size", "masked_loops"),
    [
        (Mask(), 64, 0),
        (Mask(is_causal=True), 64, 1),
        (Mask(is_causal=True, window=(20, None)), 64, 2),
        (Mask(), 60, 1),
    ],
    ids=["everything", "causal", "causal window", "ragged"],
)
def test_masking_code_exists_only_where_tiles_can_be_partial(monkeypatch, mask, size, masked_loops):
    calls = []
    original = Mask.visible
    monkeypatch.setattr(
        Mask, "visible", lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    )
    tiles = TileSizes(forward=TALL, dq=TALL, dkv=WIDE)
    call = random_call(T=size, S=size, mask=mask)

    def both(call, dout):
        (_, lse), backward = jax.vjp(functools.partial(attention, tiles=tiles), call)
        return backward((dout, jnp.zeros_like(lse)))

    jax.eval_shape(both, call, call.query)
    kernels = 3
    assert len(calls) == kernels * masked_loops


# ---- sizes --------------------------------------------------------------------------------------


def outcome(call, run):
    """Output, LSE and gradients of a call, all as float32."""

    def loss(arrays):
        out, lse = run(dataclasses.replace(call, **arrays))
        weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        total = jnp.sum(out.astype(jnp.float32) * weights)
        return total + jnp.sum(jnp.where(lse == -jnp.inf, 0, lse)), (out, lse)

    arrays = {"query": call.query, "key": call.key, "value": call.value}
    grads, (out, lse) = jax.jit(jax.grad(loss, has_aux=True))(arrays)
    return jax.tree.map(lambda x: np.asarray(x, np.float32), {"out": out, "lse": lse, **grads})


@pytest.mark.parametrize(
    "sizes",
    [
        {"T": 1, "S": 1, "H": 1, "N": 1, "K": 1},
        {"T": 37, "S": 53, "H": 72, "Hv": 40, "N": 3, "K": 1},
        {"T": 65, "S": 33, "H": 8, "N": 4, "K": 2},
    ],
    ids=["one of each", "odd", "one past a tile"],
)
def test_any_size(sizes):
    """What lies past the end of an array is NaN in the interpreter: no padding may be read."""
    call = random_call(B=2, mask=Mask(is_causal=True), **sizes)
    got = outcome(
        call, functools.partial(attention, tiles=TileSizes(forward=TALL, dq=WIDE, dkv=TALL))
    )
    assert_close(got, outcome(call, reference.forward), tolerance=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_default_tiles_of_16_bit_inputs(dtype):
    call = random_call(T=150, S=150, H=64, dtype=dtype, mask=Mask(is_causal=True))
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), call)
    tolerance = {"bfloat16": 1e-2, "float16": 2e-3}[dtype]
    assert_close(outcome(call, attention), outcome(exact, reference.forward), tolerance)


def test_lengths_hide_what_is_behind_them_from_every_kernel():
    mask = Mask(
        is_causal=True,
        causal_alignment="bottom_right",
        query_lengths=jnp.array([33, 0, 80]),
        key_value_lengths=jnp.array([41, 112, 0]),
    )
    call = random_call(B=3, mask=mask)
    want = outcome(call, reference.forward)

    def poison(array, lengths):
        hidden = np.arange(array.shape[1])[None, :] >= np.asarray(lengths)[:, None]
        return jnp.where(hidden[:, :, None, None], jnp.nan, array)

    poisoned = dataclasses.replace(
        call,
        query=poison(call.query, mask.query_lengths),
        key=poison(call.key, mask.key_value_lengths),
        value=poison(call.value, mask.key_value_lengths),
    )
    tiles = TileSizes(forward=TALL, dq=WIDE, dkv=WIDE)
    got = outcome(poisoned, functools.partial(attention, tiles=tiles))
    assert_close(got, want, tolerance=1e-5)
    assert (got["lse"][1:] == -np.inf).all()


def test_nan_that_is_visible_is_not_hidden():
    call = random_call(T=32, S=32)
    call = dataclasses.replace(call, key=call.key.at[0, 5, 0, 0].set(jnp.nan))
    got = outcome(
        call, functools.partial(attention, tiles=TileSizes(forward=TALL, dq=TALL, dkv=TALL))
    )
    assert all(np.isnan(x).all() for x in got.values())


def test_64_bit_mode_changes_nothing():
    call = random_call(B=2, mask=Mask(is_causal=True))
    tiles = TileSizes(forward=TALL, dq=WIDE, dkv=TALL)
    want = outcome(call, functools.partial(attention, tiles=tiles))
    with jax.enable_x64(True):
        got = outcome(call, functools.partial(attention, tiles=tiles))
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


# ---- memory -------------------------------------------------------------------------------------


def test_grouped_heads_are_neither_repeated_nor_summed_outside_the_kernels():
    """No array of the whole program has both S and N: only q-like ones have N, only k-like S."""
    call = random_call(N=6, K=2)

    def both(call):
        (out, lse), backward = jax.vjp(attention, call)
        return backward((out, lse))

    text = jax.jit(both).trace(call).jaxpr.pretty_print(source_info=False, use_color=False)
    shapes_seen = {
        tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", text)
    }
    assert (1, T, 6, 16) in shapes_seen
    assert (1, S, 2, 16) in shapes_seen
    assert (1, S, 6, 16) not in shapes_seen


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [({"query": 48}, "Tile.query must be a power of two"), ({"key": 8}, "Tile.key"),
     ({"warps": 3}, "Tile.warps must be"), ({"stages": 0}, "Tile.stages must be")],
)  # fmt: skip
def test_a_tile_that_triton_cannot_run_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TALL, **change)


TABLE = jnp.linspace(-1.0, 1.0, 8)
SQUARE = TABLE[:, None] * TABLE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"score_mod": lambda s, b, n, i, j: s + TABLE[s.astype(int)]},
         "score_mod indexes a captured array by the score"),
        ({"score_mod": lambda s, b, n, i, j: jax.lax.fori_loop(0, n, lambda _, x: 2 * x, s)},
         "score_mod uses while"),
        ({"mask_mod": lambda b, n, i, j: jnp.cumsum(jnp.arange(4) * n)[i % 4] > j},
         "mask_mod uses"),
        ({"score_mod": lambda s, b, n, i, j: s * jnp.dot(SQUARE[n], SQUARE[j])},
         "score_mod applies dot_general to a captured array"),
        ({"score_mod": lambda s, b, n, i, j: s + TABLE[n], "deterministic": True},
         "deterministic=True with a score_mod"),
    ],
    ids=["by score", "loop", "vector", "product", "deterministic"],
)  # fmt: skip
def test_what_is_not_served_is_named_with_what_serves_it(arguments, message):
    arrays, others = draw(shapes.BY_NAME["grouped"])
    run = functools.partial(pallas_flash.dot_product_attention, **arrays, **others, **arguments)
    with pytest.raises(NotImplementedError, match=f"({message}).*'xla'"):
        run(implementation="triton")


def test_wide_heads_and_other_platforms_are_refused():
    call = random_call(H=320)
    assert "320" in str(unsupported(call, "gpu"))
    assert "tpu" in str(unsupported(random_call(), "tpu"))
    assert unsupported(random_call(), "gpu") is None
    with pytest.raises(NotImplementedError, match="320"):
        attention(call)


@pytest.mark.parametrize("head_dim", [16, 64, 72, 128, 256])
@pytest.mark.parametrize("capability", [None, 80, 89, 90])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_default_tiles_leave_room_for_the_accumulators(head_dim, capability, dtype):
    """Accumulators and two tiles of logits, float32, in 255 registers of each thread."""
    width = 1 << (head_dim - 1).bit_length()
    tiles = default_tile_sizes(head_dim, dtype, compute_capability=capability)
    for tile in (tiles.forward, tiles.dq):
        values = tile.query * width + 2 * tile.query * tile.key
        assert values <= 255 * 32 * tile.warps
    values = 2 * tiles.dkv.key * width + 2 * tiles.dkv.key * tiles.dkv.query
    assert values <= 255 * 32 * tiles.dkv.warps


def test_tiles_shrink_where_they_would_not_fit_in_shared_memory():
    tiles = functools.partial(default_tile_sizes, dtype="bfloat16")
    roomy = tiles(128)
    assert tiles(128, compute_capability=90, has_square_input=True) == roomy
    assert tiles(128, compute_capability=89) == roomy
    tight = tiles(128, compute_capability=89, has_square_input=True)
    assert tight.dkv.query * 2 == roomy.dkv.query
    assert tight.dkv.stages == 1
    assert tiles(256, compute_capability=90).dkv.stages == 2
    assert tiles(256, compute_capability=89).dkv.stages == 1
