"""The table of sources: which packages hold which text, and how it is read.

Debian packages, because they are signed, versioned, mirrored everywhere and name their
licences. A source lists several packages where the name holds a version: the first that the
machine's release has is used. Order matters: a line that occurs in two sources is kept in the
one that stands first (see ``corpus``), so prose stands before reference works, those before
manuals, and code comes last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from experiments.data.extract import (
    Reader,
    dictd_entries,
    fortunes,
    html_pages,
    pod_files,
    r_novels,
    source_files,
    sword_chapters,
    wordnet_glosses,
    zipped_source_files,
)

GROUPS = ("books_en", "reference_en", "techdocs_en", "code")

# Sphinx keeps the reStructuredText of every page beside the page.
_TRANSLATIONS = r"translations/|/_sources/|/_modules/"


@dataclasses.dataclass(frozen=True)
class Source:
    """One row of the table.

    Attributes:
      name: also the shard's file name.
      title: what it is, for the manifest.
      group: one of ``GROUPS``.
      packages: names to try, newest first.
      licence: of the text.
      read: from the unpacked package to (id, text) pairs.
    """

    name: str
    title: str
    group: str
    packages: tuple[str, ...]
    licence: str
    read: Reader

    def __post_init__(self) -> None:
        if self.group not in GROUPS:
            raise ValueError(f"group of {self.name} must be one of {GROUPS}, got {self.group!r}")


def _versions(pattern: str, versions: Sequence[object]) -> tuple[str, ...]:
    return tuple(pattern.format(version) for version in versions)


_AUSTEN = {
    title.upper(): title.lower().replace(" ", "-")
    for title in (
        "Emma",
        "Mansfield Park",
        "Northanger Abbey",
        "Persuasion",
        "Pride and Prejudice",
        "Sense and Sensibility",
    )
}
# Marks of who wrote which paragraph of a merged dictionary.
_GCIDE_MARKS = r"\n *\[(?:1913 Webster|PJC|WordNet [0-9.]+|Webster 1913 Suppl\.|[ +A-Z]{2,12})\]"

_BOOKS = (
    Source(
        "austen",
        "Jane Austen, six novels",
        "books_en",
        ("r-cran-janeaustenr",),
        "Public domain",
        r_novels(_AUSTEN),
    ),
    Source(
        "bible-kjv",
        "The Bible, King James Version",
        "books_en",
        ("sword-text-kjv",),
        "Public domain",
        sword_chapters(),
    ),
    Source(
        "bible-web",
        "World English Bible with Deuterocanon",
        "books_en",
        ("sword-text-web",),
        "Public domain",
        sword_chapters(),
    ),
    Source(
        "spurgeon",
        "C. H. Spurgeon, The Treasury of David",
        "books_en",
        ("sword-comm-tdavid",),
        "Public domain",
        sword_chapters(),
    ),
    Source(
        "anarchism",
        "An Anarchist FAQ",
        "books_en",
        ("anarchism",),
        "GPL-2+ or GFDL",
        html_pages(),
    ),
    Source(
        "devils-dictionary",
        "Ambrose Bierce, The Devil's Dictionary",
        "books_en",
        ("dict-devil",),
        "Public domain",
        dictd_entries(),
    ),
)

_REFERENCE = (
    Source(
        "jargon-file",
        "The Jargon File",
        "reference_en",
        ("dict-jargon",),
        "Public domain",
        dictd_entries(),
    ),
    Source(
        "foldoc",
        "Free On-line Dictionary of Computing",
        "reference_en",
        ("dict-foldoc",),
        "GFDL-1.2+",
        dictd_entries(),
    ),
    Source(
        "gcide",
        "GNU Collaborative International Dictionary of English",
        "reference_en",
        ("dict-gcide",),
        "GPL-3+",
        dictd_entries(drop=_GCIDE_MARKS),
    ),
    Source(
        "wordnet",
        "WordNet 3.0, glosses",
        "reference_en",
        ("wordnet-base",),
        "WordNet licence (permissive)",
        wordnet_glosses,
    ),
    Source(
        "fortunes",
        "Sayings of the fortune program",
        "reference_en",
        ("fortunes",),
        "BSD-4-Clause collection",
        fortunes,
    ),
)


def _manual(
    name: str, title: str, packages: str | tuple[str, ...], licence: str, *, exclude: str = ""
) -> Source:
    names = (packages,) if isinstance(packages, str) else packages
    return Source(name, title, "techdocs_en", names, licence, html_pages(exclude=exclude))


_TECHDOCS = (
    _manual(
        "linux-doc",
        "Linux kernel documentation",
        _versions("linux-doc-{}", ("6.12", "6.1")),
        "GPL-2",
        exclude=_TRANSLATIONS,
    ),
    _manual(
        "python-doc",
        "Python documentation",
        _versions("python3.{}-doc", (13, 12, 11)),
        "PSF-2",
    ),
    Source("perl-doc", "Perl manual", "techdocs_en", ("perl-doc",), "Artistic or GPL", pod_files),
    _manual(
        "postgresql-doc",
        "PostgreSQL documentation",
        _versions("postgresql-doc-{}", (17, 16, 15)),
        "PostgreSQL",
    ),
    _manual("vim-doc", "Vim documentation", "vim-doc", "Vim or GPL-2+"),
    _manual("git-doc", "Git documentation", "git-doc", "GPL-2"),
    _manual(
        "apache2-doc",
        "Apache HTTP Server documentation",
        "apache2-doc",
        "Apache-2.0",
        exclude=r"/(da|de|es|fr|ja|ko|pt-br|ru|tr|zh-cn)/|\.(da|de|es|fr|ja|ko|pt-br|ru|tr|zh-cn)\.",
    ),
    _manual("debian-reference", "Debian Reference", "debian-reference-en", "GPL-2+"),
    _manual("debian-policy", "Debian Policy Manual", "debian-policy", "GPL-2+"),
    _manual(
        "developers-reference", "Debian Developer's Reference", "developers-reference", "GPL-2+"
    ),
    _manual("django-doc", "Django documentation", "python-django-doc", "BSD-3-Clause"),
    _manual("sympy-doc", "SymPy documentation", "python-sympy-doc", "BSD-3-Clause"),
    _manual("scipy-doc", "SciPy documentation", "python-scipy-doc", "BSD-3-Clause"),
    _manual("pandas-doc", "pandas documentation", "python-pandas-doc", "BSD-3-Clause"),
    _manual(
        "llvm-doc",
        "LLVM and Clang documentation",
        _versions("llvm-{}-doc", (19, 18, 17, 16, 15, 14)),
        "Apache-2.0 with LLVM exception",
    ),
    _manual("ghc-doc", "GHC and Haskell library documentation", "ghc-doc", "BSD-3-Clause"),
    _manual("rust-doc", "Rust documentation", "rust-doc", "MIT or Apache-2.0"),
    _manual("erlang-doc", "Erlang/OTP documentation", "erlang-doc", "Apache-2.0"),
    _manual(
        "openjdk-doc",
        "OpenJDK API documentation",
        _versions("openjdk-{}-doc", (21, 17)),
        "GPL-2 with classpath exception",
    ),
    _manual("racket-doc", "Racket documentation", "racket-doc", "MIT or Apache-2.0"),
    _manual(
        "ada-reference",
        "Ada Reference Manual",
        ("ada-reference-manual-2020", "ada-reference-manual-2012"),
        "Ada-RM (free copying)",
    ),
    _manual("qtbase-doc", "Qt documentation", "qtbase5-doc-html", "GFDL-1.3"),
    _manual("octave-doc", "GNU Octave manual", "octave-doc", "Free copying"),
    _manual("maxima-doc", "Maxima manual", "maxima-doc", "GPL-2"),
    _manual(
        "sagemath-doc",
        "SageMath documentation",
        "sagemath-doc",
        "CC-BY-SA-3.0",
        exclude=r"html/(?!en/)",
    ),
)

_CODE = (
    Source(
        "python-stdlib",
        "Python standard library",
        "code",
        _versions("libpython3.{}-stdlib", (13, 12, 11)),
        "PSF-2",
        source_files("*.py", exclude=r"/(test|tests|idle_test|pydoc_data)/"),
    ),
    Source(
        "go-src",
        "Go compiler and standard library",
        "code",
        _versions("golang-1.{}-src", (24, 22, 19)),
        "BSD-3-Clause",
        source_files("*.go", exclude=r"/testdata/|/fixedbugs/|/tzdata/|/zerrors_|/zsys"),
    ),
    Source(
        "rust-src",
        "Rust compiler and standard library",
        "code",
        ("rust-src",),
        "MIT or Apache-2.0",
        source_files("*.rs", exclude=r"/(src/test|tests)/|/testdata/"),
    ),
    Source(
        "openjdk-src",
        "OpenJDK class library",
        "code",
        _versions("openjdk-{}-source", (21, 17)),
        "GPL-2 with classpath exception",
        zipped_source_files(".java"),
    ),
)

SOURCES: tuple[Source, ...] = (*_BOOKS, *_REFERENCE, *_TECHDOCS, *_CODE)


def select_sources(names: Sequence[str] = ()) -> tuple[Source, ...]:
    """Sources by name or group, in the table's order; no names mean all.

    Raises:
      ValueError: a name is neither a source nor a group.
    """
    known = {source.name for source in SOURCES} | set(GROUPS)
    unknown = sorted(set(names) - known)
    if unknown:
        raise ValueError(f"unknown sources {unknown}: choose from {sorted(known)}")
    wanted = set(names) or set(GROUPS)
    return tuple(s for s in SOURCES if s.name in wanted or s.group in wanted)
