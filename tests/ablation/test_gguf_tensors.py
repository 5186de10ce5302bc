"""Token embeddings out of GGUF files."""

from pathlib import Path

import pytest
import torch

from lincorr_lightning.ablation.token_embedding import read_token_embedding
from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.lm.config import LMConfig
from tests.toys import save_toy_gguf

gguf = pytest.importorskip("gguf", reason="install lincorr-lightning[gguf]")


@pytest.mark.parametrize("source", ["input", "output"])
def test_embedding_and_untied_head(tmp_path: Path, source: str) -> None:
    path = tmp_path / "toy.gguf"
    model = save_toy_gguf(path)
    embedding = read_token_embedding(LMConfig(str(path)), source)
    matrix = model.model.embed_tokens if source == "input" else model.lm_head
    assert embedding.key == {"input": "token_embd.weight", "output": "output.weight"}[source]
    assert not embedding.is_tied
    torch.testing.assert_close(embedding.weight, matrix.weight, rtol=0, atol=0)


def test_tied_head_of_a_file_without_one(tmp_path: Path) -> None:
    path = tmp_path / "toy.gguf"
    save_toy_gguf(path, tie_word_embeddings=True)
    assert read_token_embedding(LMConfig(str(path)), "output").is_tied


def test_quantized_embedding(tmp_path: Path) -> None:
    path = tmp_path / "toy.gguf"
    written = save_toy_gguf(path, "Q8_0").model.embed_tokens.weight.detach().numpy()
    kind = gguf.GGMLQuantizationType.Q8_0
    expected = torch.from_numpy(gguf.dequantize(gguf.quantize(written, kind), kind))
    weight = read_token_embedding(LMConfig(str(path))).weight
    torch.testing.assert_close(weight, expected, rtol=0, atol=0)


def test_file_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "toy.gguf"
    save_toy_gguf(path)
    path.write_bytes(path.read_bytes()[:-1_000])
    with pytest.raises(LanguageModelError, match=r"toy\.gguf cannot be read.*complete"):
        read_token_embedding(LMConfig(str(path)))
