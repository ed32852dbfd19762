"""Fixtures of the attention tests."""

import pytest

from pallas_flash import tiles


@pytest.fixture
def scan_in_several_tiles(monkeypatch):
    """Short calls are one tile to the scan's own rule; with this its loops run."""
    monkeypatch.setattr(
        tiles, "for_scan", lambda sizes, *_: tiles.TileSizes(min(48, sizes.T), min(64, sizes.S))
    )
