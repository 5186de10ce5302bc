"""Small LMs of the writers, and what both sides do with them: logits saved, logits compared."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROWS = [[1, 9, 5], [1], [1, 30, 7, 14, 22, 6, 17, 9, 11, 3, 12, 28, 33, 4], [8, 21, 8]]
WORDS = [f"word{i}" for i in range(36)]
PIECES = "pieces.model"
SIZES = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_lm(model_type: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """Return a random LM of an architecture, with weights that matter everywhere."""
    import transformers as hf

    config = hf.AutoConfig.for_model(model_type, **SIZES | changes)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    return perturb(model, 0.15, seed)


@torch.no_grad()
def perturb(model: Any, std: float, seed: int = 0) -> Any:
    """Add random numbers to all weights that are trained; return the model."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += std * torch.randn_like(parameter)
    return model


def save_tokenizer(folder: Path, vocabulary: Sequence[str] = WORDS, puts_bos: bool = False) -> None:
    """Save a tokenizer of whole words, which may put BOS before a text."""
    import transformers as hf
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    words = [*special.values(), *vocabulary]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if puts_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    hf.PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)


def train_tokenizers(folder: Path, unknown: str) -> Any:
    """Train a byte-level tokenizer and return it, and one of sentencepiece, saved as `PIECES`."""
    import sentencepiece
    from tokenizers import ByteLevelBPETokenizer

    text = folder / "text.txt"
    text.write_text("\n".join(["the end of the lines, two words! Don't " + " ".join(WORDS)] * 20))
    bpe = ByteLevelBPETokenizer()
    special = ["<s>", "</s>", unknown]
    bpe.train([str(text)], vocab_size=300, min_frequency=1, special_tokens=special)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / PIECES.removesuffix(".model")),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",  # as Llama's
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
    )
    return bpe


@torch.no_grad()
def last_logits(model: Any) -> np.ndarray:
    """Return the logits after each of `ROWS`, read one by one, ``(n_rows, n_tokens)``."""
    logits = [model(input_ids=torch.tensor([row])).logits[0, -1] for row in ROWS]
    return torch.stack(logits).float().numpy()


def save_logits(path: Path, model: Any, **more: Any) -> None:
    """Save `ROWS`, padded by -1, and the logits after them, as the writer computes them."""
    rows = np.full((len(ROWS), max(map(len, ROWS))), -1)
    for row, ids in zip(rows, ROWS, strict=True):
        row[: len(ids)] = ids
    np.savez(path, rows=rows, logits=last_logits(model), **more)


def case_names(folder: Path) -> set[str]:
    """Return the names of all cases whose logits were saved in a folder."""
    return {path.stem for path in folder.glob("*.npz")}


def assert_same_logits(lm: Any, path: Path, tolerance: float = 1e-5) -> None:
    """Compare an LM's logits with saved ones; differences are relative to the largest logit.

    The default is the rounding of float32: sums of a few hundred products, in another order.
    """
    saved = np.load(path)
    rows = [row[row >= 0].tolist() for row in saved["rows"]]
    expected = saved["logits"]
    found = lm.logits_of_rows(rows, range(expected.shape[1])).numpy()
    assert lm.vocab_size == expected.shape[1]
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())
