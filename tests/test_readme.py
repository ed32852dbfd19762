"""What README.md and CONTRIBUTING.md say is true: their Python runs, their names exist."""

import functools
import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "CONTRIBUTING.md")
every_document = pytest.mark.parametrize("document", DOCUMENTS)

FENCE = re.compile(r"^( *)(```+|~~~+) *([\w-]*)[^\n]*\n(.*?)^\1\2 *$", re.M | re.S)
INLINE_CODE = re.compile(r"(?<!`)`((?:[^`\n]|\n(?! *\n))+)`(?!`)")
LINK = re.compile(r"\[[^\]]*\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)")
HTML_LINK = re.compile(r"""<(?:img|a|source)\b[^>]*?\b(?:src|href|srcset)=["']([^"']+)["']""")
HEADING = re.compile(r"^#+ +(.+?) *#*$", re.M)
# At the start of a command, so that the verb of a sentence is none.
MAKE = re.compile(r"^(?:.*[;&|$] *)?(?:\w+=\S+ +)*make +((?!-)[\w-]+)", re.M)
MODULE = re.compile(r"python3? +-m +([\w.]+)")
TARGET = re.compile(r"^([\w-]+):", re.M)
SHELLS = {"", "sh", "bash", "shell", "console", "text"}
# Commands make these; a clone has none of them.
MADE_LATER = ("runs", "corpus", ".venv")


class Block(NamedTuple):
    """A fenced block: its language, its text and the line its text starts at."""

    language: str
    text: str
    line: int


@functools.cache
def read(document: str) -> str:
    path = ROOT / document
    assert path.is_file(), f"{document} is missing: a newcomer has nothing to read"
    return path.read_text(encoding="utf-8")


def blocks_of(text: str) -> list[Block]:
    return [
        Block(match[3].lower(), match[4], text.count("\n", 0, match.start(4)) + 1)
        for match in FENCE.finditer(text)
    ]


def code_of(text: str) -> str:
    """Everything that is set as a command: shell blocks and inline code."""
    shell = [block.text for block in blocks_of(text) if block.language in SHELLS]
    inline = [code.replace("\n", " ") for code in INLINE_CODE.findall(FENCE.sub("", text))]
    return "\n".join(shell + inline)


def links_of(text: str) -> list[str]:
    prose = INLINE_CODE.sub("", FENCE.sub("", text))
    return LINK.findall(prose) + HTML_LINK.findall(prose)


def anchor(heading: str) -> str:
    """The anchor that a forge gives a heading: lower case, hyphens for spaces."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def words_of(text: str) -> list[str]:
    """Words of commands and inline code, without those that stand for something else."""
    words = [word.strip("\"',;:()").split("::")[0] for word in code_of(text).split()]
    return [word for word in words if not re.search(r"[*{}<>$=…]|\bNAME\b", word)]


def paths_of(text: str) -> list[str]:
    """Words that look like a path of this repository."""
    top = {path.name for path in ROOT.iterdir() if path.is_dir()} - set(MADE_LATER)
    return [word for word in words_of(text) if "/" in word and word.split("/")[0] in top]


def names_of(text: str) -> list[str]:
    """Words that look like the bare name of a source file."""
    return [word for word in words_of(text) if re.fullmatch(r"[\w-]+\.(py|ipynb|toml)", word)]


@functools.cache
def source_files() -> set[str]:
    folders = ("pallas_flash", "models", "experiments", "tests", "notebooks")
    return {path.name for folder in folders for path in (ROOT / folder).rglob("*.*")} | {
        path.name for path in ROOT.iterdir()
    }


@every_document
def test_python_blocks_run_in_order(document, monkeypatch):
    monkeypatch.chdir(ROOT)
    python = [block for block in blocks_of(read(document)) if block.language == "python"]
    assert python or document != "README.md", "README.md shows no Python: how is it called?"
    namespace = {"__name__": "__main__"}
    for block in python:
        # Empty lines before it, so that a traceback names the line of the document.
        exec(compile("\n" * (block.line - 1) + block.text, document, "exec"), namespace)


@every_document
def test_make_targets_exist(document):
    targets = set(TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))
    named = set(MAKE.findall(code_of(read(document))))
    assert named, f"{document} names no make command"
    assert not named - targets, f"not in the Makefile: {named - targets}"


@every_document
def test_modules_exist(document):
    for name in MODULE.findall(code_of(read(document))):
        name = name.rstrip(".")
        found = importlib.util.find_spec(name)
        assert found is not None, f"python -m {name}"
        if found.submodule_search_locations is not None:
            assert importlib.util.find_spec(f"{name}.__main__"), f"python -m {name}"


@every_document
def test_paths_exist(document):
    text = read(document)
    files = {link for link in links_of(text) if not re.match(r"[a-z][a-z+.-]*:|#|//", link)}
    missing = [x for x in files if not (ROOT / x.split("#")[0]).exists()]
    missing += [x for x in paths_of(text) if not (ROOT / x).exists()]
    missing += [x for x in names_of(text) if x not in source_files()]
    assert not missing


@every_document
def test_anchors_exist(document):
    for link in links_of(read(document)):
        page, _, fragment = link.partition("#")
        if fragment and ":" not in link and page in ("", *DOCUMENTS):
            headings = HEADING.findall(FENCE.sub("", read(page or document)))
            assert fragment in {anchor(heading) for heading in headings}, link


# ---- the reading itself: a check that finds nothing would pass on anything -----------------------

SAMPLE = """# Title here
Run `make test` (`problems.py` helps; make sense) or [look](tests/test_readme.py#x), then `python -m
experiments.sweep plan`.
<img alt="a" src="no/picture.png">

```bash
X=1 make sweep   # also see ](not/a/link)
.venv/bin/python -m pytest tests/pallas_flash -k "x"
```

1. indented:
   ```python
   x = 1
   ```
"""


def test_the_reading_finds_what_is_there():
    assert [(b.language, b.line) for b in blocks_of(SAMPLE)] == [("bash", 7), ("python", 13)]
    assert MAKE.findall(code_of(SAMPLE)) == ["sweep", "test"]
    assert MODULE.findall(code_of(SAMPLE)) == ["pytest", "experiments.sweep"]
    assert links_of(SAMPLE) == ["tests/test_readme.py#x", "no/picture.png"]
    assert paths_of(SAMPLE) == ["tests/pallas_flash"]
    assert names_of(SAMPLE) == ["problems.py"]
    assert "problems.py" in source_files()
    assert anchor("The `make` targets, in short") == "the-make-targets-in-short"
