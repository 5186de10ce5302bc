"""Which answers become labels, which are right, and which tokens may mean something else."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lincorr_lightning.knowledge import (
    Answer,
    Catalogue,
    Completeness,
    Knowledge,
    TokenizedRelation,
    build_domain,
)
from lincorr_lightning.knowledge.answer_tokens import TokenReader
from lincorr_lightning.knowledge.domain import label_answers


def character_tokenizer(*extra):
    """Return a byte-pair tokenizer without an unknown token, whose only long tokens are `extra`."""
    characters = ["X", "在", "北", "京", "洛", "杉", "矶", "阳", "巴", "黎", "▁"]
    merges = [(word[0], word[1:]) for word in extra]
    backend = Tokenizer(models.BPE({t: i for i, t in enumerate([*characters, *extra])}, merges))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def city(language, *names, space=False):
    answers = tuple(Answer(name, name) for name in names)
    return Knowledge("city", "cross_language", language, "{}在", "city", answers, space)


def test_first_characters_are_labels_in_a_script_without_spaces():
    domain = build_domain(city("zh", "北京", "洛杉矶", "洛阳", "巴黎"), character_tokenizer("北京"))
    assert domain.texts == ["北京", "洛", "巴"]
    assert domain.completeness == [
        Completeness.WHOLE, Completeness.PHRASE, Completeness.PHRASE,
    ]  # fmt: skip
    assert [answer.text for answer in domain.labels[1].answers] == ["洛杉矶", "洛阳"]


def test_parts_of_words_are_no_labels():
    """In English, first characters are parts of words; Latin letters are of a word of their own."""
    english = label_answers(city("en", "洛杉矶"), TokenReader(character_tokenizer()))
    assert [dropped.reason for dropped in english.dropped] == ["subword"]
    domain = label_answers(city("zh", "X京", "洛杉矶"), TokenReader(character_tokenizer()))
    assert domain.texts == ["洛"]
    assert [dropped.answer.text for dropped in domain.dropped] == ["X京"]


def test_chinese_after_a_chinese_prompt_has_no_space_mark():
    """SentencePiece puts its mark before an answer alone: a token that never follows the prompt."""
    tokenizer = character_tokenizer("巴黎", "▁X", "▁巴黎")
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    vocabulary = tokenizer.get_vocab()
    assert tokenizer("巴黎").input_ids == [vocabulary["▁巴黎"]]
    domain = build_domain(city("zh", "巴黎"), tokenizer)
    assert domain.token_ids == [vocabulary["巴黎"]] == [tokenizer("X在巴黎").input_ids[-1]]
    assert domain.texts == ["巴黎"]


def test_a_word_of_a_word_level_vocabulary_is_not_part_of_another():
    backend = Tokenizer(
        models.WordLevel({"[UNK]": 0, "X": 1, "在": 2, "日本": 3, "语": 4}, "[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Split("日本", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    domain = label_answers(city("zh", "日本语"), TokenReader(tokenizer))
    assert domain.labels == ()


@pytest.fixture(scope="module")
def words():
    """A tokenizer that knows some places and the words of their prompts."""
    text = "X lives in the city country of Atlanta Boston Buffalo Tokyo Georgia New Japan USA"
    text += " vive en la ciudad el país de Nueva"
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(["[UNK]", *text.split()]))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


def ambiguous(relation, tokenizer):
    """Return the pairs (source label, target label) that are ambiguous."""
    tokenized = TokenizedRelation.of(relation, Catalogue.load(), tokenizer)
    assert not (tokenized.ambiguous_mask & tokenized.reference_mask).any()
    return {
        (tokenized.source.texts[column], tokenized.target.texts[row])
        for row, column in np.argwhere(tokenized.ambiguous_mask)
    }


def test_a_state_is_told_apart_from_the_country_of_its_name(words):
    """ " Georgia" may be the state of Atlanta; " New", of New Zealand, New York of Buffalo."""
    pairs = {("Atlanta", "Georgia"), ("Buffalo", "New"), ("New", "New")}
    assert ambiguous("city->country", words) == pairs
    assert ambiguous("city->country_es", words) == {
        ("Atlanta", "Georgia"), ("Buffalo", "Nueva"), ("New", "Nueva"),
    }  # fmt: skip
    assert ambiguous("country->city", words) == set()
    relation = Catalogue.load().relation("city->country")
    assert (relation.reference["Atlanta"], relation.reference["Tbilisi"]) == ({"USA"}, {"Georgia"})
    assert relation.other_facts["Atlanta"] == ("Georgia",)
    assert "Tbilisi" not in relation.other_facts
