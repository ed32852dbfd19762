"""The presets' table, its numbers, and the examples in docstrings."""

import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from models.cost import forward_flops_by_part, forward_flops_per_token, kv_bytes_per_token
from models.presets import PRESETS, llama3_2_1b, smollm2_135m, table

ROOT = Path(__file__).parents[2]


def test_table_has_one_row_a_preset_with_its_counts():
    header, *rows = table().splitlines()
    assert len(rows) == len(PRESETS)
    assert len({len(line) for line in (header, *rows)}) == 1, "columns are aligned"
    for row, (name, make) in zip(rows, PRESETS.items(), strict=True):
        assert row.startswith(name)
        assert f"{make().param_count():,}" in row
        assert f"{kv_bytes_per_token(make()):,}" in row


def test_command_prints_the_table():
    command = [sys.executable, "-m", "models.presets"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert table() in done.stdout
    assert "causal attention as half" in done.stdout


def test_kv_bytes_are_those_of_the_shape():
    assert kv_bytes_per_token(llama3_2_1b()) == 2 * 16 * 8 * 64 * 2
    assert kv_bytes_per_token(smollm2_135m(), "float32") == 2 * 30 * 3 * 64 * 4
    with pytest.raises(ValueError, match=r"dtype must be one of .*got 'int3'"):
        kv_bytes_per_token(llama3_2_1b(), "int3")


def test_only_the_causal_half_of_attention_grows_with_length():
    config = smollm2_135m()
    short, long = (forward_flops_per_token(config, seq_len) for seq_len in (1000, 3000))
    assert long - short == 2 * 30 * 9 * 64 * 2000
    assert forward_flops_by_part(config, 1)["head"] == 2 * 576 * 49_152
    with pytest.raises(ValueError, match="seq_len must be at least 1, got 0"):
        forward_flops_by_part(config, 0)


@pytest.mark.parametrize("module", ["models", "models.rope"])
def test_docstring_examples(module: str):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0
