"""Labels of a domain, against what the raw vocabulary says."""

import numpy as np
import pytest
from tokenizers import decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer

from lincorr_lightning.errors import DomainError
from lincorr_lightning.knowledge import (
    Answer,
    Catalogue,
    Completeness,
    Knowledge,
    Relation,
    build_domain,
    reference_matrix,
    unknown_words,
)
from lincorr_lightning.knowledge.answer_tokens import TokenReader
from lincorr_lightning.knowledge.domain import label_answers
from tests.toys import fast_tokenizer, word_tokenizer

ALL = tuple(Completeness)
PLACES = ("Brunei", "Paris", "South Korea", "Rome", "South Africa", "Zagreb", "North Korea")


def reasons(domain):
    return {dropped.answer.text: dropped.reason for dropped in domain.dropped}


@pytest.mark.parametrize(
    ("make", "spell", "reason"),
    [
        ("byte_level", "Ġ{}", "subword"),
        ("unigram", "▁{}", "bare space"),
        ("word_level", "{}", "unknown word"),
        ("word_piece", "{}", "subword"),
    ],
)
def test_labels_are_the_first_words_that_are_tokens(request, ask, make, spell, reason):
    words = ["Paris", "South", "Rome", "North"]
    if make == "word_piece":  # it has lower case only
        words = [word.lower() for word in words]
    check_places(request.getfixturevalue(make), ask, words, spell, reason)


def test_sentencepiece_takes_the_token_with_the_low_line(sentencepiece, ask):
    check_places(sentencepiece, ask, ["Paris", "South", "Rome", "North"], "▁{}", "subword")


def check_places(tokenizer, ask, words, spell, reason):
    """The paper's rule, straight from the vocabulary."""
    vocabulary = tokenizer.get_vocab()
    assert spell.format("Brunei") not in vocabulary and spell.format(words[0]) in vocabulary
    domain = build_domain(ask(*PLACES), tokenizer)
    assert domain.texts == words
    assert domain.token_ids == [vocabulary[spell.format(word)] for word in words]
    assert [str(grade) for grade in domain.completeness] == ["whole", "phrase", "whole", "phrase"]
    answers = ["Paris"], ["South Korea", "South Africa"], ["Rome"], ["North Korea"]
    assert tuple([answer.text for answer in label.answers] for label in domain.labels) == answers
    assert reasons(domain) == {"Brunei": reason, "Zagreb": reason}
    for label in domain.labels:  # what an LM would generate after the prompt
        for answer in label.answers:
            before = tokenizer("X lives in the city of", add_special_tokens=False).input_ids
            text = f"X lives in the city of {answer.text}"
            after = tokenizer(text, add_special_tokens=False).input_ids
            assert after[len(before)] == label.token_id
    if reason == "subword":
        assert "Brunei".lower() in "".join(domain.dropped[0].tokens).replace("#", "").lower()


def test_answers_without_a_space_take_the_token_without_one(
    byte_level, word_level, unigram, sentencepiece, ask
):
    for tokenizer in (byte_level, word_level, unigram, sentencepiece):
        vocabulary = tokenizer.get_vocab()
        domain = build_domain(ask("3", "2", template="{}+1=", space=False), tokenizer, keep=ALL)
        assert domain.token_ids == [vocabulary["3"], vocabulary["2"]]
        assert domain.completeness == ["whole", "whole"]


def test_the_first_of_several_digits_is_no_answer(ask):
    """SentencePiece LMs split numbers: "1" of "10" must not stand for 10."""
    tokenizer = ByT5Tokenizer()  # also a tokenizer without the Rust backend: no offsets
    assert not tokenizer.is_fast
    domain = build_domain(ask("1", "10", "7", template="{}+1=", space=False), tokenizer, keep=ALL)
    assert domain.texts == ["1", "7"]
    assert domain.token_ids == [ord("1") + 3, ord("7") + 3]  # ByT5: byte value + 3 specials
    assert reasons(domain) == {"10": "subword"}


