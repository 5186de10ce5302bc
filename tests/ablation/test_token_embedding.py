"""The vocabulary of a checkpoint, against what transformers reads of it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from lincorr_lightning.ablation.token_embedding import TokenEmbedding, read_token_embedding
from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.lm.config import LMConfig

VOCAB = 33
KEY = "model.embed_tokens.weight"
_ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 8,
    "max_position_embeddings": 16,
}

MODELS: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**_ENCODER)),
    "modernbert": lambda: hf.ModernBertForMaskedLM(hf.ModernBertConfig(**_ENCODER, pad_token_id=0)),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=VOCAB, d_model=8, d_kv=8, d_ff=8, num_layers=1, num_heads=1)
    ),
    "llama-bare": lambda: hf.LlamaModel(hf.LlamaConfig(**_ENCODER)),
}


def read(folder: Path | str) -> TokenEmbedding:
    return read_token_embedding(LMConfig(str(folder)))


def by_transformers(folder: Path) -> torch.Tensor:
    weight: torch.Tensor = hf.AutoModel.from_pretrained(folder).get_input_embeddings().weight
    return weight.detach()


@pytest.fixture
def folder(lm_folder: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of an untied Llama to change."""
    return Path(shutil.copytree(lm_folder("llama"), tmp_path / "llama"))


def test_embedding_of_every_decoder(architecture: str, lm_folder: Callable[..., Path]) -> None:
    path = lm_folder(architecture)
    assert torch.equal(read(path).weight, by_transformers(path))


@pytest.mark.parametrize("name", MODELS)
def test_embedding_of_encoders_and_bare_models(
    name: str, small: SimpleNamespace, tmp_path: Path
) -> None:
    MODELS[name]().save_pretrained(tmp_path)
    small.tokenizer().save_pretrained(tmp_path)
    embedding = read(tmp_path)
    assert torch.equal(embedding.weight, by_transformers(tmp_path))
    assert embedding.weight.shape == (VOCAB, 8) and not embedding.weight.requires_grad


def test_prefix_may_be_there_or_lack(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    # GPT-2's own checkpoint is one of an LM without the prefix `transformer.`.
    tensors, expected = load_file(folder / "model.safetensors"), by_transformers(folder)
    for new in ("", "outer.model."):
        renamed = {key.replace("model.", new, 1): value for key, value in tensors.items()}
        save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
        embedding = read(folder)
        assert embedding.stored.key == f"{new}embed_tokens.weight"
        assert torch.equal(embedding.weight, expected)


def test_a_checkpoint_without_a_vocabulary(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[KEY]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LanguageModelError, match="has no token embedding: its tensors are lm_head"):
        read(folder)


def test_pooled_is_the_mean_over_the_tokens_of_a_text(folder: Path, small: SimpleNamespace) -> None:
    hf.AutoModelForCausalLM.from_pretrained(folder).bfloat16().save_pretrained(folder)
    embedding = read(folder)
    assert embedding.weight.dtype == torch.bfloat16  # as stored
    texts = [small.ids(text, bos=False) for text in small.prompts]
    naive = torch.stack([embedding.weight[ids].float().mean(0) for ids in texts])
    torch.testing.assert_close(embedding.pooled(texts), naive)
    assert torch.equal(
        torch.cat([embedding.pooled([ids]) for ids in texts]), embedding.pooled(texts)
    )
