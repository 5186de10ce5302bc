"""The token embedding of a checkpoint, in memory."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lincorr_lightning.lm import loading
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.stored_rows import StoredRows, stored_embedding

_log = logging.getLogger(__name__)


class TokenEmbedding:
    """The token embedding of a checkpoint, and where it is stored."""

    def __init__(self, stored: StoredRows) -> None:
        self.stored = stored
        self.weight = stored.whole()
        """Embedding matrix in the checkpoint's precision, ``(n_tokens, d)``."""

    def rows(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        """Return the embeddings of n tokens as a float32 copy, ``(n, d)``."""
        return self.weight[torch.as_tensor(token_ids)].float()

    def pooled(self, token_ids: Sequence[Sequence[int]]) -> Tensor:
        """Return the mean embedding of each text, ``(n_texts, d)``, float32."""
        flat = torch.tensor([token for ids in token_ids for token in ids])
        used, positions = torch.unique(flat, return_inverse=True)
        starts = torch.tensor([0, *map(len, token_ids[:-1])]).cumsum(0)
        # In float64, so that a text's mean does not depend on the order of its sum.
        rows = self.rows(used).double()
        return nn.functional.embedding_bag(positions, rows, starts, mode="mean").float()


def read_token_embedding(config: LMConfig) -> TokenEmbedding:
    """Read the input embedding of a checkpoint, and its tokenizer, see `stored_embedding`.

    The matrix keeps its stored precision; the `dtype` of the settings is ignored.
    """
    checkpoint = loading.find_checkpoint(config)
    # The configuration first: without one, errors about the tokenizer would mislead.
    lm_config = loading.read_config(checkpoint, must_be_causal=False)
    embedding = TokenEmbedding(stored_embedding(checkpoint, loading.read_tokenizer(checkpoint)))
    if not getattr(lm_config.get_text_config(), "tie_word_embeddings", True):
        _log.warning(
            "The head of %s is not tied to its embedding, which the ablation uses for both.",
            config.name_or_path,
        )
    return embedding
