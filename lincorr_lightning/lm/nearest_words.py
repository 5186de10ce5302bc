"""Nearest words: which labels are alike in an LM's head, in its causal inner product."""

from collections.abc import Sequence

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lincorr_lightning.functional.causal_inner_product import causal_whitening
from lincorr_lightning.functional.precision import neighbor_weights
from lincorr_lightning.lm.head import VocabularyRows


class NearestWords:
    """Compares words by the rows of an LM's head alone, see `causal_whitening`.

    All ranks that share an LM must create and call it together. The LM's name is for the log.
    """

    def __init__(self, head: VocabularyRows, name: str) -> None:
        self.head = head
        self.whitening = causal_whitening(head.blocks)
        if self.whitening.n_copies:
            rank_zero_info(
                f"{self.whitening.n_copies:,} of {self.whitening.n_rows:,} rows of the head of "
                f"{name} equal another row, as padding does: they do not count."
            )

    def weights(self, source_ids: Sequence[int], target_ids: Sequence[int]) -> Tensor:
        """Return how near tokens are, weights like W: ``(n_target, n_source)``, float64."""
        rows = self.head.rows([*source_ids, *target_ids])
        n = len(source_ids)
        return neighbor_weights(rows[:n], rows[n:], self.whitening.matrix)
