"""The mask object against a brute-force mask, tile by tile."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pallas_flash.mask import Bounds, Mask
from pallas_flash.schedule import schedule, tile_map, visited_tiles

_side = st.none() | st.integers(0, 12)


@st.composite
def masks(draw) -> Mask:
    return Mask(
        is_causal=draw(st.booleans()),
        window=(draw(_side), draw(_side)),
        causal_alignment=draw(st.sampled_from(["top_left", "bottom_right"])),
    )


def brute_force(mask: Mask, T: int, S: int, q_length: int, kv_length: int) -> np.ndarray:
    """(T, S) visibility, one element at a time."""
    seen = np.zeros((T, S), bool)
    offset = kv_length - q_length if mask.causal_alignment == "bottom_right" else 0
    for i in range(q_length):
        for j in range(kv_length):
            place, (left, right) = i + offset, mask.window
            seen[i, j] = (
                (not mask.is_causal or j <= place)
                and (left is None or j >= place - left)
                and (right is None or j <= place + right)
            )
    return seen


@given(
    mask=masks(), T=st.integers(1, 20), S=st.integers(1, 20), data=st.data(),
    block=st.integers(1, 7),
)  # fmt: skip
def test_bounds_are_exact_on_both_axes(mask, T, S, data, block):
    q_length, kv_length = data.draw(st.integers(0, T)), data.draw(st.integers(0, S))
    seen = brute_force(mask, T, S, q_length, kv_length)
    lengths = {"q_length": q_length, "kv_length": kv_length}
    for start in range(0, T, block):
        check_bounds(mask.kv_bounds(start, block, **lengths), seen[start : start + block], block)
    for start in range(0, S, block):
        check_bounds(
            mask.q_bounds(start, block, **lengths), seen[:, start : start + block].T, block
        )


def check_bounds(bounds: Bounds, rows: np.ndarray, block: int) -> None:
    """`rows` is the visibility of one tile against the whole other axis."""
    lo, full_lo, full_hi, hi = bounds
    assert 0 <= lo <= full_lo <= full_hi <= hi
    outside = np.ones(rows.shape[1], bool)
    outside[lo:hi] = False
    assert not rows[:, outside].any(), "something visible is skipped"
    assert rows[:, full_lo:full_hi].all(), "something hidden is not masked"
    for first in range(0, rows.shape[1], block):
        tile, number = rows[:, first : first + block], first // block
        in_tiles = bounds.in_tiles(block)
        if tile.any():
            assert in_tiles.lo <= number < in_tiles.hi
        if in_tiles.full_lo <= number < in_tiles.full_hi:
            assert tile.all()
            assert tile.shape[1] == block


def test_bounds_are_tight_for_a_causal_window():
    mask = Mask(is_causal=True, window=(10, None))
    assert mask.kv_bounds(32, 8, q_length=64, kv_length=64) == Bounds(22, 29, 33, 40)
    assert mask.q_bounds(32, 8, q_length=64, kv_length=64) == Bounds(32, 39, 43, 50)


@given(mask=masks(), T=st.integers(1, 12), S=st.integers(1, 12), data=st.data())
def test_visible_equals_brute_force(mask, T, S, data):
    q_length, kv_length = data.draw(st.integers(0, T)), data.draw(st.integers(0, S))
    got = mask.visible(
        np.arange(T)[:, None], np.arange(S)[None], q_length=q_length, kv_length=kv_length
    )
    np.testing.assert_array_equal(got, brute_force(mask, T, S, q_length, kv_length))


def test_bounds_of_traced_scalars_and_arrays_equal_those_of_ints():
    mask = Mask(is_causal=True, window=(5, None), causal_alignment="bottom_right")
    starts = np.arange(0, 24, 4)
    got = mask.kv_bounds(jnp.asarray(starts), 4, q_length=jnp.int32(18), kv_length=jnp.int32(20))
    for n, start in enumerate(starts):
        want = mask.kv_bounds(int(start), 4, q_length=18, kv_length=20)
        assert tuple(int(np.broadcast_to(x, starts.shape)[n]) for x in got) == want


# ---- schedules --------------------------------------------------------------------------------


def tiles_with_something_visible(seen: np.ndarray, blocks: tuple[int, int]) -> np.ndarray:
    T, S = seen.shape
    return np.array(
        [
            [seen[i : i + blocks[0], j : j + blocks[1]].any() for j in range(0, S, blocks[1])]
            for i in range(0, T, blocks[0])
        ]
    )


@given(mask=masks(), data=st.data())
@example(mask=Mask(is_causal=True), data=None)
def test_tile_map_is_exact_for_intervals(mask, data):
    T, S, blocks = 19, 23, (4, 5)
    lengths = [(T, S), (7, 23), (0, 3)] if data is None else [
        (data.draw(st.integers(0, T)), data.draw(st.integers(0, S))) for _ in range(3)
    ]  # fmt: skip
    q_lengths, kv_lengths = np.array(lengths, np.int32).T
    full = Mask(
        is_causal=mask.is_causal,
        window=mask.window,
        causal_alignment=mask.causal_alignment,
        query_lengths=jnp.asarray(q_lengths),
        key_value_lengths=jnp.asarray(kv_lengths),
    )
    got = np.asarray(tile_map(full, 3, T, S, blocks))
    for row, (q_length, kv_length) in enumerate(lengths):
        seen = brute_force(mask, T, S, q_length, kv_length)
        np.testing.assert_array_equal(got[row], tiles_with_something_visible(seen, blocks))


@given(cuts=st.lists(st.integers(1, 31), min_size=1, max_size=5, unique=True))
def test_packed_documents_visit_only_their_own_tiles(cuts):
    ids = np.searchsorted(np.sort(cuts), np.arange(32), side="right").astype(np.int32)
    ids[-3:] = -1
    mask = Mask(
        query_segment_ids=jnp.asarray(ids)[None], key_value_segment_ids=jnp.asarray(ids)[None]
    )
    seen = (ids[:, None] == ids) & (ids >= 0)
    np.testing.assert_array_equal(
        tile_map(mask, 1, 32, 32, (4, 4))[0], tiles_with_something_visible(seen, (4, 4))
    )


def test_positions_move_the_diagonal():
    positions = jnp.arange(16, dtype=jnp.int32)[None] + 16
    mask = Mask(is_causal=True, query_positions=positions)
    assert tile_map(mask, 1, 16, 48, (8, 8))[0].astype(int).tolist() == [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
    ]


def test_schedule_lists_visited_tiles_in_order():
    plan = schedule(Mask(is_causal=True, window=(4, None)), 1, 16, 16, (4, 4))
    lists = [
        order[:count].tolist() for order, count in zip(plan.order[0], plan.count[0], strict=True)
    ]
    assert lists == [[0], [0, 1], [1, 2], [2, 3]]


@pytest.mark.parametrize(
    ("mask", "visited"),
    [
        (Mask(), 64),
        (Mask(is_causal=True), 36),
        (Mask(is_causal=True, window=(127, None)), 15),
        (Mask(key_value_lengths=jnp.array([256], jnp.int32)), 16),
        (Mask(query_lengths=jnp.array([1], jnp.int32)), 8),
    ],
)
def test_work_grows_with_the_visible_area(mask, visited):
    assert visited_tiles(mask, 1, 1024, 1024, (128, 128)) == visited
