import pytest
import torch

from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.lm.batching import MicroBatches


class Memory:
    """Holds so many tokens, and records each request."""

    def __init__(self, lengths: list[int], limit: int, error: Exception | None = None) -> None:
        self.lengths, self.limit = lengths, limit
        self.error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        self.done: list[list[int]] = []
        self.requested: list[int] = []

    def __call__(self, batch: list[int]) -> None:
        tokens = len(batch) * max(self.lengths[i] for i in batch)
        self.requested.append(tokens)
        if tokens > self.limit:
            raise self.error
        self.done.append(batch)


LENGTHS = [5, 3, 9, 1, 5, 9, 2, 7]


def run(batches: MicroBatches, memory: Memory, device: str = "cpu") -> None:
    batches.run(memory.lengths, device, memory)
    assert sorted(i for batch in memory.done for i in batch) == list(range(len(memory.lengths)))


@pytest.mark.parametrize("tokens", [1, 9, 10, 18, 27, 1000])
def test_batches_stay_below_the_bound_and_are_of_like_length(tokens: int) -> None:
    memory = Memory(LENGTHS, limit=max(tokens, 9))
    run(MicroBatches(tokens), memory)
    lengths = [LENGTHS[i] for batch in memory.done for i in batch]
    assert lengths == sorted(LENGTHS, reverse=True)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_halves_until_it_fits_and_remembers(error: Exception) -> None:
    batches = MicroBatches()
    memory = Memory([10] * 100, limit=130, error=error)
    run(batches, memory)
    assert memory.requested[:4] == [1000, 500, 250, 120]
    again = Memory([10] * 100, limit=130)
    run(batches, again)
    assert max(again.requested) == 120


@pytest.mark.parametrize(
    ("tokens", "limit", "message"),
    [
        (None, 8, r"batch size 1 and sequence length 9 does not fit.*Use a smaller LM"),
        # Under a sharded LM, ranks that changed it on their own would wait for each other for ever.
        (20, 10, r"batch size 2 .* Lower lm\.tokens_per_forward \(it is 20\)"),
    ],
)
def test_what_does_not_fit(tokens: int | None, limit: int, message: str) -> None:
    with pytest.raises(LanguageModelError, match=message):
        run(MicroBatches(tokens), Memory(LENGTHS, limit))


def test_other_errors_pass_and_there_may_be_nothing_to_do() -> None:
    with pytest.raises(RuntimeError, match="something else"):
        run(MicroBatches(), Memory(LENGTHS, limit=1, error=RuntimeError("something else")))
    run(MicroBatches(), Memory([], limit=1))
