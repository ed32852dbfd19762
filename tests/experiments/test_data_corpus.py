"""Shards, line deduplication, pins, what apt can say, and the data command."""

import base64
import json
import os
import stat
import struct

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.data import CorpusError, Document
from experiments.data import corpus as building
from experiments.data.__main__ import main
from experiments.data.debian import PackageError, Packages, PackageUnknownError
from experiments.data.documents import read_corpus, read_manifest, read_shard, write_shard
from experiments.data.sources import GROUPS, SOURCES, Source, select_sources


def _write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


# --- shards ---------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(alphabet=st.characters(codec="utf-8"), max_size=30), max_size=5))
def test_shards_round_trip(tmp_path_factory, texts):
    path = tmp_path_factory.getbasetemp() / "shard.jsonl.zst"
    documents = [Document(str(i), "s", text) for i, text in enumerate(texts)]
    write_shard(path, documents)
    assert list(read_shard(path)) == documents


def test_damaged_shards_are_named(tmp_path):
    path = tmp_path / "s.jsonl.zst"
    write_shard(path, [Document("a", "s", base64.b64encode(os.urandom(9000)).decode())])
    whole = path.read_bytes()
    for size in (0, 7, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CorpusError, match=r"s\.jsonl\.zst: cut short"):
            list(read_shard(path))
    path.write_bytes(whole + whole)  # shards may be joined
    assert len(list(read_shard(path))) == 2
    path.write_bytes(whole[:99] + bytes([whole[99] ^ 1]) + whole[100:])
    with pytest.raises(CorpusError, match=r"s\.jsonl\.zst: "):
        list(read_shard(path))
    path.write_bytes(zstandard.compress(b'{"id": "a"}\n'))
    with pytest.raises(CorpusError, match="line 1: want a JSON object with id, source and text"):
        list(read_shard(path))
    path.write_bytes(b"not zstd")
    with pytest.raises(CorpusError, match="not a zstd JSON-lines shard"):
        list(read_shard(path))
    with pytest.raises(CorpusError, match="no such shard"):
        list(read_shard(tmp_path / "gone"))


# --- building, from sources made up here ----------------------------------------------------------

LICENCE = "This line stands on every single page of the manuals."


def _fake_source(name, texts, *, group="books_en"):
    return Source(name, name, group, (name,), "PD", lambda root: iter(texts))


@pytest.fixture
def two_sources(tmp_path, monkeypatch):
    """A corpus folder with two extracted sources, as ``extract_source`` leaves them."""
    page = ("Prose of page {0} that is long enough to be kept as a page. " * 5).strip()
    texts = {
        "one": [("a", f"{LICENCE}\n{page.format(1)}"), ("b", f"{LICENCE}\n{page.format(2)}")],
        "two": [("a", f"{page.format(3)}\n  {LICENCE}"), ("c", f"{LICENCE}\nshort"), ("d", "tiny")],
    }
    table = tuple(_fake_source(name, rows) for name, rows in texts.items())

    class FakePackages:
        def __init__(self, work):
            self.work = work

        def fetch(self, names):
            return names[0], "1.0", self.work

        def discard(self, folder):
            pass

    def select(names=()):
        return tuple(source for source in table if not names or source.name in names)

    monkeypatch.setattr(building, "Packages", FakePackages)
    monkeypatch.setattr(building, "select_sources", select)
    for name in texts:
        building.extract_source(name, tmp_path)
    return tmp_path


def test_lines_are_unique_over_the_whole_corpus(two_sources, caplog):
    manifest = building.build_corpus(two_sources, min_mb=0)
    documents = {document.id: document.text for document in read_corpus(two_sources)}
    # The licence survives once; the page that was nothing else is gone, the tiny entry is not.
    assert [*documents] == ["one/a", "one/b", "two/a", "two/d"]
    assert sum(text.count(LICENCE) for text in documents.values()) == 1
    assert documents["one/a"].startswith(LICENCE)
    one, two = manifest["sources"]
    assert one["removed"] == {"lines": 1, "documents": 0, "bytes": len(LICENCE) + 1}
    assert two["removed"]["documents"] == 1
    assert two["extracted"]["documents"] == 3
    assert two["extracted"]["bytes"] == two["bytes"] + two["removed"]["bytes"]
    assert "other machines: one (one 1.0), two (two 1.0)" in caplog.text


def test_code_is_kept_or_dropped_by_whole_files():
    lines = building.LineDeduplicator()
    body = [f"    value_{i} = compute_something({i}, default={i})" for i in range(6)]
    first = "\n".join(body)
    assert lines.filter_whole(first) == (first, 0)
    half_new = "\n".join(body[:3] + [f"{line}  # changed" for line in body[3:]])
    assert lines.filter_whole(half_new) == (half_new, 0)
    mostly_old = "\n".join([*body[:4], "    a_line_that_was_not_there = before()"])
    assert lines.filter_whole(mostly_old) == ("", 5)
    assert lines.filter_whole("short\nlines\nonly") == ("short\nlines\nonly", 0)


