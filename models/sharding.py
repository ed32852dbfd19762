"""How a decoder is spread over devices: one table from parameter names to partition specs.

The mesh has four axes, any of which may be 1:

    data      copies of the model, each with its part of a batch
    fsdp      parameters, gradients and moments are split here too, gathered layer by layer
    context   the sequence is split
    tensor    heads and hidden units are split

A step is written for one device; JAX's SPMD partitioner inserts the collectives that the specs
imply. Batches are split over data and fsdp together.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

AXES = ("data", "fsdp", "context", "tensor")
BATCH = ("data", "fsdp")

# The first pattern that is found in a parameter's path decides. Dimensions that the size of their
# axis does not divide stay whole. Stacked layers lead with L, which is never split.
TABLE: tuple[tuple[str, P], ...] = (
    (r"norm|bias", P()),
    (r"^embedding/table", P("tensor", "fsdp")),  # V, D
    (r"^head/kernel", P("fsdp", "tensor")),  # D, V
    (r"attention/(query|key|value)/kernel", P(None, "fsdp", "tensor", None)),  # L, D, N, H
    (r"attention/output/kernel", P(None, "tensor", None, "fsdp")),  # L, N, H, D
    (r"mlp/(gate|up)/kernel", P(None, "fsdp", "tensor")),  # L, D, F
    (r"mlp/down/kernel", P(None, "tensor", "fsdp")),  # L, F, D
)


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; `data` = 0 takes what the others leave."""

    data: int = 0
    fsdp: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name in ("fsdp", "context", "tensor"):
            if getattr(self, name) < 1:
                raise ValueError(f"mesh {name} must be at least 1, got {getattr(self, name)}")
        if self.data < 0:
            raise ValueError(f"mesh data must be 0 (what is left) or more, got {self.data}")


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a config over all devices.

    Raises:
      ValueError: the axes do not multiply to the number of devices.
    """
    count = len(jax.devices() if devices is None else devices)
    rest = config.fsdp * config.context * config.tensor
    data = config.data or count // rest
    if data * rest != count:
        raise ValueError(
            f"mesh data={config.data} x fsdp={config.fsdp} x context={config.context} x tensor="
            f"{config.tensor} does not fill {count} devices; leave data at 0 and make the others "
            "divide the number of devices"
        )
    shape = (data, config.fsdp, config.context, config.tensor)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 4, devices=devices)


def spec_for(name: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """Partition spec of one array of a training state, by its path.

    The moments of an optimizer carry the path of their parameter as the end of theirs, and take
    its spec. What the table does not know (counters, windows) is on every device.

    Raises:
      ValueError: the array has fewer dimensions than its spec: the table is out of date.
    """
    tail = re.search(r"(embedding|head|blocks|final_norm)/.*$", name)
    if tail is None or not shape:
        return P()
    for pattern, spec in TABLE:
        if re.search(pattern, tail.group()):
            if len(spec) > len(shape):
                raise ValueError(f"{name} has shape {shape}, too few dimensions for {spec}")
            return P(*(_fitting(axis, n, mesh) for axis, n in zip(spec, shape, strict=False)))
    raise ValueError(f"no line of models.sharding.TABLE covers parameter {tail.group()!r}")


def _fitting(axis: str | None, size: int, mesh: Mesh) -> str | None:
    if axis is None or mesh.shape[axis] == 1 or size % mesh.shape[axis]:
        return None
    return axis


def shardings(tree: Any, mesh: Mesh) -> Any:
    """A `NamedSharding` for every leaf of a tree of arrays or shapes."""

    def one(path: tuple, leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return NamedSharding(mesh, spec_for(name, leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(one, tree)


def active_mesh() -> AbstractMesh | None:
    """The mesh of this module that `jax.set_mesh` has set, if it has more than one device.

    None inside a `shard_map` of it: there every array is a device's own.
    """
    mesh = jax.sharding.get_abstract_mesh()
    ours = mesh.axis_names == AXES and set(mesh.axis_types) == {AxisType.Auto}
    return mesh if ours and mesh.size > 1 else None


def constrain_activations(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """The residual stream is split over batch and sequence and whole in D.

    Said once a block: otherwise the partitioner may choose to split D, as its parameters are, and
    to gather whole batches for it.
    """
    return _constrain(x, P(BATCH, "context", None))


def constrain_table(table: Float[Array, "V D"]) -> Float[Array, "V D"]:
    """The token embedding is gathered over fsdp before rows are looked up in it.

    A lookup in columns that are split over fsdp would give every device the whole batch.
    """
    return _constrain(table, P("tensor" if _divides(table.shape[0], "tensor") else None, None))


def _constrain(x: Array, spec: P) -> Array:
    return x if active_mesh() is None else jax.lax.with_sharding_constraint(x, spec)


def _divides(size: int, axis: str) -> bool:
    mesh = active_mesh()
    return mesh is not None and size % mesh.shape[axis] == 0


def check_batch(rows: int, seq_len: int, mesh: Mesh) -> None:
    """Refuse batches that the mesh cannot split evenly.

    Raises:
      ValueError: rows or sequence length are no multiple of their axes.
    """
    ways = math.prod(mesh.shape[axis] for axis in BATCH)
    if rows % ways:
        raise ValueError(
            f"a microbatch of {rows} sequences cannot be split over data x fsdp = {ways} devices; "
            f"make batch_size / accumulation a multiple of {ways}"
        )
    if seq_len % mesh.shape["context"]:
        raise ValueError(
            f"seq_len {seq_len} is no multiple of mesh context={mesh.shape['context']}"
        )
