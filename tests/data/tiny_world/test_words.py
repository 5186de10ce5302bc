import pytest
from transformers import AutoTokenizer

from lincorr_lightning.data.tiny_world.words import build_tokenizer, words_of
from lincorr_lightning.knowledge import Catalogue


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Ada lives in the city of Paris.", "Ada lives in the city of Paris .".split()),
        ("Ada’s mother’s name is Eve", "Ada ’s mother ’s name is Eve".split()),
        ("Ada-4=", "Ada - 4 =".split()),
        ("a tuk-tuk, K-pop", "a tuk-tuk , K-pop".split()),
        ("Ada说的语言是", ["Ada", *"说的语言是"]),
        ("Adaが住んでいる", ["Ada", *"が住んでいる"]),
    ],
)
def test_splits_words(text, words):
    assert words_of(text) == words


def test_longest_word_wins_where_there_are_no_spaces():
    assert words_of("中国人", ["中", "中国"]) == ["中国", "人"]


def test_the_tokenizer_splits_as_words_of_does(tmp_path):
    prompts = [k.prompt("Ada") for k in Catalogue.load().values()]
    unspaced = ["城市", "巴黎"]
    texts = [*prompts, "Ada所居住的城市是巴黎"]
    words = [word for text in texts for word in words_of(text, unspaced)]
    tokenizer = build_tokenizer(words, unspaced)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in texts:
        assert tokenizer.tokenize(text) == loaded.tokenize(text) == words_of(text, unspaced)
        assert loaded(text)["input_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert loaded.padding_side == "left"
    assert loaded.convert_ids_to_tokens(loaded("Nobody lives")["input_ids"]) == ["<unk>", "lives"]