def test_building_again_changes_nothing_and_completes_a_killed_run(two_sources):
    building.build_corpus(two_sources, min_mb=0)
    before = {path.name: path.read_bytes() for path in two_sources.iterdir() if path.is_file()}
    building.build_corpus(two_sources, min_mb=0)
    (two_sources / "manifest.json").unlink()  # what a kill in the second stage leaves
    (two_sources / "one.jsonl.zst").write_bytes(b"half")
    (two_sources / "two.jsonl.zst.77.tmp").write_bytes(b"half")
    building.build_corpus(two_sources, min_mb=0)
    after = {path.name: path.read_bytes() for path in two_sources.iterdir() if path.is_file()}
    assert before == after


def test_a_subset_rewrites_the_corpus(two_sources):
    building.build_corpus(two_sources, min_mb=0)
    building.build_corpus(two_sources, sources=("two",), min_mb=0)
    assert [entry["name"] for entry in read_manifest(two_sources)["sources"]] == ["two"]
    assert not (two_sources / "one.jsonl.zst").exists()
    assert any(LICENCE in document.text for document in read_corpus(two_sources))


def test_too_little_text_is_an_error(two_sources):
    with pytest.raises(CorpusError, match=r"holds 0\.0 MB of text, less than --min-mb 5"):
        building.build_corpus(two_sources, min_mb=5)


def test_changed_shards_are_found(two_sources):
    building.build_corpus(two_sources, min_mb=0)
    write_shard(two_sources / "one.jsonl.zst", [Document("one/a", "one", "other")])
    with pytest.raises(CorpusError, match="manifest says"):
        list(read_corpus(two_sources))


def test_pins_warn_or_stop(two_sources, tmp_path, caplog):
    pins = tmp_path / "pins.json"
    records = {
        name: json.loads((two_sources / "extracted" / f"{name}.json").read_text())
        for name in ("one", "two")
    }
    building.write_pins(records, pins)
    building.check_pins(records, pins, strict=True)
    assert caplog.text == ""
    records["one"]["sha256"] = "0" * 64
    records["two"]["version"] = "2.0"
    building.check_pins(records, pins, strict=False)
    assert "one: text of one 1.0 has sha256 000000000000, pinned is" in caplog.text
    assert "no checksum is pinned for these versions" in caplog.text
    assert "two (two 2.0)" in caplog.text
    with pytest.raises(CorpusError, match="one: text of one"):
        building.check_pins(records, pins, strict=True)


def test_a_reader_that_fails_names_the_package(tmp_path, two_sources, monkeypatch):
    def broken(root):
        yield "a", "fine"
        raise struct.error("unpack requires 4 bytes")

    source = Source("bad", "bad", "books_en", ("bad",), "PD", broken)
    monkeypatch.setattr(building, "select_sources", lambda names=(): (source,))
    with pytest.raises(CorpusError, match=r"bad 1\.0 is not laid out as expected"):
        building.extract_source("bad", tmp_path)
    assert not list((tmp_path / "extracted").glob("bad*"))


def test_the_table_of_sources_is_sound():
    names = [source.name for source in SOURCES]
    assert len(set(names)) == len(names)
    assert {source.group for source in SOURCES} == set(GROUPS)
    assert select_sources(["wordnet", "books_en"])[-1].name == "wordnet"
    assert len(select_sources()) == len(SOURCES)
    with pytest.raises(ValueError, match=r"unknown sources \['nope'\]"):
        select_sources(["nope"])
    pinned = json.loads(building.PINS.read_text())
    assert set(pinned) <= set(names)
    assert all(len(sha) == 64 for versions in pinned.values() for sha in versions.values())


# --- apt, played by shell scripts -----------------------------------------------------------------

CACHE = """#!/bin/sh
for last; do :; done
case $last in
  policy) {lists} ;;
  known) echo 'known:'; echo '  Installed: (none)'; echo '  Candidate: 1:2.0-1' ;;
esac
"""
SYSTEM_LISTS = "echo ' 500 http://archive stable/main amd64 Packages'"


