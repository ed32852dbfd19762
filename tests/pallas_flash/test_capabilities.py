"""The table of capabilities is what the implementations answer, and covers every argument."""

import inspect
import re

import jax
import pytest

import pallas_flash
from pallas_flash import capabilities
from pallas_flash.implementations import NAMES

TABLE = capabilities.refusals()


def test_reference_and_xla_serve_everything_and_triton_nearly():
    assert not any(TABLE[row][name] for row in TABLE for name in ("reference", "xla"))
    refused = [row for row in TABLE if TABLE[row]["triton"]]
    assert refused == [
        "deterministic, score_mod that captures arrays", "float64", "head dims above 256",
    ]  # fmt: skip


@pytest.mark.parametrize("row", TABLE)
def test_a_refusal_says_which_implementation_serves_the_call(row):
    for reason in filter(None, TABLE[row].values()):
        assert any(f"'{name}'" in reason for name in NAMES), reason


def test_every_argument_has_a_row():
    """But those that say how to return, and those that every row has."""
    arguments = set(inspect.signature(pallas_flash.dot_product_attention).parameters)
    named = set(re.findall(r"\w+", " ".join(TABLE)))
    without = {"query", "key", "value", "implementation", "return_residual", "dropout_rng"}
    assert {name for name in arguments if name not in named} == without


def test_every_row_is_another_call():
    described = [
        str((jax.tree.structure(call), [(x.shape, x.dtype) for x in jax.tree.leaves(call)]))
        for call in [capabilities._call(), *capabilities.calls().values()]
    ]
    assert len(set(described)) == len(TABLE) + 1


def test_markdown_numbers_each_error_once():
    text = capabilities.markdown()
    rows, errors = text.split("\n\n")
    assert len(rows.splitlines()) == len(TABLE) + 2
    reasons = {reason for row in TABLE.values() for reason in row.values() if reason}
    assert len(errors.splitlines()) == len(reasons)
    for number in range(1, len(reasons) + 1):
        assert f"no ({number})" in rows
