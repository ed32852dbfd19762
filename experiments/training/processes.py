"""Joining the processes of a run on several hosts, by what their environment says.

JAX finds SLURM and Open MPI by itself; a plain start sets three variables for each process:

    JAX_COORDINATOR_ADDRESS=host:port  JAX_NUM_PROCESSES=4  JAX_PROCESS_ID=0
"""

from collections.abc import Mapping
from typing import Any

PLAIN = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def distributed_arguments(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Arguments of `jax.distributed.initialize`; None for a run of one process.

    Raises:
      ValueError: a plain start is incomplete or no number.

    >>> distributed_arguments({"SLURM_NTASKS": "1"}) is None
    True
    >>> distributed_arguments({"SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"})
    {}
    """
    given = [name for name in PLAIN if name in environment]
    if given:
        missing = sorted(set(PLAIN) - set(given))
        if missing:
            raise ValueError(f"{', '.join(given)} is set, but not {', '.join(missing)}")
        address, *numbers = (environment[name] for name in PLAIN)
        if not all(number.isdigit() for number in numbers):
            raise ValueError(f"{PLAIN[1]} and {PLAIN[2]} must be integers, got {numbers}")
        count, index = map(int, numbers)
        if not index < count:
            raise ValueError(f"{PLAIN[2]} must be below {PLAIN[1]}={count}, got {index}")
        return {"coordinator_address": address, "num_processes": count, "process_id": index}
    # Inside an allocation of one task there is nobody to wait for.
    tasks = environment.get("SLURM_NTASKS", "1") if "SLURM_JOB_ID" in environment else "1"
    mpi = environment.get("OMPI_COMM_WORLD_SIZE", "1")
    return {} if int(tasks) > 1 or int(mpi) > 1 else None


def join_processes(environment: Mapping[str, str]) -> None:
    """Start `jax.distributed` when the environment asks for it; before any device is touched."""
    arguments = distributed_arguments(environment)
    if arguments is not None:
        import jax

        jax.distributed.initialize(**arguments)
