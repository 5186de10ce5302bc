from itertools import product

import numpy as np
import pytest
import transformers as hf
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from lincorr_lightning.errors import ConfigError, SubjectsError
from lincorr_lightning.lm.vocabulary import sample_subjects, sample_up_to, usable_strings
from tests.lm.small_lms import small_tokenizer
from tests.toys import fast_tokenizer, word_tokenizer


def byte_level(words: list[str]) -> hf.PreTrainedTokenizerFast:
    """GPT-2's make: Ġ is a space, Ċ a line break, other bytes beyond ASCII are letters too."""
    model = models.BPE({word: i for i, word in enumerate(words)}, [])
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return fast_tokenizer(model, split, decoders.ByteLevel(), eos_token="<end>")


def test_byte_level_vocabulary() -> None:
    words = "<end> b Ġb ĠParis Paris Ċ Ġ ĠĠ ã æĿ± Ġt ĉx aĠb !".split()
    tokenizer = byte_level(words)
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("<x>", special=True)])
    # 東 is whole, ã the first byte of something; " b" and "b" are one; "a b" is two words.
    assert usable_strings(tokenizer) == ["b", "Paris", "東", "t", "x", "!"]


def test_what_is_cached_is_up_to_date() -> None:
    tokenizer = byte_level(["<end>", "b", "Ġb", "ĠParis", "x"])
    usable_strings(tokenizer).clear()  # the caller's own list
    assert usable_strings(tokenizer) == ["b", "Paris", "x"]
    assert usable_strings(tokenizer, whole_words=True) == ["Paris"]
    tokenizer.add_tokens([AddedToken("x", special=True)])
    assert usable_strings(tokenizer) == ["b", "Paris"]
    assert usable_strings(byte_level(["<end>", "x"])) == ["x"]


def word_piece(words: str, **special: str) -> hf.PreTrainedTokenizerFast:
    model = models.WordPiece({w: i for i, w in enumerate(words.split())}, unk_token="[UNK]")
    return fast_tokenizer(model, decoder=decoders.WordPiece(), unk_token="[UNK]", **special)


def test_wordpiece_vocabulary() -> None:
    tokenizer = word_piece("[UNK] [CLS] play ##ing ##play # ## ### x##y", cls_token="[CLS]")
    assert usable_strings(tokenizer) == ["play", "ing", "#", "x##y"]
    assert usable_strings(byte_level(["<end>", "##", "Ġ##x"])) == ["##", "##x"]
    assert usable_strings(hf.ByT5Tokenizer()) == [chr(code) for code in range(33, 127)]  # slow


def test_sentencepiece_like_vocabulary() -> None:
    pieces = ["<unk>", "<0x41>", "<0x0A>", "<0xE3>", "▁the", "the", "▁", "e", "\u200b", "\ue000"]
    model = models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer = fast_tokenizer(model, decoder=decoders.Sequence(parts), unk_token="<unk>")
    assert usable_strings(tokenizer) == ["A", "the", "e"]


def test_sample_is_the_same_on_every_machine() -> None:
    tokenizer = small_tokenizer(pad_token="<pad>")
    strings = usable_strings(tokenizer)
    # A whole Fisher-Yates shuffle, of the generator's raw words.
    for words, seed in ((1, 0), (2, 7)):
        deck = [" ".join(reversed(pair)) for pair in product(strings, repeat=words)]
        raw = np.random.PCG64(seed).random_raw(12).tolist()
        for first, word in enumerate(raw):
            chosen = first + word % (len(deck) - first)
            deck[first], deck[chosen] = deck[chosen], deck[first]
        assert sample_subjects(tokenizer, 12, words_per_subject=words, seed=seed) == deck[:12]
    assert sample_subjects(tokenizer, 5) == ["in", "house", "old", "city", "Tokyo"]


def test_more_than_there_are() -> None:
    tokenizer = small_tokenizer()
    n = len(usable_strings(tokenizer))
    message = rf"the vocabulary has {n} subjects of"
    with pytest.raises(SubjectsError, match=message):
        sample_subjects(tokenizer, n + 1)
    with pytest.raises(SubjectsError, match=rf"has {n * n} subjects of 2"):
        sample_subjects(tokenizer, n * n + 1, words_per_subject=2)
    with pytest.raises(ConfigError, match="words_per_subject is 0"):
        sample_subjects(tokenizer, 1, words_per_subject=0)


def test_sample_without_some_is_the_sample_without_them() -> None:
    tokenizer = word_tokenizer([f"w{i}" for i in range(60)])
    excluded = sample_subjects(tokenizer, 60)[5:15]
    expected = [x for x in sample_subjects(tokenizer, 60) if x not in excluded]
    assert sample_up_to(tokenizer, 30, excluding=excluded) == expected[:30]
    assert sample_up_to(tokenizer, 99, excluding=excluded) == expected
    assert sample_up_to(tokenizer, 99) == sample_subjects(tokenizer, 60)


@pytest.mark.parametrize("mark", ["Ġ", "▁"])
def test_whole_words_begin_with_the_mark_of_a_space(mark: str) -> None:
    words = ["<end>", f"{mark}Paris", "Paris", "ris", f"{mark}a", f"{mark}b2", f"{mark}Köln", mark]
    model = models.BPE({word: i for i, word in enumerate(words)}, [])
    decoder = decoders.Metaspace() if mark == "▁" else decoders.ByteLevel()
    tokenizer = fast_tokenizer(model, decoder=decoder, eos_token="<end>")
    found = usable_strings(tokenizer, whole_words=True)
    assert found[0] == "Paris"
    assert set(found) <= {"Paris", "Köln", "K�ln"}  # in byte-level BPE, ö is no byte of its own


def test_names_are_a_given_and_a_family_name() -> None:
    tokenizer = word_tokenizer(["Paris"])
    names = sample_subjects(tokenizer, 2000, kind="names")
    assert len(set(names)) == 2000
    assert all(len(name.split()) == 2 and name.istitle() for name in names)
    assert names[:10] == sample_subjects(tokenizer, 10, kind="names")
    with pytest.raises(SubjectsError, match=r"there are \d+ names\. Lower n_subjects\.$"):
        sample_subjects(tokenizer, 10**6, kind="names")
    with pytest.raises(ConfigError, match=r"words_per_subject is 2.* names"):
        sample_subjects(tokenizer, 3, words_per_subject=2, kind="names")
