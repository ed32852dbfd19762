"""What each implementation serves, asked of the implementations themselves.

`python -m pallas_flash.capabilities` prints the table as Markdown: each cell is "yes" or the number
of the error that a call gets. It is for the devices that the kernels are for (a Hopper GPU, CUDA),
whatever machine prints it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash.block_mask import block_mask
from pallas_flash.call import AttentionCall
from pallas_flash.implementations import MODULES
from pallas_flash.mask import Mask
from pallas_flash.mods import INDICES, Mod

B, T, N, K, H = 2, 128, 4, 2, 64


def _abstract(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _call(*, dtype: Any = jnp.bfloat16, head_dims: tuple[int, int] = (H, H), **fields: Any) -> Any:
    query_dim, value_dim = head_dims
    return AttentionCall(
        query=_abstract(B, T, N, query_dim, dtype=dtype),
        key=_abstract(B, T, K, query_dim, dtype=dtype),
        value=_abstract(B, T, K, value_dim, dtype=dtype),
        **{"static_scale": 0.125, **fields},
    )


def calls() -> dict[str, AttentionCall]:
    """One call for each capability, by the argument as users know it; its arrays are abstract."""
    integers = _abstract(B, T, dtype=jnp.int32)
    lengths = _abstract(B, dtype=jnp.int32)
    table = jnp.zeros((N, 9))
    reads_table = Mod.trace(
        "score_mod", lambda s, b, n, i, j: s + table[n, 0], jnp.float32, *INDICES
    )
    doubles = Mod.trace("score_mod", lambda s, b, n, i, j: 2 * s, jnp.float32, *INDICES)
    blocks = block_mask(lambda b, n, i, j: i >= j, T=T, S=T)
    causal = Mask(is_causal=True)
    return {
        "is_causal": _call(mask=causal),
        "local_window_size": _call(mask=Mask(window=(16, 0))),
        'causal_alignment="bottom_right"': _call(
            mask=Mask(is_causal=True, causal_alignment="bottom_right")
        ),
        "query_seq_lengths, key_value_seq_lengths": _call(
            mask=Mask(query_lengths=lengths, key_value_lengths=lengths)
        ),
        "mask": _call(mask=Mask(dense=_abstract(B, 1, T, T, dtype=jnp.bool_))),
        "bias": _call(bias=_abstract(1, N, T, T)),
        "query_segment_ids, key_value_segment_ids": _call(
            mask=Mask(query_segment_ids=integers, key_value_segment_ids=integers)
        ),
        "query_positions, key_value_positions": _call(
            mask=Mask(is_causal=True, query_positions=integers, key_value_positions=integers)
        ),
        "logits_soft_cap": _call(soft_cap=30.0),
        "sinks": _call(sinks=_abstract(N)),
        "alibi_slopes": _call(alibi_slopes=_abstract(N)),
        "scale as an array": _call(static_scale=None, traced_scale=_abstract()),
        "dropout_rate": _call(dropout_rate=0.1, dropout_seed=_abstract(2, dtype=jnp.uint32)),
        "score_mod": _call(score_mod=doubles),
        "score_mod that captures arrays": _call(score_mod=reads_table),
        "mask_mod": _call(mask=Mask(mask_mod=blocks.mod)),
        "mask_mod=block_mask(...)": _call(mask=Mask(mask_mod=blocks.mod, blocks=blocks)),
        "deterministic": _call(deterministic=True),
        "deterministic, score_mod that captures arrays": _call(
            deterministic=True, score_mod=reads_table
        ),
        "float16": _call(dtype=jnp.float16),
        "float32": _call(dtype=jnp.float32),
        "float64": _call(dtype=jnp.float64),
        "head dims 72 to 160": _call(head_dims=(72, 72)),
        "head dims 192 and 128": _call(head_dims=(192, 128)),
        "head dims above 256": _call(head_dims=(320, 320)),
    }


def refusals() -> dict[str, dict[str, str | None]]:
    """For each capability and implementation: None where it is served, else what the error says."""
    found: dict[str, dict[str, str | None]] = {}
    for capability, call in calls().items():
        with _on_its_own_device():
            found[capability] = {
                name: importlib.import_module(path).unsupported(call, "gpu")
                for name, path in MODULES.items()
            }
    return found


@contextlib.contextmanager
def _on_its_own_device() -> Iterator[None]:
    """The Hopper kernels first ask which GPU there is: here they are told that it is theirs."""
    module: Any = importlib.import_module(MODULES["mosaic"])
    ask = module._wrong_device
    module._wrong_device = lambda platform: None
    try:
        yield
    finally:
        module._wrong_device = ask


def markdown() -> str:
    """The table with its numbered errors.

    >>> print(markdown().splitlines()[2])
    | `is_causal` | yes | yes | yes | yes |
    """
    errors: list[str] = []

    def cell(reason: str | None) -> str:
        if reason is None:
            return "yes"
        if reason not in errors:
            errors.append(reason)
        return f"no ({errors.index(reason) + 1})"

    head = ["", *(f"`{name}`" for name in MODULES)]
    lines = [_row(head), _row(["---"] * len(head))]
    for capability, reasons in refusals().items():
        lines.append(_row([f"`{capability}`", *(cell(reasons[name]) for name in MODULES)]))
    return "\n".join([*lines, "", *(f"{n}. {reason}" for n, reason in enumerate(errors, 1))])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(markdown())
