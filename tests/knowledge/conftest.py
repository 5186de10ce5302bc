"""Tokenizers of every common make, trained here on a text that knows few words."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lincorr_lightning.knowledge import Answer, Knowledge

# Frequent words become whole tokens; "Brunei" and "Zagreb" are split.
FREQUENT = (
    "X lives in the city of Paris . X lives in the country of France . "
    "X lives in the country of South Korea . X lives in the country of North Korea . "
    "Rome Tokyo Italy Japan China paris france south 1 2 3 = + 10 \n"
)
FREQUENT += "Bob Bill Bad Boo Zip Zoe Zac Zoo \n"  # teaches " B" and " Z", as real LMs know them
RARE = "Brunei Zagreb Bruno great zeal uneven agree \n"
TEXT = [FREQUENT] * 200 + [RARE]


def wrap(backend: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


@pytest.fixture(scope="session")
def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2's and Llama 3's make: the space belongs to the word, bytes below."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, min_frequency=50, special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(TEXT, trainer)
    return wrap(backend, eos_token="<|end|>", bos_token="<|end|>")


def _metaspace(scheme: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)]
    )
    special = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=600, min_frequency=50, special_tokens=special, show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    # The trainer can only make the byte tokens special; in a real vocabulary they are not.
    content = json.loads(backend.to_str())
    content["added_tokens"] = content["added_tokens"][:2]
    return wrap(Tokenizer.from_str(json.dumps(content)), unk_token="<unk>", bos_token="<s>")


@pytest.fixture(scope="session", params=["first", "always", "llama 2"])
def sentencepiece(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """SentencePiece BPE with byte fallback, in the three shapes it is converted to."""
    if request.param != "llama 2":
        return _metaspace(request.param)
    tokenizer = _metaspace("always")
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    return tokenizer


@pytest.fixture(scope="session")
def unigram() -> PreTrainedTokenizerFast:
    """T5's and XLM's make; by hand, for the trainer finds no words in so little text."""
    words = sorted({f"▁{word}" for word in FREQUENT.split()})
    letters = sorted(set("▁" + FREQUENT + RARE) - set(" \n") - set(words))
    scores = [(word, -4.0) for word in words] + [(letter, -8.0) for letter in letters]
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), *scores], unk_id=0))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return wrap(backend, unk_token="<unk>")


@pytest.fixture(scope="session")
def word_piece() -> PreTrainedTokenizerFast:
    """BERT's make: lower case, no accents, no space in the vocabulary."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, min_frequency=50, special_tokens=["[UNK]", "[CLS]"], show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    return wrap(backend, unk_token="[UNK]", cls_token="[CLS]")


@pytest.fixture(scope="session")
def word_level() -> PreTrainedTokenizerFast:
    """One token a word, as of the smallest worlds."""
    backend = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(
        min_frequency=50, special_tokens=["[UNK]"], show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    return wrap(backend, unk_token="[UNK]")


@pytest.fixture
def ask() -> Callable[..., Knowledge]:
    """Make a knowledge of a few answers; each is its own identity unless given as a pair."""

    def make(
        *answers: str | tuple[str, str],
        template: str = "{} lives in the city of",
        space: bool = True,
        name: str = "place",
        kind: str = "place",
    ) -> Knowledge:
        pairs = (answer if isinstance(answer, tuple) else (answer, answer) for answer in answers)
        found = tuple(Answer(identity, text) for identity, text in pairs)
        return Knowledge(name, "attribute", "en", template, kind, found, leading_space=space)

    return make


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a knowledge file."""

    def write_file(text: str, name: str = "mine.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_file
