"""Streams of documents in batches, worked on by threads, in order.

numpy and libdivsufsort release the interpreter's lock inside their loops, so that threads share
the texts without copies. Batches are cut by size alone and results come back in their order:
what is computed does not depend on the number of workers.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from experiments.data.documents import Document

BATCH_CHARACTERS = 1 << 20


def check_workers(workers: int) -> None:
    """Raises ValueError unless `workers` is a positive integer."""
    if not isinstance(workers, int) or workers < 1:
        raise ValueError(f"workers must be a positive integer, got {workers!r}")


def repeatable[T](items: Iterable[T]) -> Iterable[T]:
    """The same items, as something that can be read twice: an iterator becomes a list."""
    return list(items) if iter(items) is items else items


def text_of(document: Document | str) -> str:
    """The text of a document, or the text itself.

    Raises:
      TypeError: it is neither.
    """
    if isinstance(document, str):
        return document
    try:
        return document.text
    except AttributeError:
        raise TypeError(
            f"documents must be Document or str, got {type(document).__name__}: {document!r:.60}"
        ) from None


def batches(documents: Iterable[Document | str]) -> Iterator[list[Document | str]]:
    """Consecutive documents, about `BATCH_CHARACTERS` of text in each list."""
    batch: list[Document | str] = []
    length = 0
    for document in documents:
        batch.append(document)
        length += len(text_of(document)) + 1
        if length >= BATCH_CHARACTERS:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def ordered_map[T, R](function: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[R]:
    """`map` on threads: results in order, at most two items per worker waiting."""
    check_workers(workers)
    if workers == 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(workers) as pool:
        waiting: collections.deque[Future[R]] = collections.deque()
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
