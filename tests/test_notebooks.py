"""Every notebook runs from top to bottom, and what it shows to a reader is what it computes.

Each run leaves the notebook with fresh outputs in `runs/notebooks/`; copy it over the committed one
after an edit (CONTRIBUTING.md).
"""

import copy
import re
import shutil
import tempfile
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FRESH = ROOT / "runs" / "notebooks"
CELL_SECONDS = 300
LARGEST_BYTES = 500_000
# A home or temporary folder says where it was run and helps nobody.
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|tmp|Users|usr|opt|var|mnt)/\w")


@pytest.fixture
def kernel_folder(monkeypatch):
    """A short path of its own: sockets live there, so no network and no writable home is needed."""
    folder = tempfile.mkdtemp(prefix="nb")
    for variable in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(variable, folder)
    # The committed outputs were made on a CPU, and the tests of other workers have the GPU.
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def execute(notebook: nbformat.NotebookNode, kernel_folder: str) -> nbformat.NotebookNode:
    """The notebook with the outputs of a run in a new kernel of this very interpreter."""
    manager = AsyncKernelManager(
        # With no folders to look into, what is left is the interpreter that runs the tests.
        kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
        transport="ipc",
        ip=f"{kernel_folder}/socket",
        connection_file=f"{kernel_folder}/kernel.json",
    )
    client = NotebookClient(
        notebook,
        km=manager,
        timeout=CELL_SECONDS,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(ROOT)}},
    )
    try:
        return client.execute()
    finally:
        # nbclient leaves the kernel of a manager that it was given.
        run_sync(manager.shutdown_kernel)(now=True)


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    """What each code cell prints, cell by cell; pictures left out."""
    return [
        "".join(output.text for output in cell.outputs if output.output_type == "stream")
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def pictures(notebook: nbformat.NotebookNode) -> list[int]:
    """How many pictures each code cell shows."""
    return [
        sum("image/png" in output.get("data", {}) for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_and_shows_what_it_computes(path, kernel_folder):
    committed = nbformat.read(path, as_version=4)
    fresh = copy.deepcopy(committed)
    try:
        execute(fresh, kernel_folder)
    except CellExecutionError as error:
        pytest.fail(f"{path.name}: {error}", pytrace=False)
    FRESH.mkdir(parents=True, exist_ok=True)
    # Names the versions of the machine that ran it; every reader has others.
    fresh.metadata.pop("language_info", None)
    nbformat.write(fresh, FRESH / path.name)
    stale = f"make notebooks, then cp runs/notebooks/{path.name} notebooks/"
    assert printed(committed) == printed(fresh), stale
    assert pictures(committed) == pictures(fresh), stale


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_small_and_says_nothing_of_a_machine(path):
    assert path.stat().st_size <= LARGEST_BYTES, "make its pictures smaller: figure.dpi, figsize"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert not any("stderr" in str(cell.get("outputs")) for cell in notebook.cells)
    texts = [cell.source for cell in notebook.cells] + printed(notebook)
    assert not [text for text in texts if MACHINE_PATH.search(text) or str(ROOT) in text]
