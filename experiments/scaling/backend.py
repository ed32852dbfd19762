"""How JAX is started for a sweep: compile cache, and one thread for each CPU worker."""

import os
from pathlib import Path

import jax


def set_up_jax() -> None:
    """Settings that must come before JAX first touches a device."""
    # Compiled programs stay on disk: workers and later sweeps of the same shapes reuse them.
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", ".jax_cache")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    has_gpu = os.environ.get("JAX_PLATFORMS") != "cpu" and Path("/dev/nvidiactl").exists()
    if hasattr(os, "sched_setaffinity") and not has_gpu:
        _start_cpu_backend_with_one_thread()


def _start_cpu_backend_with_one_thread() -> None:
    """Start JAX's CPU backend with thread pools of one thread.

    Operations of small models are too short to be worth sharing out: a process with one thread
    does 30% more work per core second, and several workers use the cores. The pools are sized by
    the cores that the process may use when the backend starts; the limit is lifted after that, so
    that the kernel may still move the threads.
    """
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        jax.devices()
    finally:
        for task in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(task), allowed)
