"""Markup to plain text: HTML, OSIS/TEI XML, POD. Regular expressions, because the corpus
holds gigabytes of machine-made HTML and a tree parser in Python reads 2 MB a second.
"""

from __future__ import annotations

import html
import re

from experiments.data.documents import normalize_text

# Elements whose content is no prose: code of the page, navigation, pictures, page furniture.
_DROPPED = re.compile(
    r"<(script|style|head|nav|svg|button|select|noscript|template|footer)\b[^>]*>.*?</\1\s*>"
    r"|<!--.*?-->|<a\s[^>]*class=\"(?:headerlink|anchor|src)\"[^>]*>.*?</a>",
    re.DOTALL | re.IGNORECASE,
)
_MAIN = re.compile(
    r"<main\b|<[a-z]+\s[^>]*\b(?:role=\"main\"|class=\"maincolumn\"|id=\"(?:page-)?content\")",
    re.IGNORECASE,
)
_HEADING_LINK = re.compile(r" ?¶$", re.MULTILINE)
_AFTER_MAIN = re.compile(r"</main\s*>|<div\s[^>]*class=\"sphinxsidebar\"", re.IGNORECASE)
_PRE = re.compile(r"<pre\b[^>]*>(.*?)</pre\s*>", re.DOTALL | re.IGNORECASE)
_PARAGRAPH = re.compile(
    r"</?(?:p|h[1-6]|div|section|article|table|ul|ol|dl|blockquote|hr|figure|body)\b[^>]*>",
    re.IGNORECASE,
)
_LINE = re.compile(r"<(?:br|li|tr|dt|dd|option)\b[^>]*>", re.IGNORECASE)
_CELL = re.compile(r"</t[dh]\s*>", re.IGNORECASE)
_TAG = re.compile(r"<[a-zA-Z/!?][^>]*>")
_SPACES = re.compile(r"[ \t]+")
_EDGE_SPACES = re.compile(r" *\n *")


def html_to_text(page: str) -> str:
    """The prose of an HTML page: main element when marked, paragraphs kept, <pre> verbatim.

    >>> html_to_text("<body><nav>Home</nav><p>a &lt;\\n b</p><pre>x\\n  y</pre></body>")
    'a < b\\n\\nx\\n  y'
    """
    main = _MAIN.search(page)
    if main:
        page = page[main.start() :]
        end = _AFTER_MAIN.search(page)
        page = page[: end.start()] if end else page
    pieces = _PRE.split(_DROPPED.sub(" ", page))
    # Odd pieces are the insides of <pre>: their line breaks and indents mean something.
    texts = [
        _verbatim(piece) if index % 2 else _flowed(piece) for index, piece in enumerate(pieces)
    ]
    return normalize_text(_HEADING_LINK.sub("", html.unescape("".join(texts))))


def _flowed(piece: str) -> str:
    piece = " ".join(piece.split())
    piece = _CELL.sub(" ", _LINE.sub("\n", _PARAGRAPH.sub("\n\n", piece)))
    return _EDGE_SPACES.sub("\n", _SPACES.sub(" ", _TAG.sub("", piece)))


def _verbatim(piece: str) -> str:
    return "\n\n" + _TAG.sub("", re.sub(r"<br\b[^>]*>", "\n", piece)).strip("\n") + "\n\n"


_NOTE = re.compile(r"<note\b.*?</note>", re.DOTALL)
_SPACE_BEFORE_STOP = re.compile(r" +([,.;:!?)])")
_TITLE_END = re.compile(r"</title>|<lb\b[^>]*/>|<div\b[^>]*/?>|</?(?:p|l|lg|list|item)\b[^>]*>")


def osis_to_text(xml: str) -> str:
    """Running text of an OSIS or TEI fragment: footnotes dropped, paragraphs kept.

    >>> osis_to_text('<div sID="a"/> In the <w x="1">beginning</w>.<note>n</note> <div eID="a"/>')
    'In the beginning.'
    """
    # A note may stand between two words without any space, so it leaves one behind.
    text = _TITLE_END.sub("\n\n", " ".join(_NOTE.sub(" ", xml).split()))
    text = html.unescape(_TAG.sub("", text)).replace("¶ ", "").replace("¶", "")
    text = _SPACE_BEFORE_STOP.sub(r"\1", _SPACES.sub(" ", text))
    return normalize_text(_EDGE_SPACES.sub("\n", text))


_POD_NESTED = re.compile(r"[BCFILSX]<(?!<)([^<>]*)>")
_POD_LONG = re.compile(r"[BCFILSX]<<+ (.*?) >>+", re.DOTALL)
_POD_ESCAPES = {"lt": "<", "gt": ">", "verbar": "|", "sol": "/", "E": "E"}
_POD_ESCAPE = re.compile(r"E<(\w+)>")
_POD_COMMAND = re.compile(r"^=(head[1-6]|item) +", re.MULTILINE)
_POD_OTHER = re.compile(r"^=(?!head|item)\w+.*$\n?", re.MULTILINE)


def pod_to_text(pod: str) -> str:
    """Perl's POD without its commands and formatting codes.

    >>> pod_to_text("=head1 NAME\\n\\nB<perl> - C<< a <= b >> L<x|y>\\n\\n=cut\\n")
    'NAME\\n\\nperl - a <= b x'
    """
    text = _POD_COMMAND.sub("", pod)
    text = re.sub(r"^=begin (\w+).*?^=end \1.*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = _POD_OTHER.sub("", text)
    text = _POD_ESCAPE.sub(lambda match: _POD_ESCAPES.get(match[1], f"&{match[1]};"), text)
    text = _POD_LONG.sub(r"\1", text)
    for _ in range(3):  # codes nest: B<I<x>> needs a pass for each level
        text = _POD_NESTED.sub(lambda match: match[1].split("|")[0], text)
    return normalize_text(html.unescape(text))


_PARAGRAPH_BREAK = re.compile(r"\n\s*\n")


def unwrap_paragraphs(text: str) -> str:
    r"""Joins hard-wrapped lines: one line per paragraph.

    >>> unwrap_paragraphs("a\nb\n\nc")
    'a b\n\nc'
    """
    paragraphs = (" ".join(part.split()) for part in _PARAGRAPH_BREAK.split(text))
    return "\n\n".join(part for part in paragraphs if part)
