"""The implementations by name, and the choice among them by capability.

An implementation is a module (see `pallas_flash.call`), imported when it is first asked for: the
kernels need Pallas lowerings that a CPU-only installation may lack.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import os
from collections.abc import Iterator
from types import ModuleType

import jax

from pallas_flash.call import AttentionCall

MODULES = {
    "reference": "pallas_flash.reference",
    "xla": "pallas_flash.xla",
    "triton": "pallas_flash.triton.attention",
    "mosaic": "pallas_flash.hopper.attention",
}
NAMES = tuple(MODULES)
# Names that another library's function of this name takes.
ELSEWHERE = {
    "cudnn": ": for cuDNN's kernels call jax.nn.dot_product_attention(implementation='cudnn'), "
    "for the fastest kernels here pass None"
}
# Fastest first.
PREFERENCE = {"gpu": ("mosaic", "triton", "xla")}
ENVIRONMENT_VARIABLE = "PALLAS_FLASH_IMPLEMENTATION"

_default: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "implementation", default=None
)


@contextlib.contextmanager
def default_implementation(name: str | None) -> Iterator[None]:
    """Within the context, calls that pass `implementation=None` use this one.

    For code that cannot be edited. It wins over the environment variable
    `PALLAS_FLASH_IMPLEMENTATION`; None restores the choice by capability. It acts while a function
    is traced: a function compiled before keeps what it was compiled with.

    >>> import jax.numpy as jnp, pallas_flash
    >>> q = jnp.ones((1, 4, 2, 8))
    >>> with pallas_flash.default_implementation("reference"):
    ...     out = pallas_flash.dot_product_attention(q, q, q)
    """
    if name is not None:
        _check_name(name, "default_implementation's name")
    token = _default.set(name)
    try:
        yield
    finally:
        _default.reset(token)


def choose(call: AttentionCall, requested: str | None) -> ModuleType:
    """The implementation that serves this call.

    Args:
      call: the checked call.
      requested: a name, or None for the default: the context's, then the environment's, then the
        fastest that supports the call on this device.

    Raises:
      ValueError: an unknown name.
      NotImplementedError: the named implementation cannot serve the call, and why.
    """
    requested = requested or _default.get() or _from_environment()
    platform = current_platform()
    if requested is not None:
        _check_name(requested, "implementation")
        module = _load(requested)
        if 0 in call.sizes[:4]:
            # Nothing to tile: every implementation means what the reference says.
            return _load("reference")
        reason = module.unsupported(call, platform)
        if reason is not None:
            raise NotImplementedError(
                f"implementation={requested!r} cannot serve this call: {reason}. "
                "implementation=None chooses one that can"
            )
        return module
    if 0 in call.sizes[:4]:
        return _load("reference")
    for name in PREFERENCE.get(platform, ("xla",)):
        with contextlib.suppress(NotImplementedError):
            module = _load(name)
            if module.unsupported(call, platform) is None:
                return module
    return _load("xla")


def current_platform() -> str:
    """Where JAX puts new computations: cpu, gpu or tpu."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def _load(name: str) -> ModuleType:
    try:
        return importlib.import_module(MODULES[name])
    except ModuleNotFoundError as error:
        if error.name is None or not MODULES[name].startswith(error.name):
            raise
        raise NotImplementedError(
            f"implementation={name!r} is reserved for kernels that are not written yet: "
            "use None, 'xla' or 'reference'"
        ) from error


def _from_environment() -> str | None:
    name = os.environ.get(ENVIRONMENT_VARIABLE) or None
    if name is not None:
        _check_name(name, f"the environment variable {ENVIRONMENT_VARIABLE}")
    return name


def _check_name(name: str, what: str) -> None:
    if name not in NAMES:
        hint = ELSEWHERE.get(str(name), "")
        raise ValueError(f"{what} must be None or one of {', '.join(NAMES)}, got {name!r}{hint}")
