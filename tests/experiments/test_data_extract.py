"""Extraction: markup to text, and one reader per kind of package, on small made-up packages."""

import gzip
import os
import struct
import zipfile
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.data import CorpusError
from experiments.data.extract import (
    INDEX_PAGES,
    dictd_entries,
    find_files,
    fortunes,
    html_pages,
    r_novels,
    read_text,
    source_files,
    sword_chapters,
    wordnet_glosses,
    zipped_source_files,
)
from experiments.data.markup import html_to_text, osis_to_text, pod_to_text, unwrap_paragraphs

# --- markup ---------------------------------------------------------------------------------------


def test_html_keeps_prose_and_code_and_drops_furniture():
    page = """<html><head><title>T</title><style>p{}</style></head><body>
    <nav><a href="x">Home</a></nav><div class="body" role="main"><h1>Head<a class="headerlink"
    href="#h">¶</a></h1><p>One &amp; two
    in a <b>paragraph</b>.</p><ul><li>first</li><li>second</li></ul>
    <pre>if x &lt; 1:
        <span class="k">return</span></pre><script>var a = "<p>no</p>";</script>
    <table><tr><td>a</td><td>b</td></tr></table></div>
    <div class="sphinxsidebar">Next topic</div></body></html>"""
    assert html_to_text(page) == (
        "Head\n\nOne & two in a paragraph.\n\nfirst\nsecond\n\nif x < 1:\n        return\n\na b"
    )


def test_html_without_marks_keeps_its_body():
    assert html_to_text("<p>a<br>b</p>c &#8212; 1 < 2") == "a\nb\n\nc — 1 < 2"
    assert html_to_text("") == ""


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=60))
def test_html_to_text_takes_any_text(text):
    assert "\r" not in html_to_text(text)
    html_to_text(f"<p>{text}</p><pre>{text}")


def test_osis_drops_notes_but_not_the_space_they_stand_in():
    xml = 'God<note place="foot">or: gods</note>said<note>x</note>, “let”.<div eID="1"/>¶ Next'
    assert osis_to_text(xml) == "God said, “let”.\n\nNext"


def test_pod_codes_nest():
    pod = "=encoding utf8\n\n=head1 A\n\nB<I<x>> C<< $a->{b} >> E<lt>S<y>E<gt> L<perlfunc/open>\n"
    pod += "\n=over 4\n\n=item * one\n\n=back\n\n=begin html\n\n<b>\n\n=end html\n\nend\n"
    text = pod_to_text(pod)
    assert text == "A\n\nx $a->{b} <y> perlfunc/open\n\n* one\n\nend"


def test_unwrap_keeps_paragraphs():
    assert unwrap_paragraphs("a\n b\n\n\nc\n") == "a b\n\nc"


# --- readers --------------------------------------------------------------------------------------


def _write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def _r_record(lines):
    body = b"X\n\0\0\0\3" + struct.pack(">II", 16, len(lines))
    for line in lines:
        data = line.encode()
        body += struct.pack(">Ii", 0x00040009, len(data)) + data
    packed = zlib.compress(body)
    return struct.pack(">I", len(body)) + packed


def test_r_novels_split_at_chapters(tmp_path):
    novel = ["EMMA", "", "VOLUME I", "", "CHAPTER I", "", "One", "line.", "", "VOLUME II", ""]
    novel += ["CHAPTER II", "", "\0\4\0\x09 bytes like a header", "", "Two."]
    other = ["PERSUASION", "Chapter 1", "Sir Walter."]
    _write(tmp_path / "data/Rdata.rdb", _r_record(novel) + _r_record(other))
    titles = {"EMMA": "emma", "PERSUASION": "persuasion"}
    documents = dict(r_novels(titles)(tmp_path))
    assert [*documents] == ["emma/01", "emma/02", "persuasion/01"]
    assert documents["emma/01"] == "CHAPTER I\n\nOne line."
    assert documents["emma/02"].endswith("bytes like a header\n\nTwo.")
    with pytest.raises(CorpusError, match="unknown novel 'PERSUASION'"):
        list(r_novels({"EMMA": "emma"})(tmp_path))


def _dict_digits(value):
    digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    text = digits[value % 64]
    while value := value // 64:
        text = digits[value % 64] + text
    return text


def test_dictd_reads_each_entry_once(tmp_path):
    entries = [("00database-info", "about the database itself, not an entry")]
    entries += [("abate", "ABATE, v.\n    To {lessen} {{by}} degrees.\n\n      Deeper é.\n")]
    entries += [("zeal", "ZEAL, n.\n   A nervous disorder [mark].\n")]
    blob, rows = b"", []
    for word, text in entries:
        data = text.encode()
        rows.append(f"{word}\t{_dict_digits(len(blob))}\t{_dict_digits(len(data))}")
        blob += data
    rows.append(rows[1].replace("abate", "abatement"))  # a second headword of the same entry
    _write(tmp_path / "d/x.index", "\n".join(rows))
    _write(tmp_path / "d/x.dict.dz", gzip.compress(blob))
    texts = [text for _, text in dictd_entries(drop=r" \[mark\]")(tmp_path)]
    assert texts == [
        "ABATE, v.\nTo lessen by degrees.\n\n  Deeper é.",
        "ZEAL, n.\nA nervous disorder.",
    ]


