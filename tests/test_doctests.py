"""Every example in a docstring of the three packages gives what it says."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("pallas_flash", "models", "experiments")
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL


def module_name(path: Path) -> str:
    """pallas_flash/triton/__init__.py is pallas_flash.triton."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_with_examples() -> list[str]:
    files = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return [module_name(path) for path in files if ">>> " in path.read_text(encoding="utf-8")]


def test_every_package_has_examples():
    assert {name.split(".")[0] for name in modules_with_examples()} == set(PACKAGES)


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples(name):
    results = doctest.testmod(importlib.import_module(name), optionflags=OPTIONS)
    # An example that doctest does not find, in a nested function say, is an example nobody runs.
    assert results.attempted > 0
    assert results.failed == 0, "the output above says which"