@pytest.fixture
def apt(tmp_path, monkeypatch):
    """Puts scripts named apt-get, apt-cache, dpkg-deb in front of PATH; returns the writer."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def write(**scripts):
        for name, text in scripts.items():
            path = folder / name.replace("_", "-")
            path.write_text(text)
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return Packages(tmp_path / "work")

    write(apt_get="#!/bin/sh\nexit 1\n", dpkg_deb="#!/bin/sh\nexit 1\n")
    write(apt_cache=CACHE.format(lists=SYSTEM_LISTS))
    return write


DOWNLOAD = '#!/bin/sh\ncase "$*" in *download*) echo x > known_1%3a2.0-1_all.deb;; esac\n'
# A package is a tar file to these tests, and dpkg-deb a program that prints it.
TAR = "#!/bin/sh\ntar -c -C {root} .\n"


def test_fetch_unpacks_the_first_known_package_once(apt, tmp_path):
    root = tmp_path / "root"
    _write(root / "usr/share/doc/a.html", "text")
    _write(root / "usr/share/doc/a.png", "picture")
    packages = apt(apt_get=DOWNLOAD, dpkg_deb=TAR.format(root=root))
    name, version, folder = packages.fetch(["newer", "known"])
    assert (name, version) == ("known", "1:2.0-1")
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["a.html"]
    packages = apt(apt_get="#!/bin/sh\nexit 1\n")  # a second fetch must not download
    assert packages.fetch(["known"])[2] == folder
    packages.discard(folder)
    assert not folder.exists()


def test_unknown_packages_are_named(apt):
    with pytest.raises(PackageUnknownError, match="no package nope or never"):
        apt().fetch(["nope", "never"])


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("E: Failed to fetch x  Could not resolve 'archive'", "archive cannot be reached"),
        ("E: write error - write (28: No space left on device)", "no disk space left"),
        ("E: something else", "apt failed: E: something else"),
        ("", "apt failed: no message"),
    ],
)
def test_apt_failures_become_one_line(apt, said, message):
    packages = apt(apt_get=f'#!/bin/sh\necho "{said}" >&2\nexit 100\n')
    with pytest.raises(PackageError, match=message) as caught:
        packages.fetch(["known"])
    assert "\n" not in str(caught.value)


def test_a_damaged_archive_leaves_nothing_behind(apt, tmp_path):
    packages = apt(apt_get=DOWNLOAD, dpkg_deb="#!/bin/sh\necho 'dpkg-deb: bad' >&2; exit 2\n")
    with pytest.raises(PackageError, match="known_1%3a2"):
        packages.fetch(["known"])
    assert list((tmp_path / "work").iterdir()) == []


def test_fresh_lists_are_fetched_when_the_machine_has_none(apt, tmp_path):
    update = (
        "#!/bin/sh\n"
        'case "$*" in\n'
        "  *update) for o; do case $o in\n"
        '    Dir::State::lists=*) touch "${o#*=}/a_Packages";; esac; done;;\n'
        "  *download*) echo x > known_1%3a2.0-1_all.deb;;\n"
        "esac\n"
    )
    cache = "#!/bin/sh\ncase \"$*\" in *lists=*known) echo '  Candidate: 1:2.0-1';; esac\n"
    _write(tmp_path / "root/a.txt", "x")
    packages = apt(apt_get=update, apt_cache=cache, dpkg_deb=TAR.format(root=tmp_path / "root"))
    assert packages.fetch(["known"])[0] == "known"
    offline = "#!/bin/sh\necho \"Err:1 x Could not resolve 'archive'\" >&2\nexit 0\n"
    packages = apt(apt_get=offline, apt_cache="#!/bin/sh\nexit 0\n")
    (tmp_path / "work" / "lists" / "a_Packages").unlink()
    (tmp_path / "work" / "lists" / "partial").rmdir()
    (tmp_path / "work" / "lists").rmdir()
    with pytest.raises(PackageError, match="package lists: the Debian archive cannot be reached"):
        packages.fetch(["known"])


def test_machines_without_apt_are_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PackageError, match="apt-get, apt-cache, dpkg-deb, tar not found"):
        Packages(tmp_path / "work")


# --- the command ----------------------------------------------------------------------------------


def test_info_and_show_print_text(tmp_path, capsys):
    cache = ["--cache-dir", str(tmp_path / "cache")]
    assert main(["info", *cache]) == 0
    printed = capsys.readouterr().out
    assert "r-cran-janeaustenr" in printed
    assert "vocabulary 256" in printed
    assert main(["show", *cache, "--step", "12", "--batch-size", "2", "--seq-len", "80"]) == 0
    first = capsys.readouterr().out
    assert first.count("--- step 12 row") == 2
    assert main(["show", *cache, "--step", "12", "--batch-size", "2", "--seq-len", "80"]) == 0
    assert capsys.readouterr().out == first


def test_tokenize_makes_a_store(tmp_path, capsys):
    out = tmp_path / "t.bin"
    assert main(["tokenize", "--corpus", "sample", "--vocab-size", "256", "--out", str(out)]) == 0
    assert "vocabulary 256" in capsys.readouterr().out
    assert main(["info", "--corpus", str(out)]) == 0


def test_faults_are_one_line_and_status_1(tmp_path, capsys):
    assert main(["info", "--corpus", str(tmp_path / "none")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: corpus")
    assert error.count("\n") == 1