def test_wordnet_keeps_words_and_glosses(tmp_path):
    _write(
        tmp_path / "dict/data.adj",
        "  1 licence text | not data\n"
        '00001740 00 a 01 able(p) 0 001 = 05207437 n 0000 | having the means; "able to swim"  \n'
        "00001741 00 a 02 big 0 very_large 0 000 | of size\n",
    )
    _write(tmp_path / "dict/data.txt", "00001740 00 a 01 no 0 000 | not a data file\n")
    ((name, text),) = wordnet_glosses(tmp_path)
    assert name == "data.adj/000000"
    assert text == 'able: having the means; "able to swim"\nbig, very large: of size'


def test_sword_chapters_across_blocks(tmp_path):
    blocks = [
        b'<div osisID="Gen"/><chapter n="1" osisID="Gen.1" sID="a"/>In the <w l="1">beginning</w>.',
        b'<chapter eID="a"/><chapter n="2" osisID="Gen.2" sID="b"/>Thus. <note>n</note>',
    ]
    table, data = b"", b""
    for block in blocks:
        packed = zlib.compress(block)
        table += struct.pack("<III", len(data), len(packed), len(block))
        data += packed
    _write(tmp_path / "m/ot.bzs", table)
    _write(tmp_path / "m/ot.bzz", data)
    _write(tmp_path / "m/nt.bzs", struct.pack("<III", 0, 0, 0))
    _write(tmp_path / "m/nt.bzz", b"")
    documents = dict(sword_chapters(min_chars=1)(tmp_path))
    assert documents == {"Gen.1": "In the beginning.", "Gen.2": "Thus."}


def test_fortunes_split_at_percent_lines(tmp_path):
    long = "A saying that is long enough to be kept, 100% of it."
    folder = tmp_path / "usr/share/games/fortunes"
    _write(folder / "wisdom", f"{long}\n%\nshort\n%\n{long}\tTwo\n")
    _write(folder / "wisdom.dat", b"\0\1")
    os.symlink("wisdom", folder / "wisdom.u8")
    documents = dict(fortunes(tmp_path))
    assert [*documents] == ["wisdom/0", "wisdom/2"]
    assert documents["wisdom/0"] == long


def test_html_pages_skip_indexes_short_pages_and_links(tmp_path):
    prose = "<p>" + "A sentence of a manual. " * 20 + "</p>"
    for name in ("a.html", "genindex-A.html", "allocators.html", "fr/b.html"):
        _write(tmp_path / name, prose)
    _write(tmp_path / "short.html", "<p>Moved.</p>")
    _write(tmp_path / "latin.html", prose.replace("manual", "caf\xe9").encode("latin-1"))
    os.symlink("a.html", tmp_path / "link.html")
    documents = dict(html_pages(exclude="^fr/")(tmp_path))
    assert [*documents] == ["a.html", "allocators.html", "latin.html"]
    assert "café" in documents["latin.html"]
    assert INDEX_PAGES.search("x/doc-index-N.html")
    assert not INDEX_PAGES.search("x/printf.html")


def test_code_that_people_wrote(tmp_path):
    code = "package main\n\n" + "\tfmt.Println(1)\n" * 20
    _write(tmp_path / "src/a.go", code)
    _write(tmp_path / "src/b.go", f"// Code generated by stringer; DO NOT EDIT.\n{code}")
    _write(tmp_path / "src/testdata/c.go", code)
    documents = dict(source_files("*.go", exclude="/testdata/")(tmp_path))
    assert documents == {"src/a.go": code.strip("\n")}
    licensed = f"/*\n * Copyright 2020 A. Person\n */\n\n/* What it does. */\n{code}"
    _write(tmp_path / "src/a.go", licensed)
    documents = dict(source_files("*.go", exclude="/testdata/")(tmp_path))
    assert documents["src/a.go"].startswith("/* What it does. */\npackage main")
    with zipfile.ZipFile(tmp_path / "src.zip", "w") as archive:
        archive.writestr("java/lang/B.java", code)
        archive.writestr("java/lang/A.java", "/* caf\xe9 */" + code)
        archive.writestr("java/lang/x.txt", code)
    zipped = dict(zipped_source_files(".java")(tmp_path))
    assert [*zipped] == ["src/java/lang/A.java", "src/java/lang/B.java"]


def test_missing_files_say_what_was_looked_for(tmp_path):
    with pytest.raises(CorpusError, match=r"no file matches '\*\.index'"):
        list(dictd_entries()(tmp_path))
    _write(tmp_path / "a.txt.gz", gzip.compress(b"zipped"))
    assert read_text(find_files(tmp_path, "*.gz")[0]) == "zipped"