def test_subwords_are_kept_only_on_request(byte_level, ask):
    country = ask("Paris", "Brunei", "South Korea")
    domain = build_domain(country, byte_level, keep=ALL)
    assert [str(label.completeness) for label in domain.labels] == ["whole", "subword", "phrase"]
    subword = domain.labels[1]
    assert "Brunei".startswith(subword.text) and subword.text != "Brunei"
    assert byte_level.decode([subword.token_id]).strip() == subword.text
    only = build_domain(country, byte_level, keep=[Completeness.SUBWORD])
    assert only.token_ids == [subword.token_id]
    assert reasons(only) == {"Paris": "whole", "South Korea": "phrase"}
    assert build_domain(country, byte_level, keep=["phrase"]).texts == ["South"]


def test_special_tokens_and_parts_of_a_character_are_never_labels(byte_level, sentencepiece, ask):
    ended = ask("Paris", "<|end|>", template="{}:", space=False)
    assert reasons(build_domain(ended, byte_level, keep=ALL))["<|end|>"] == "special token"
    for tokenizer in (byte_level, sentencepiece):
        chinese = ask("巴黎", "东京", template="{}所居住的城市是", space=False)
        with pytest.raises(DomainError, match=r"'place'.* 2 answers; dropped: 2 part of a char"):
            build_domain(chinese, tokenizer, keep=ALL)


@pytest.mark.parametrize("mark", ["", "▁"])
def test_an_answer_that_merges_with_the_prompt_is_taken_by_itself(ask, mark):
    """Qwen has one token for 是中国; the LM reads 是 and continues from there."""
    tokens = ["X", "是", "中", "国", "中国", "是中国", "▁", "▁中国", "▁X"]
    merges = [("中", "国"), ("是", "中国"), ("▁", "X"), ("▁", "中国")]
    model = models.BPE({token: i for i, token in enumerate(tokens)}, merges=merges)
    # SentencePiece would put its space mark before it: that is another token, never said here.
    tokenizer = (
        fast_tokenizer(model, pre_tokenizers.Metaspace(), decoders.Metaspace())
        if mark
        else fast_tokenizer(model, decoder=decoders.Fuse())
    )
    assert tokenizer.tokenize("X是中国")[-1] == "是中国"
    domain = label_answers(ask("中国", template="{}是", space=False), TokenReader(tokenizer))
    assert domain.texts == ([] if mark else ["中国"])
    assert reasons(domain) == ({"中国": "merges with the prompt"} if mark else {})


def test_a_prompt_that_is_split_otherwise_before_an_answer_still_shows_it(ask):
    """Llama 3 looks words up before it merges: 城市是 is one token, but not in 城市是巴黎."""
    characters = ["X", "城", "市", "是", "巴", "黎"]
    vocabulary = {token: i for i, token in enumerate([*characters, "X城市是", "巴黎"])}
    tokenizer = fast_tokenizer(models.BPE(vocabulary, [("巴", "黎")], ignore_merges=True))
    assert len(tokenizer("X城市是").input_ids) == 1
    assert len(tokenizer("X城市是巴黎").input_ids) == 5
    domain = build_domain(ask("巴黎", template="{}城市是", space=False), tokenizer)
    assert domain.token_ids == [vocabulary["巴黎"]]


def test_texts_stay_unique_where_two_tokens_read_alike(ask):
    """CLIP's make: "south" ends a word in one token and begins one in another."""
    vocabulary = {"a": 0, "b": 1, "a</w>": 2, "b</w>": 3, ".": 4, ".</w>": 5}
    tokenizer = fast_tokenizer(
        models.BPE(vocabulary, merges=[], end_of_word_suffix="</w>"),
        pre_tokenizers.WhitespaceSplit(),
        decoders.BPEDecoder(suffix="</w>"),
    )
    domain = build_domain(ask("a", "ab", "b", template="{} ."), tokenizer, keep=ALL)
    assert domain.token_ids == [2, 0, 3]
    assert len(set(domain.texts)) == 3
    assert domain.texts[2] == "b"
    assert all(text.startswith("a ") for text in domain.texts[:2])


