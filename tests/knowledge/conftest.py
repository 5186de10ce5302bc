"""Tokenizers of every common make, trained here on a text that knows few words."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lincorr_lightning.knowledge import Answer, Knowledge
from tests.toys import fast_tokenizer

# Frequent words become whole tokens; "Brunei" and "Zagreb" are split.
FREQUENT = (
    "X lives in the city of Paris . X lives in the country of France . "
    "X lives in the country of South Korea . X lives in the country of North Korea . "
    "Rome Tokyo Italy Japan China paris france south 1 2 3 = + 10 \n"
)
FREQUENT += "Bob Bill Bad Boo Zip Zoe Zac Zoo \n"  # teaches " B" and " Z", as real LMs know them
RARE = "Brunei Zagreb Bruno great zeal uneven agree \n"
TEXT = [FREQUENT] * 200 + [RARE]


@pytest.fixture(scope="session")
def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2's and Llama 3's make: the space belongs to the word, bytes below."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        min_frequency=50,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", bos_token="<|end|>"
    )


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
    backend = Tokenizer.from_str(json.dumps(content))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>")


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
    model = models.Unigram([("<unk>", 0.0), *scores], unk_id=0)
    split, join = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = fast_tokenizer(model, split, join, unk_token="<unk>")
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    return tokenizer


WORDS = list(dict.fromkeys(re.findall(r"\w+|[^\w\s]", FREQUENT)))


@pytest.fixture(scope="session")
def word_piece() -> PreTrainedTokenizerFast:
    """BERT's make: lower case, no accents, no space in the vocabulary."""
    words = {word.lower() for word in WORDS}
    letters = sorted(set("".join(words) + RARE.lower()) - set(" \n"))
    pieces = ["[UNK]", "[CLS]", *letters, *(f"##{a}" for a in letters), *sorted(words - {*letters})]
    model = models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]")
    split = pre_tokenizers.BertPreTokenizer()
    tokenizer = fast_tokenizer(model, split, decoders.WordPiece(), unk_token="[UNK]")
    tokenizer.backend_tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    return tokenizer


@pytest.fixture(scope="session")
def word_level() -> PreTrainedTokenizerFast:
    """One token a word, as of the smallest worlds."""
    vocabulary = {word: i for i, word in enumerate(["[UNK]", *WORDS])}
    model = models.WordLevel(vocabulary, unk_token="[UNK]")
    return fast_tokenizer(model, pre_tokenizers.Whitespace(), unk_token="[UNK]")


@pytest.fixture
def ask() -> Callable[..., Knowledge]:
    """Make a knowledge of a few answers; each is its own identity unless given as a pair."""

    def make(
        *answers: str | tuple[str, str],
        template: str = "{} lives in the city of",
        space: bool = True,
        name: str = "place",
    ) -> Knowledge:
        pairs = [answer if isinstance(answer, tuple) else (answer, answer) for answer in answers]
        made = tuple(Answer(*pair) for pair in pairs)
        return Knowledge(name, "attribute", "en", template, name, made, leading_space=space)

    return make


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a knowledge file."""

    def write_file(text: str, name: str = "mine.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_file
