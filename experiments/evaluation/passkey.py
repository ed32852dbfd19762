"""Passkey retrieval: can a model find a number again that it read far back?

A prompt of T tokens hides one sentence with a random number in ordinary text, at a depth between
0 (its beginning) and 1 (its end), and closes with a question whose answer is the number:

    EOS text .. The pass key is 40718. text .. text What is the pass key? The pass key is | 40718

After Mohtashami & Jaggi 2023 (arXiv:2305.16300, section 4.2), with held-out text in place of one
repeated sentence: a small model takes no notice of repetitions that it knows by heart.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from experiments.data.tokenizer import Tokenizer

DIGITS = 5
_STATEMENT = " The pass key is"
_QUESTION = " What is the pass key?"


@dataclass(frozen=True)
class Passkey:
    """One prompt with its answer.

    Attributes:
      tokens: (T + 1,) int32, prompt and answer; the model reads all but the last.
      answer: how many tokens at the end are the answer.
    """

    tokens: Int32[np.ndarray, " T+1"]
    answer: int


class PasskeyMaker:
    """Prompts of any length and depth, all of their tokens determined by a seed.

    Args:
      filler: 1-D tokens of ordinary text.
      tokenizer: of the model.
    """

    def __init__(self, filler: np.ndarray, tokenizer: Tokenizer):
        self.filler, self.tokenizer = filler, tokenizer

    def make(self, seq_len: int, depth: float, seed: tuple[int, ...]) -> Passkey:
        """A prompt whose inputs are `seq_len` tokens.

        Raises:
          ValueError: depth is outside [0, 1], or the sentences do not fit.
        """
        if not 0 <= depth <= 1:
            raise ValueError(f"depth must lie in [0, 1], got {depth}")
        rng = np.random.default_rng(seed)
        number = " " + "".join(str(d) for d in rng.integers(0, 10, DIGITS))
        pieces = self.tokenizer.encode([_STATEMENT, number, ".", _QUESTION])
        statement, key, stop, question = (np.asarray(p, np.int32) for p in pieces)
        needle = np.concatenate([statement, key, stop])
        ending = np.concatenate([question, statement, key])
        room = seq_len - len(needle) - len(ending)  # and EOS makes seq_len + 1
        if room < 0 or room > len(self.filler):
            raise ValueError(
                f"a passkey prompt needs {seq_len - room} to "
                f"{seq_len - room + len(self.filler)} tokens, got seq_len {seq_len}"
            )
        start = rng.integers(0, len(self.filler) - room + 1)
        text = np.asarray(self.filler[start : start + room], np.int32)
        cut = round(depth * room)
        begin = np.array([self.tokenizer.eos_id], np.int32)
        return Passkey(np.concatenate([begin, text[:cut], needle, text[cut:], ending]), len(key))

    def batch(
        self, seq_len: int, depth: float, trials: int, seed: int
    ) -> tuple[Int32[np.ndarray, "B T+1"], np.ndarray]:
        """Prompts of one cell, and the number of answer tokens of each."""
        cell = (seed, seq_len, round(1000 * depth))
        made = [self.make(seq_len, depth, (*cell, i)) for i in range(trials)]
        return np.stack([p.tokens for p in made]), np.array([p.answer for p in made])