def test_reference_matrix_against_two_loops(word_level, ask):
    source = ask("Paris", "Tokyo", "South Korea", "South Africa", "Rome", name="a")
    target = ask("Japan", "Italy", "France", ("France", "france"), "China", name="b")
    reference = {
        "Paris": frozenset({"France"}),
        "Tokyo": frozenset({"Japan", "China"}),
        "South Africa": frozenset({"Italy"}),
        "Nowhere": frozenset({"Italy"}),
        "Rome": frozenset({"Elsewhere"}),
    }
    sources, targets = build_domain(source, word_level), build_domain(target, word_level)
    matrix = reference_matrix(Relation(source, target, reference), sources, targets)
    assert targets.texts == ["Japan", "Italy", "France", "france", "China"]
    assert sources.texts == ["Paris", "Tokyo", "South", "Rome"]
    expected = np.zeros((5, 4), dtype=bool)
    for column, rows in {0: [2, 3], 1: [0, 4], 2: [1]}.items():
        expected[rows, column] = True
    assert matrix.dtype == np.bool_
    np.testing.assert_array_equal(matrix, expected)
    assert not reference_matrix(Relation(source, target, None), sources, targets).any()


def test_words_that_no_token_stands_for_are_named(byte_level, ask):
    words = word_tokenizer(["lives", "in"])
    spanish = ask("Roma", template="{} vive in la")
    assert unknown_words(spanish, words) == ["vive", "la"]
    for known in ("{} lives in", "{}"):
        assert unknown_words(ask("Rome", template=known), words) == []
    assert unknown_words(spanish, byte_level) == []


# -- scripts without spaces, and tokens that may mean something else ------------------------------


def character_tokenizer(*extra):
    """Return a byte-pair tokenizer without an unknown token, whose only long tokens are `extra`."""
    characters = ["X", "在", "北", "京", "洛", "杉", "矶", "阳", "巴", "黎", "▁"]
    merges = [(word[0], word[1:]) for word in extra]
    return fast_tokenizer(models.BPE({t: i for i, t in enumerate([*characters, *extra])}, merges))


def city(*names):
    answers = tuple(Answer(name, name) for name in names)
    return Knowledge("city", "cross_language", "zh", "{}在", "city", answers, leading_space=False)


def test_first_characters_are_labels_in_a_script_without_spaces():
    domain = build_domain(city("北京", "洛杉矶", "洛阳", "巴黎"), character_tokenizer("北京"))
    assert domain.texts == ["北京", "洛", "巴"]
    assert domain.completeness == ["whole", "phrase", "phrase"]
    assert [answer.text for answer in domain.labels[1].answers] == ["洛杉矶", "洛阳"]


def test_chinese_after_a_chinese_prompt_has_no_space_mark():
    """SentencePiece puts its mark before an answer alone: a token that never follows the prompt."""
    tokenizer = character_tokenizer("巴黎", "▁X", "▁巴黎")
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    vocabulary = tokenizer.get_vocab()
    assert tokenizer("巴黎").input_ids == [vocabulary["▁巴黎"]]
    domain = build_domain(city("巴黎"), tokenizer)
    assert domain.token_ids == [vocabulary["巴黎"]] == [tokenizer("X在巴黎").input_ids[-1]]
    assert domain.texts == ["巴黎"]


def test_a_city_of_a_state_lies_in_its_country():
    relation = Catalogue.load().relation("city->country")
    assert (relation.reference["Atlanta"], relation.reference["Tbilisi"]) == ({"USA"}, {"Georgia"})
