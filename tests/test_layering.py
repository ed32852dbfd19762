"""Imports point one way: pallas_flash <- models <- experiments."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("pallas_flash", "models", "experiments")
# The wheel carries pallas_flash alone, so what it imports at run time is what it depends on. jaxlib
# is a dependency of jax, pinned to it, and holds the MLIR dialects of an inline instruction.
LIBRARY_MAY_IMPORT = {
    "jax",
    "jaxlib",
    "numpy",
    "jaxtyping",
    "pallas_flash",
    *sys.stdlib_module_names,
}


def imported_packages(path: Path) -> set[str]:
    """Top-level packages that a file imports anywhere, functions included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_imports_one_above_it(package):
    above = set(PACKAGES[PACKAGES.index(package) + 1 :])
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    wrong = {path.name: bad for path in files if (bad := imported_packages(path) & above)}
    assert not wrong


def test_the_library_imports_only_what_it_declares():
    wrong = {
        path.name: bad
        for path in (ROOT / "pallas_flash").rglob("*.py")
        if (bad := imported_packages(path) - LIBRARY_MAY_IMPORT)
    }
    assert not wrong


def test_importing_the_library_touches_no_device_and_no_kernels():
    code = (
        "import sys, pallas_flash, jax._src.xla_bridge as bridge;"
        "assert not bridge._backends, 'a backend was started';"
        "assert 'pallas_flash.triton' not in sys.modules;"
        "assert 'flax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)
