"""Readers: every format, and every kind of damage named and counted with nothing else lost."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from experiments.data.documents import normalize_text
from experiments.data.pipeline.readers import ReadConfig, SourceConfig, find_files, read_file
from experiments.data.pipeline.records import Tally
from experiments.data.pipeline.streams import lines

SMALL = ReadConfig(max_document_mb=0.001)


def read(root, *paths, config=SMALL, **options):
    tally = Tally()
    files = find_files(SourceConfig("s", paths or (".",), **options), root, tally)
    return [record for file in files for record in read_file(file, config, tally)], tally


def jsonl(*texts, field="text"):
    return b"".join(json.dumps({field: text}).encode() + b"\n" for text in texts)


def test_formats_and_compressions_agree(tmp_path):
    texts = ["first text", "zweiter Text: ü", "第三"]
    plain = jsonl(*texts)
    (tmp_path / "a.jsonl").write_bytes(plain)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(plain[:30]) + gzip.compress(plain[30:]))
    packer = zstandard.ZstdCompressor()
    (tmp_path / "c.jsonl.zst").write_bytes(
        packer.compress(plain[:30]) + packer.compress(plain[30:])
    )
    pq.write_table(pa.table({"text": texts}), tmp_path / "d.parquet")
    (tmp_path / "e.txt").write_text("\n".join(texts))
    (tmp_path / "f.unknown").write_text("?")
    (tmp_path / ".hidden.txt").write_text("?")
    records, tally = read(tmp_path)
    assert [record.text for record in records] == texts * 4 + ["\n".join(texts)]
    assert len({record.id for record in records}) == len(records)
    assert records[0].id == "s/a.jsonl:1"
    assert dict(tally.faults) == {"file of unknown kind": 1}


def test_bad_rows_are_named_and_the_others_kept(tmp_path):
    rows = [
        b'{"text": "good one"}',
        b'{"text": ""}',
        b'{"text": "half',
        b'{"body": "no text"}',
        b'{"text": 3}',
        b"[1]",
        b'{"text": "lone \\ud800 surrogate"}',
        b'{"text": "bad \xff byte"}',
        b'{"text": "a\\u0000b"}',
        b'{"text": "' + b"x" * 2000 + b'"}',
        b"",
        b'{"text": "good two"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(rows))
    records, tally = read(tmp_path)
    texts = ["good one", "lone \ufffd surrogate", "bad \ufffd byte", "ab", "good two"]
    assert [record.text for record in records] == texts
    assert records[-1].id == "s/a.jsonl:12"
    assert dict(tally.dropped) == {"empty document": 1}
    assert dict(tally.faults) == {
        "row is not JSON": 1,
        "row without a text in 'text'": 3,
        "longer than max_document_mb = 0.001": 1,
    }
    assert dict(tally.changed) == {
        "lone surrogates replaced by U+FFFD": 1,
        "documents with invalid UTF-8 (replaced by U+FFFD)": 1,
        "NUL characters removed": 1,
    }
    assert tally.samples["row is not JSON"][0][1] == "a.jsonl:3"


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_truncated_compression_keeps_what_came_before(tmp_path, pack):
    import random

    words = random.Random(0)
    texts = [" ".join(str(words.random()) for _ in range(20)) for _ in range(3000)]
    suffix = ".gz" if pack is gzip.compress else ".zst"
    data = pack(jsonl(*texts))
    (tmp_path / f"cut.jsonl{suffix}").write_bytes(data[: len(data) // 2])
    (tmp_path / f"whole.jsonl{suffix}").write_bytes(data)
    (tmp_path / f"none.jsonl{suffix}").write_bytes(b"this is not compressed")
    records, tally = read(tmp_path)
    assert [r.text for r in records if "whole" in r.id] == texts
    cut = [r.text for r in records if "cut" in r.id]
    assert len(cut) > 500
    assert cut == texts[: len(cut)]
    assert tally.faults["file cut short or damaged"] == 2
    assert tally.faults["row is not JSON"] <= 1  # the row that the break went through


def test_a_200_mb_line_is_skipped_in_little_memory(tmp_path):
    import resource

    with (tmp_path / "a.jsonl").open("wb") as file:
        file.write(b'{"text": "before"}\n{"text": "')
        file.seek(200_000_000, 1)
        file.write(b'"}\n{"text": "after"}\n')
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    records, tally = read(tmp_path)
    assert [record.text for record in records] == ["before", "after"]
    assert dict(tally.faults) == {"longer than max_document_mb = 0.001": 1}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


def test_long_text_is_cut_between_lines_or_characters_and_all_kept(tmp_path):
    lined = "\n".join(f"line number {i}" for i in range(300))
    (tmp_path / "a.txt").write_text(lined)
    (tmp_path / "b.txt").write_text("é€😀" * 400)
    records, tally = read(tmp_path)
    first = [record.text for record in records if "a.txt" in record.id]
    assert "\n".join(first) == lined
    second = [record.text for record in records if "b.txt" in record.id]
    assert "".join(second) == "é€😀" * 400
    assert all(len(text.encode()) <= 1000 for text in first + second)
    assert not tally.dropped
    assert not tally.faults


def test_a_folder_in_place_of_a_file_and_an_unreadable_file(tmp_path):
    (tmp_path / "dir.jsonl").mkdir()
    (tmp_path / "dir.jsonl" / "inside.txt").write_text("inside")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 but not really PAR1")
    (tmp_path / "empty.parquet").write_bytes(b"")
    (tmp_path / "good.txt").write_text("good")
    records, tally = read(tmp_path)
    assert sorted(record.text for record in records) == ["good", "inside"]
    assert dict(tally.faults) == {
        "a directory in place of a file": 1,
        "file cut short or damaged": 2,
    }
    records, tally = read(tmp_path, "dir.jsonl", "good.txt")
    assert [record.text for record in records] == ["good"]
    assert dict(tally.faults) == {"a directory in place of a file": 1}


def test_parquet_columns(tmp_path):
    raw = pa.array([b"fine", b"bad \xff", None, b""], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"body": raw}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"body": [1, 2]}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"other": ["x"]}), tmp_path / "c.parquet")
    records, tally = read(tmp_path, text_field="body")
    assert [record.text for record in records] == ["fine", "bad \ufffd"]
    assert dict(tally.dropped) == {"empty document": 1}
    assert dict(tally.faults) == {
        "row without a text in 'body'": 1,
        "column 'body' is no string": 1,
        "no column 'body'": 1,
    }


def test_source_trees_skip_binaries(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("x = 1\r\ny = 2\n")
    (tmp_path / "src" / "b.c").write_bytes(b"\x7fELF\0\0")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "hook.py").write_text("no")
    records, tally = read(tmp_path)
    assert [(record.id, record.text) for record in records] == [("s/src/a.py:0", "x = 1\ny = 2")]
    assert dict(tally.faults) == {"binary file in a source tree": 1}


def test_a_path_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"source 's': .*missing\.txt does not exist"):
        read(tmp_path, "missing.txt")
    with pytest.raises(ValueError, match="no readable file"):
        read(tmp_path, ".")


@given(st.lists(st.binary(max_size=12), max_size=8), st.integers(1, 7), st.integers(1, 10))
def test_lines_do_not_depend_on_blocks(parts, block, limit):
    data = b"\n".join(parts)
    blocks = (data[i : i + block] for i in range(0, len(data), block))
    got = [(line.number, line.data, line.size) for line in lines(blocks, limit=limit)]
    pieces = data.split(b"\n")
    if not pieces[-1]:
        pieces.pop()
    wanted = [(i, p if len(p) <= limit else None, len(p)) for i, p in enumerate(pieces, start=1)]
    assert got == wanted


@given(st.text(max_size=60))
def test_any_text_survives_jsonl(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("any")
    (folder / "a.jsonl").write_bytes(jsonl(text, "next"))
    records, _ = read(folder)
    wanted = [normalize_text(text), "next"]
    assert [record.text for record in records] == [t for t in wanted if t.strip()]
