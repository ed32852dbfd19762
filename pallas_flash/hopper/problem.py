"""What the Hopper forward is compiled for, and what its warpgroups share."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from pallas_flash.call import Sizes
from pallas_flash.hopper import work
from pallas_flash.hopper.bias import BiasForm
from pallas_flash.hopper.tile_sizes import ROWS, ForwardTiles
from pallas_flash.mask import Mask
from pallas_flash.row_statistics import LOG2_E

Refs = Any
Index = Any


class Problem(NamedTuple):
    """The static side of one call: what the kernel is compiled for."""

    sizes: Sizes
    mask: Mask  # arrays replaced by placeholders: it says which fields there are
    scale: float
    tiles: ForwardTiles
    multiprocessors: int
    dtype: Any
    soft_cap: float | None = None
    has_sinks: bool = False
    has_alibi: bool = False
    bias: BiasForm | None = None

    @property
    def interval_mask(self) -> Mask:
        """The mask without its segment ids, which are no interval of indices."""
        return dataclasses.replace(self.mask, query_segment_ids=None, key_value_segment_ids=None)

    @property
    def padded_rows(self) -> int:
        """Query rows of all units."""
        return self.units * self.tiles.queries * self.tiles.cluster

    @property
    def units(self) -> int:
        return work.units(self.sizes.T, self.tiles.queries, self.tiles.cluster)

    @property
    def exponent_scale(self) -> float:
        """Positive factor of what `softmax.logits` returns, to units of log2.

        It commutes with the maximum and joins the exponent's one FMA.
        """
        if self.soft_cap is not None:
            return self.soft_cap * LOG2_E
        return self.scale * LOG2_E if self.scale > 0 else 1.0

    @property
    def product_scale(self) -> float:
        """Factor of q k^T in what `softmax.logits` returns (before the soft cap's tanh)."""
        if self.soft_cap is not None:
            return self.scale / self.soft_cap
        return 1.0 if self.scale > 0 else self.scale * LOG2_E

    @property
    def logit_scale(self) -> float:
        """Factor of anything else in natural-log units there."""
        if self.soft_cap is not None:
            return 1.0 / self.soft_cap
        return LOG2_E / self.exponent_scale

    @property
    def always_full(self) -> bool:
        """True when no key tile is ever partial."""
        return self.mask.is_trivial and self.sizes.S % self.tiles.keys == 0

    @property
    def masks_first_only(self) -> bool:
        return masks_first_only(self.mask, self.sizes)

    @property
    def first_may_be_empty(self) -> bool:
        """True when a row may see nothing of the key tile that is visited first."""
        return not self.always_full or self.bias is not None

    @property
    def later_may_be_empty(self) -> bool:
        """True when a row may have seen nothing behind its first key tile."""
        return not self.masks_first_only or self.bias is not None

    @property
    def lowest_logit(self) -> float:
        """What finite logits must stay above, so that their product by the scale is finite."""
        return -(2.0**124) / max(1.0, self.exponent_scale)

    @property
    def bias_in_ring(self) -> bool:
        """True when the bias comes key tile by key tile, through shared memory."""
        return self.bias is not None and self.bias.kind != "rows"

    @property
    def batch_first(self) -> bool:
        """True when heads are counted batch row by batch row first.

        Those that read the same bias tiles then run together, and L2 holds them.
        """
        return self.bias is not None and self.bias.kind == "tile" and not self.bias.per_batch

    @property
    def same_keys_in_cluster(self) -> bool:
        """True when all warpgroups of a cluster always visit the same key tiles."""
        rows = self.tiles.queries * self.tiles.cluster
        return self.mask.is_trivial and self.sizes.T % rows == 0


class Barriers(NamedTuple):
    q_ready: Any
    q_free: Any
    k_ready: Any
    k_free: Any
    v_ready: Any
    v_free: Any
    bias_ready: Any  # None without a ring for the bias
    bias_free: Any
    done: Any  # cluster: neither CTA leaves while the other may still signal it


class Scratch(NamedTuple):
    query: Any  # (consumers, 64, H)
    key: Any  # (stages, keys, H)
    value: Any  # (stages, keys, Hv)
    out: Any  # (consumers, 64, Hv), None when it goes through `query`
    bias: Any  # (bias_stages, queries, keys) or (bias_stages, keys), None without a ring
    barriers: Barriers


class Tile(NamedTuple):
    """One query tile of this CTA: where it is and which key tiles are loaded for it."""

    batch: Index
    head: Index
    row: Index  # first query row of the CTA
    q_length: Index
    kv_length: Index
    lo: Index  # first key tile that the whole cluster loads
    hi: Index  # one past the last of them

    @property
    def count(self) -> Index:
        return self.hi - self.lo


def masks_first_only(mask: Mask, sizes: Sizes) -> bool:
    """True when only the key tile that a warpgroup visits first can be partial.

    Key tiles come last first, so this is the tile of the diagonal, or of the end of the keys. Its
    loop then is the unmasked one: a branch in it would cost more than the masking code, for ptxas
    waits for all of wgmma where two branches meet.
    """
    if not mask.is_interval or mask.has_lengths or mask.left is not None:
        return False
    if mask.right is None:
        return True
    # The rows' diagonal ends a multiple of 64 after the start of a key tile.
    return (mask.offset(sizes.T, sizes.S) + mask.right) % ROWS == 0
