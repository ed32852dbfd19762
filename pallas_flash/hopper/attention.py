"""The Hopper kernels as one implementation of an `AttentionCall` (see `pallas_flash.call`)."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_flash.call import AttentionCall, Gradients, beyond_foundation
from pallas_flash.hopper import backward_tiles
from pallas_flash.hopper.backward import backward as key_tiles
from pallas_flash.hopper.bias import TILE_DTYPES, bias_form, dense_as_bias, dense_refusal
from pallas_flash.hopper.forward import forward as query_tiles
from pallas_flash.hopper.problem import masks_first_only
from pallas_flash.hopper.tile_sizes import ROWS, default_forward_tiles
from pallas_flash.triton.attention import backward as triton_backward
from pallas_flash.triton.attention import unsupported as triton_unsupported
from pallas_flash.varying import vary_like

NAME = "mosaic"
DTYPES = ("bfloat16", "float16")
WITHHELD = True
"""Serve only calls without masks in the loop over key tiles and without soft cap, sinks and ALiBi.

The kernel with its own interval of key tiles for each warpgroup was compared at full size for plain
and causal attention; the rest is tested tile by tile in test_hopper_softmax.py, but has not run on
the hardware: tests/gpu/test_hopper_forward.py must be green before this becomes False."""
LARGEST_HEAD_DIM = 256


def unsupported(call: AttentionCall, platform: str) -> str | None:
    """Why these kernels cannot serve the call, naming the argument; None when they can."""
    # First, because no change to the call helps on another device.
    wrong_device = _wrong_device(platform)
    if wrong_device is not None:
        return wrong_device
    sizes = call.sizes
    argument = beyond_foundation(call if WITHHELD else _foundation_part(call))
    if argument is not None:
        return f"the Hopper kernels do not serve {argument} yet; 'triton' and 'xla' do"
    if call.query.dtype.name not in DTYPES:
        return (
            f"query has dtype {call.query.dtype.name}, the Hopper kernels take "
            f"{' and '.join(DTYPES)}; cast, or use 'triton' or 'xla'"
        )
    if 0 in sizes:
        return (
            f"query {call.query.shape}, key {call.key.shape} or value {call.value.shape} is empty, "
            "the Hopper kernels need something to do; 'triton' and 'xla' take empty arrays"
        )
    for name, dim in (("query", sizes.H), ("value", sizes.Hv)):
        if dim % ROWS or dim > LARGEST_HEAD_DIM:
            return (
                f"{name} has head dim {dim}, the Hopper kernels take 64, 128, 192 and 256 so far; "
                "'triton' takes any up to 256"
            )
    return _unsupported_bias(call, platform) or (_not_proven(call) if WITHHELD else None)


def _not_proven(call: AttentionCall) -> str | None:
    """Why a call is withheld whose masks are in the loop over key tiles; None for the others."""
    mask, sizes = call.mask, call.sizes
    if masks_first_only(mask, sizes):
        return None
    if mask.has_lengths:
        name = "query_seq_lengths or key_value_seq_lengths"
    elif any(side is not None for side in mask.window):
        name = "local_window_size"
    else:
        name = (
            f"causal_alignment='bottom_right' and S - T = {sizes.S - sizes.T}, no multiple of 64,"
        )
    return f"the Hopper kernels are not proven with {name} yet; 'triton' serves it"


def _unsupported_bias(call: AttentionCall, platform: str) -> str | None:
    """Why neither the bias nor the dense mask, which becomes one, can be served; or None."""
    if call.bias is None and call.mask.dense is None:
        return None
    if WITHHELD:
        argument = "bias" if call.bias is not None else "a dense mask"
        return f"the Hopper kernels do not serve {argument} yet; 'triton' and 'xla' do"
    # Triton's kernels serve the gradients.
    return dense_refusal(call) or triton_unsupported(_with_triton_bias(call), platform)


def _with_triton_bias(call: AttentionCall) -> AttentionCall:
    """The call with a bias of a dtype that Triton's kernels take."""
    if call.bias is None or call.bias.dtype.name in TILE_DTYPES:
        return call
    return dataclasses.replace(call, bias=call.bias.astype(jnp.float32))


def _foundation_part(call: AttentionCall) -> AttentionCall:
    """The call without what the forward serves beyond the foundation."""
    mask = dataclasses.replace(call.mask, query_segment_ids=None, key_value_segment_ids=None)
    return dataclasses.replace(call, mask=mask, soft_cap=None, sinks=None, alibi_slopes=None)


def _wrong_device(platform: str) -> str | None:
    if platform != "gpu":
        return f"the Hopper kernels need a GPU of compute capability 9.0, not {platform!r}"
    capability = _device_property("compute_capability")
    if capability != "9.0":
        return (
            f"the Hopper kernels need a GPU of compute capability 9.0, this one has {capability}; "
            "use 'triton' or 'xla'"
        )
    return None


@functools.cache
def _device_property(name: str) -> str | int | None:
    return getattr(jax.local_devices(backend="gpu")[0], name, None)


def forward(call: AttentionCall) -> tuple[Array, Array]:
    """Output and LSE, see `pallas_flash.hopper.forward`."""
    call = dense_as_bias(call)
    sizes = call.sizes
    multiprocessors = _device_property("core_count")
    assert isinstance(multiprocessors, int)
    masks_in_loop = not masks_first_only(call.mask, sizes)
    tiles = default_forward_tiles(
        sizes.H, sizes.Hv, masks_in_loop=masks_in_loop, bias=bias_form(call)
    )
    # The kernel's results carry no mark of the shard_map axes over which its operands vary.
    return vary_like(query_tiles(call, tiles, multiprocessors), call)


def backward_unsupported(call: AttentionCall, wanted: frozenset[str] = frozenset()) -> str | None:
    """Why the Hopper backward cannot serve a call that the forward serves; None when it can.

    Triton's backward serves the rest: it needs the same residuals.

    Args:
      call: the call.
      wanted: names of the optional arguments whose gradients are asked for.
    """
    sizes = call.sizes
    argument = beyond_foundation(_foundation_part(call))
    if argument is not None or call.bias is not None or call.mask.dense is not None:
        return f"{argument or 'bias or a dense mask'}; it takes plain calls"
    if "alibi_slopes" in wanted:
        return "the gradient of alibi_slopes"
    if sizes.Hv != sizes.H or sizes.H not in backward_tiles.TUNED:
        return f"head dims {sizes.H} and {sizes.Hv}; it takes equal ones of 64, 128 or 256"
    if call.deterministic and call.mask.has_segments:
        return "deterministic with segment ids: key tiles do not know whose turn it is"
    if call.deterministic and WITHHELD:
        return "deterministic: its ordered sums have not run on the hardware yet"
    return None


def backward(
    call: AttentionCall,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array | None,
    wanted: frozenset[str],
) -> Gradients:
    """Gradients of q, k, v and sinks, see `pallas_flash.hopper.backward`."""
    if backward_unsupported(call, wanted) is not None:
        return triton_backward(_with_triton_bias(call), out, lse, dout, dlse, wanted)
    tiles = backward_tiles.default_backward_tiles(call.sizes.H)
    return key_tiles(call, out, lse, dout, dlse, tiles)
