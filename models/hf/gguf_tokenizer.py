"""The byte-level BPE tokenizer that a GGUF file carries, as a `tokenizers.Tokenizer`."""

from pathlib import Path

from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from models.hf.gguf_file import read_fields

_CONTROL = 3  # llama.cpp's token type of <|im_start|> and the like


def load_gguf_tokenizer(path: str | Path) -> Tokenizer:
    """Vocabulary, merges and special tokens of a GGUF file.

    Raises:
        ValueError: another model than byte-level BPE, or a way to split words that is not known:
            each splits text differently, and a wrong one shows only as a worse loss.
    """
    keys = read_fields(GGUFReader(path), "tokenizer.ggml.")
    if keys.get("model") != "gpt2":
        raise ValueError(f"tokenizer.ggml.model must be 'gpt2' (BPE), got {keys.get('model')!r}.")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    splits = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True), byte_level],
        "gpt-2": [byte_level],
    }
    if keys.get("pre") not in splits:
        raise ValueError(
            f"tokenizer.ggml.pre must be one of {list(splits)}, got {keys.get('pre')!r}."
        )
    vocabulary = {token: i for i, token in enumerate(keys["tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in keys["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits[keys["pre"]])  # type: ignore
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore
    special = [
        token
        for token, kind in zip(keys["tokens"], keys["token_type"], strict=True)
        if kind == _CONTROL
    ]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer
