"""Data: from packages of public text to deterministic batches.

The stages, each usable alone: ``sources`` (what to get), ``corpus`` (get, extract, drop
repeated lines), ``tokenizer``, ``store`` (memory-mapped tokens with a held-out split),
``packing`` and ``loader`` (random access to batches). ``load_dataset`` runs the last four.

For text of one's own, ``pipeline`` is the build by one command, with ``near_duplicates`` and
``substrings``; ``mixing``, ``fitting`` and ``mixture_loader`` make mixed and packed batches.
"""

from experiments.data.dataset import load_dataset
from experiments.data.documents import CorpusError, Document
from experiments.data.loader import BatchSchedule, TokenDataset, open_dataset
from experiments.data.packing import segments_and_positions
from experiments.data.tokenizer import Tokenizer

__all__ = [
    "BatchSchedule",
    "CorpusError",
    "Document",
    "TokenDataset",
    "Tokenizer",
    "load_dataset",
    "open_dataset",
    "segments_and_positions",
]
