"""Attention implementations by name, ours and others', behind one signature.

reference, xla, triton, mosaic   pallas_flash's own
triton@FORWARD/DQ/DKV            pallas_flash's Triton kernels with other tiles, each written
                                 QUERYxKEYwWARPSsSTAGES, as in triton@128x64w8s3/128x64w8s2/...
cudnn, jax_xla                   jax.nn.dot_product_attention
jax_pallas_triton                JAX's example kernel for the Triton lowering
tokamax_NAME                     tokamax, with its implementation NAME
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

import pallas_flash
from pallas_flash import implementations
from pallas_flash.shapes import Case

Attention = Callable[[Array, Array, Array], Array]
OTHERS = ("cudnn", "jax_xla", "jax_pallas_triton")
TILE = re.compile(r"(\d+)x(\d+)w(\d+)s(\d+)")


def attention(peer: str, case: Case) -> Attention:
    """(query, key, value) -> output of a peer on a case.

    Raises:
      ValueError: no peer of that name, or tiles that do not parse.
      NotImplementedError: the peer cannot express the case.
      ImportError: the peer is not installed.
    """
    check_name(peer)
    if case.bias is not None or case.dense is not None or case.q_lengths or case.kv_lengths:
        raise NotImplementedError(f"{case.name}: only causal and window masks are timed")
    if peer in implementations.NAMES:
        return functools.partial(
            pallas_flash.dot_product_attention,
            is_causal=case.is_causal,
            local_window_size=case.window,
            implementation=peer,
        )
    if peer.startswith("triton@"):
        return _triton_with_tiles(peer.removeprefix("triton@"), case)
    if peer in ("cudnn", "jax_xla"):
        options: dict[str, Any] = {
            "is_causal": case.is_causal,
            "local_window_size": case.window,
            "implementation": peer.removeprefix("jax_"),
        }
        return functools.partial(jax.nn.dot_product_attention, **options)
    if case.window is not None:
        raise NotImplementedError(f"{case.name}: {peer} is timed without a window only")
    if peer == "jax_pallas_triton":
        return _jax_pallas_triton(case)
    if peer.startswith("tokamax_"):
        import tokamax  # pyright: ignore[reportMissingImports]

        return functools.partial(
            tokamax.dot_product_attention,
            is_causal=case.is_causal,
            implementation=peer.removeprefix("tokamax_"),
        )
    raise AssertionError(f"{peer} passed check_name")


def check_name(peer: str) -> None:
    """Raise a ValueError that lists the peers unless this is one, installed or not."""
    if peer.startswith("triton@"):
        parse_tiles(peer.removeprefix("triton@"))
    elif peer not in (*implementations.NAMES, *OTHERS) and not peer.startswith("tokamax_"):
        raise ValueError(
            f"no peer {peer!r}; there are {', '.join((*implementations.NAMES, *OTHERS))}, "
            "triton@TILES and tokamax_NAME"
        )


def _triton_with_tiles(text: str, case: Case) -> Attention:
    from pallas_flash import triton
    from pallas_flash.call import AttentionCall
    from pallas_flash.mask import Mask

    tiles = parse_tiles(text)
    mask = Mask(is_causal=case.is_causal, window=case.window or (None, None))

    def run(query: Array, key: Array, value: Array) -> Array:
        call = AttentionCall(
            query=query, key=key, value=value, mask=mask, static_scale=case.H**-0.5
        )
        return triton.attention(call, tiles=tiles)[0]

    return run


def parse_tiles(text: str):
    """`pallas_flash.triton.TileSizes` from FORWARD/DQ/DKV.

    >>> parse_tiles("128x64w8s3/64x64w4s2/64x128w8s2").dq
    Tile(query=64, key=64, warps=4, stages=2)
    """
    from pallas_flash.triton import Tile, TileSizes

    matches = [TILE.fullmatch(part) for part in text.split("/")]
    if len(matches) != 3 or None in matches:
        raise ValueError(
            "tiles must be FORWARD/DQ/DKV, each QUERYxKEYwWARPSsSTAGES like 128x64w8s3, "
            f"got {text!r}"
        )
    tiles = []
    for match in matches:
        assert match is not None
        query, key, warps, stages = map(int, match.groups())
        tiles.append(Tile(query=query, key=key, warps=warps, stages=stages))
    return TileSizes(forward=tiles[0], dq=tiles[1], dkv=tiles[2])


def _jax_pallas_triton(case: Case) -> Attention:
    from jax.experimental.pallas.ops.gpu import attention as kernels

    def run(query: Array, key: Array, value: Array) -> Array:
        # It knows no grouped heads: keys and values are repeated, as its users must.
        key, value = (jnp.repeat(x, case.sizes.G, axis=2) for x in (key, value))
        return kernels.mha(
            query, key, value, segment_ids=None, sm_scale=case.H**-0.5, causal=case.is_causal
        )

    return run
