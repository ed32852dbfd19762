"""Tokenizers: exact round trips, determinism, end-of-text that no text can produce."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.data.dataset import SAMPLE_DIR
from experiments.data.documents import normalize_text, read_corpus, replace_surrogates
from experiments.data.tokenizer import (
    END_OF_TEXT,
    BPETokenizer,
    ByteTokenizer,
    tokenizer_from_config,
    train_bpe,
    train_tokenizer,
)

# Every code point UTF-8 can hold, with the troublesome ones made likely.
UNICODE = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from("\r\n\t\u200d\ufeff\u0301é中ع😀  "),
    ),
    max_size=60,
)


@pytest.fixture(scope="module")
def bpe() -> BPETokenizer:
    texts = [document.text for document in read_corpus(SAMPLE_DIR)][::16]
    return train_bpe(texts, vocab_size=512)


@settings(max_examples=80, deadline=None)
@given(st.lists(UNICODE, max_size=4))
def test_bpe_round_trip_is_exact(bpe, texts):
    encoded = bpe.encode(texts)
    assert [bpe.decode(ids) for ids in encoded] == texts
    for ids in encoded:
        assert bpe.eos_id not in ids.tolist()
        assert ids.size == 0 or ids.max() < bpe.vocab_size


@settings(max_examples=80, deadline=None)
@given(UNICODE.map(lambda text: text.replace("\0", "")))
def test_byte_round_trip_is_exact(text):
    (ids,) = ByteTokenizer().encode([text])
    assert len(ids) == len(text.encode())
    assert ByteTokenizer().decode(ids) == text
    assert ByteTokenizer().eos_id not in ids.tolist()


def test_nul_cannot_end_a_document_of_bytes():
    (ids,) = ByteTokenizer().encode(["a\0b"])
    assert 0 not in ids.tolist()
    assert ByteTokenizer().decode(ids) == "a\ufffdb"


def test_end_of_text_inside_a_text_is_ordinary_text(bpe):
    text = f"the token {END_OF_TEXT} ends documents"
    (ids,) = bpe.encode([text])
    assert bpe.eos_id not in ids.tolist()
    assert bpe.decode(ids) == text
    # Also after a save and load: the library forgets the setting.
    loaded = tokenizer_from_config(bpe.to_config())
    assert loaded.encode([text])[0].tolist() == ids.tolist()


def test_saved_tokenizers_encode_the_same(bpe):
    text = "Emma Woodhouse, handsome, clever, and rich"
    for tokenizer in (bpe, ByteTokenizer()):
        loaded = tokenizer_from_config(tokenizer.to_config())
        assert loaded.encode([text])[0].tolist() == tokenizer.encode([text])[0].tolist()
        assert (loaded.vocab_size, loaded.eos_id) == (tokenizer.vocab_size, tokenizer.eos_id)


def test_training_is_deterministic_and_merges_shorten(bpe):
    texts = [document.text for document in read_corpus(SAMPLE_DIR)][::16]
    again = train_bpe(texts, vocab_size=512)
    assert again.to_config() == bpe.to_config()
    assert len(bpe.encode([texts[0]])[0]) < 0.6 * len(texts[0].encode())


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_lone_surrogates_become_replacement_characters(kind, bpe):
    tokenizer = ByteTokenizer() if kind == "bytes" else bpe
    (ids,) = tokenizer.encode(["a\ud800b\udfff"])
    assert tokenizer.decode(ids) == "a\ufffdb\ufffd"
    assert replace_surrogates("a\ud800b\udfff") == ("a\ufffdb\ufffd", 2)


def test_vocab_sizes_out_of_range_are_named():
    with pytest.raises(ValueError, match=r"vocab_size must be at least 256.*got 255"):
        train_tokenizer(["a"], vocab_size=255)
    with pytest.raises(ValueError, match=r"vocab_size must lie in \[257, 32768\].*got 40000"):
        train_tokenizer(["a"], vocab_size=40000)
    with pytest.raises(
        ValueError, match=r"supports a vocabulary of 25\d, less than vocab_size=999"
    ):
        train_tokenizer(["ab ab"], vocab_size=999)
    with pytest.raises(ValueError, match="tokenizer kind must be"):
        tokenizer_from_config({"kind": "words"})


def test_ids_out_of_range_cannot_be_decoded(bpe):
    with pytest.raises(ValueError, match=r"ids must lie in \[0, 512\)"):
        bpe.decode([512])
    with pytest.raises(ValueError, match=r"ids must lie in \[0, 256\)"):
        ByteTokenizer().decode(np.array([-1, 3]))


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=80))
def test_normalize_text_is_idempotent_and_clean(text):
    clean = normalize_text(text)
    assert normalize_text(clean) == clean
    assert not set(clean) & set("\r\0\x0c\x7f\x1b")
    assert "\n\n\n" not in clean
    clean.encode()  # no lone surrogate is left
    unix = text.replace("\r", "")
    assert normalize_text(unix.replace("\n", "\r\n")) == normalize_text(unix)
