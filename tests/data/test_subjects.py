from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from lincorr_lightning.data.subjects import SubjectsDataModule
from lincorr_lightning.errors import SubjectsError


def _set_up(small_lm: str, rank: int = 0, world: int = 1, **options: Any) -> SubjectsDataModule:
    lm: Any = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(small_lm))
    data = SubjectsDataModule(lm, **options)
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        lightning_module=None, global_rank=rank, world_size=world
    )
    data.setup("fit")
    return data


def _everything(data: SubjectsDataModule) -> list[str]:
    return [*data.halves["fit"], *data.halves["test"]]


def test_halves_are_disjoint_seeded_and_complete(small_lm: str) -> None:
    data = _set_up(small_lm, n_subjects=101, fit_fraction=0.3, seed=5)
    assert (len(data.halves["fit"]), len(data.halves["test"])) == (30, 71)
    assert len(set(_everything(data))) == 101
    again = _set_up(small_lm, n_subjects=101, fit_fraction=0.3, seed=5)
    other = _set_up(small_lm, n_subjects=101, fit_fraction=0.3, seed=6)
    assert data.halves == again.halves != other.halves


@pytest.mark.parametrize("world", [2, 8])
def test_no_rank_is_left_without_a_batch(small_lm: str, world: int) -> None:
    """170 subjects a half: three batches of 64 at most, for up to eight ranks."""
    seen = []
    for rank in range(world):
        data = _set_up(small_lm, rank, world, n_subjects=340, batch_size=64)
        for loader in (data.train_dataloader(), data.val_dataloader()):
            (own, *others) = [batch for batch in loader if not batch.is_padding]
            assert not others if world >= 3 else len(others) <= 1
            seen += [own, *others]
    assert sorted(x for batch in seen for x in batch.subjects) == sorted(_everything(data))
    sizes = [len(batch.subjects) for batch in seen]
    assert len(sizes) == 2 * max(world, 3)
    assert max(sizes) - min(sizes) <= 1


def test_a_test_on_all_reads_the_fit_half_first(small_lm: str) -> None:
    data = _set_up(small_lm, n_subjects=111, batch_size=20, test_on="all")
    batches = list(data.test_dataloader())
    assert [batch.half for batch in batches] == ["fit"] * 3 + ["test"] * 3
    for half, members in data.halves.items():
        own = [batch for batch in batches if batch.half == half]
        assert [x for batch in own for x in batch.subjects] == members
        assert [members[batch.first] for batch in own] == [batch.subjects[0] for batch in own]
    held_out = _set_up(small_lm, n_subjects=111, batch_size=20)
    assert {batch.half for batch in held_out.test_dataloader()} == {"test"}


def test_subjects_of_a_file(small_lm: str, tmp_path: Path) -> None:
    path = tmp_path / "subjects.txt"
    path.write_text("\ufeffAda Lovelace\n\nAlan Turing\nGrace\n  Emmy \n", encoding="utf-8")
    data = _set_up(small_lm, subjects_file=str(path))
    assert set(_everything(data)) == {"Ada Lovelace", "Alan Turing", "Grace", "Emmy"}
    with pytest.raises(SubjectsError, match=r"has 4\. Set data.n_subjects to null, .* or to 4 at"):
        _set_up(small_lm, subjects_file=str(path), n_subjects=5)
    path.write_text("Ada\nAda\nAlan\nGrace\n", encoding="utf-8")
    with pytest.raises(SubjectsError, match=r"subjects_file .*line 2: 'Ada' is there twice"):
        _set_up(small_lm, subjects_file=str(path))
    with pytest.raises(SubjectsError, match=r"missing\.txt cannot be read"):
        _set_up(small_lm, subjects_file=str(tmp_path / "missing.txt"))


@pytest.mark.parametrize(("n", "fraction", "half"), [(3, 0.5, "test"), (20, 0.05, "fit")])
def test_too_few_in_a_half(small_lm: str, n: int, fraction: float, half: str) -> None:
    with pytest.raises(SubjectsError, match=f"in the {half} half; each half needs at least 2"):
        _set_up(small_lm, n_subjects=n, fit_fraction=fraction)
