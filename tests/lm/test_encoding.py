import pytest
import torch
import transformers as hf

from lincorr_lightning.errors import LanguageModelError, SubjectsError
from lincorr_lightning.lm.encoding import PromptEncoder
from lincorr_lightning.lm.language_model import LanguageModel
from tests.lm.small_lms import VOCAB, Folder, small_tokenizer
from tests.toys import toy_model

PARIS_LIVES = [4, 9]


@pytest.mark.parametrize(
    ("template", "prefix"),
    [
        (None, []),
        ("<s> $A", [2]),
        ("<s> $A </s>", [2]),
        ("</s> $A", [3]),  # OPT's way
        ("<s> </s> $A </s>", [2, 3]),
    ],
)
def test_what_the_tokenizer_puts_before_and_nothing_after(
    template: str | None, prefix: list[int]
) -> None:
    encoder = PromptEncoder(small_tokenizer(template))
    assert encoder.rows(["Paris lives"]) == [prefix + PARIS_LIVES]


@pytest.mark.parametrize("template", [None, "<s> $A </s>"])
def test_add_bos_overrides(template: str | None) -> None:
    tokenizer = small_tokenizer(template)
    # Whoever copies a prompt from a log copies its BOS too: it is never doubled.
    for prompt in ("Paris lives", "<s> Paris lives"):
        assert PromptEncoder(tokenizer, add_bos=True).rows([prompt]) == [[2, *PARIS_LIVES]]
    assert PromptEncoder(tokenizer, add_bos=False).rows(["Paris lives"]) == [PARIS_LIVES]


def test_bos_that_the_tokenizer_lacks() -> None:
    tokenizer = small_tokenizer(None, bos_token=None)
    with pytest.raises(LanguageModelError, match=r"lm\.add_bos is true, but .* has no BOS token"):
        PromptEncoder(tokenizer, add_bos=True)


@pytest.mark.parametrize("pad", [None, "<pad>", "<far>"])
def test_padding_is_on_the_right_whatever_the_tokenizer_wants(pad: str | None) -> None:
    # "<far>" is an id that the tokenizer added and the LM has no embedding for.
    tokenizer = small_tokenizer(None, pad_token=pad, padding_side="left")
    encoder = PromptEncoder(tokenizer, vocab_size=VOCAB)
    ids, mask = encoder.pad(encoder.rows(["Paris", "Paris lives in"]))
    assert ids.tolist() == [[4, 0, 0], [4, 9, 10]]
    assert mask.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert ids.dtype == torch.long


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["Paris", ""], r"prompt 1 \(''\) has no tokens of its own"),
        ("Paris", "single string 'Paris'; pass a list"),
        # As of a command line that is not UTF-8.
        (["Paris", "a \udce9"], r"prompt 1 \('a \\udce9'\) has an unpaired surrogate"),
    ],
)
def test_prompts_without_a_position_to_read(prompts: list[str], message: str) -> None:
    with pytest.raises(SubjectsError, match=message):
        PromptEncoder(small_tokenizer()).rows(prompts)


def test_prompt_longer_than_the_positions(lm_folder: Folder) -> None:
    lm = LanguageModel.from_pretrained(str(lm_folder("gpt2")))
    lm.domain_logits(["Paris " * 31], [4])
    with pytest.raises(
        SubjectsError, match=r"prompt 0 .* has 33 tokens; the LM has positions for 32"
    ):
        lm.domain_logits(["Paris " * 32], [4])


@pytest.mark.parametrize("pad", [0, 1, 5])
def test_positions_that_begin_after_padding(pad: int) -> None:
    """RoBERTa's first position is that after its padding token's."""
    model = toy_model("roberta", VOCAB, is_decoder=True, intermediate_size=24, pad_token_id=pad)
    lm = LanguageModel.from_module(model, small_tokenizer())
    longest = 32 - pad - 1
    assert lm.max_length == longest
    lm.domain_logits(["Paris " * (longest - 1)], [4])
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, longest + 1), 7))


def test_tokenizer_of_another_lm() -> None:
    lm = LanguageModel.from_module(toy_model("llama", 20), small_tokenizer())
    message = r"prompt 1 \('Paris by'\) has the token id 31, but the LM has embeddings for 20"
    with pytest.raises(LanguageModelError, match=message):
        lm.domain_logits(["Paris", "Paris by"], [4])


def test_slow_tokenizer_without_bos() -> None:
    encoder = PromptEncoder(hf.ByT5Tokenizer())  # bytes + 3; appends </s>
    assert encoder.rows(["ab", "c"]) == [[100, 101], [102]]
    for tokenizer in (small_tokenizer(), small_tokenizer(None), hf.ByT5Tokenizer()):
        assert len(PromptEncoder(tokenizer).probe()) >= 3
