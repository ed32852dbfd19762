"""Sharded calls on eight simulated CPU devices, in a process of their own.

The number of devices is fixed when JAX starts, so these checks run as one script.
"""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import functools
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import pallas_flash
from pallas_flash import ring, tiles

# Several tiles, so that the loops are there.
tiles.for_scan = lambda sizes, *_: tiles.TileSizes(min(8, sizes.T), min(16, sizes.S))
assert jax.device_count() == 8
keys = jax.random.split(jax.random.key(0), 4)
B, T, N, K, H = 8, 32, 8, 8, 8
q, k, v = (jax.random.normal(key, (B, T, N, H)) for key in keys[:3])
bias = jax.random.normal(keys[3], (1, N, 1, T))


def loss(q, k, v, bias, **options):
    out = pallas_flash.dot_product_attention(q, k, v, bias, is_causal=True, **options)
    return jnp.sum(jnp.sin(out))


def close(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5)


gradients = jax.grad(loss, (0, 1, 2, 3))
want = jax.jit(functools.partial(gradients, implementation="reference"))(q, k, v, bias)

# jit with batch or heads sharded: nothing is gathered.
mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
for spec, bias_spec in ((P("x"), P()), (P(None, None, "x"), P(None, "x"))):
    shard = NamedSharding(mesh, spec)
    arguments = [jax.device_put(x, shard) for x in (q, k, v)]
    arguments.append(jax.device_put(bias, NamedSharding(mesh, bias_spec)))
    by_scan = functools.partial(gradients, implementation="xla")
    compiled = jax.jit(by_scan).lower(*arguments).compile()
    assert "all-gather" not in compiled.as_text(), spec
    close(compiled(*arguments), want)

# shard_map with varying-axes checks on, and a bias that is the same everywhere.
local = jax.shard_map(
    functools.partial(gradients, implementation="xla"),
    mesh=mesh, in_specs=(P("x"), P("x"), P("x"), P()), out_specs=(P("x"), P("x"), P("x"), P()),
)
close(jax.jit(local)(q, k, v, bias), want)

# The Triton kernels too; their interpreter knows no varying axes.
local = jax.shard_map(
    functools.partial(jax.grad(loss, (0, 1, 2)), implementation="triton"),
    mesh=mesh, in_specs=(P("x"), P("x"), P("x"), P()), out_specs=P("x"), check_vma=False,
)
close(jax.jit(local)(q, k, v, bias), want[:3])

# A ring over the sequence.
order = ring.zigzag_order(T, 8)
whole = P(None, "x")


@functools.partial(jax.shard_map, mesh=mesh, in_specs=(whole, whole, whole, P()), out_specs=whole)
def ringed(q, k, v, sinks):
    return ring.ring_attention(q, k, v, sinks=sinks, axis_name="x", layout="zigzag", is_causal=True)


def ring_loss(q, k, v, sinks):
    return jnp.sum(jnp.sin(ringed(q[:, order], k[:, order], v[:, order], sinks)))


def plain_loss(q, k, v, sinks):
    out = pallas_flash.dot_product_attention(
        q, k, v, sinks=sinks, is_causal=True, implementation="reference"
    )
    return jnp.sum(jnp.sin(out))


sinks = jnp.linspace(-1.0, 1.0, N)
close(
    jax.jit(jax.grad(ring_loss, (0, 1, 2, 3)))(q, k, v, sinks),
    jax.jit(jax.grad(plain_loss, (0, 1, 2, 3)))(q, k, v, sinks),
)
print("all sharded forms agree")
"""


def test_sharded_calls_on_eight_devices():
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True, text=True, timeout=400, env=environment,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all sharded forms agree" in done.stdout
