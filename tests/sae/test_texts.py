"""Texts as they are dealt out, counted by hand."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lincorr_lightning.data.texts import SAID, TextsDataModule, pad_rows
from lincorr_lightning.data.tiny_world.world import World
from lincorr_lightning.errors import ConfigError, SubjectsError
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.hooks import captured
from lincorr_lightning.sae.scoring import read_activations

LINES = [f"name{i} lives in the city of {'Paris ' * (i % 4)}name{(7 * i) % 60}" for i in range(60)]
SMALL = {"n_tokens": 600, "batch_tokens": 40, "block_steps": 3, "n_held_out": 10}


@pytest.fixture(scope="module")
def lm(small_lm: str) -> LanguageModel:
    return LanguageModel.from_pretrained(small_lm)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("\n".join([*LINES, "", LINES[0]]) + "\n", encoding="utf-8")
    return str(path)


def _data(lm: LanguageModel, file: str, **changes: Any) -> TextsDataModule:
    data = TextsDataModule([file], **SMALL | changes)
    data.prepare(lm)
    data.train_dataloader()
    return data


def test_blocks_hold_every_text_once_an_epoch_and_enough_tokens(
    lm: LanguageModel, file: str
) -> None:
    data = _data(lm, file)
    words = {tuple(row) for row in lm.tokenizer(LINES)["input_ids"]}
    blocks = data.blocks()
    assert blocks.n_blocks == 5
    assert len(blocks) == 15
    dealt = [tuple(row) for block in range(5) for row in data.rows_of(block)]
    assert set(dealt) <= words
    n_train = data.n_texts - SMALL["n_held_out"]
    assert data.n_texts == len(LINES)  # the line that is there twice counts once
    for epoch in range(len(dealt) // n_train):
        assert len(set(dealt[epoch * n_train : (epoch + 1) * n_train])) == n_train
    for block in range(5):
        sizes = [len(row) for row in data.rows_of(block)]
        assert sum(sizes) >= 120 > sum(sizes[:-1])
    held_out = [
        tuple(row[m.bool()].tolist())
        for batch in data.val_dataloader()
        for row, m in zip(batch.input_ids, batch.attention_mask, strict=True)
    ]
    assert len(held_out) == 10
    assert set(held_out) == words - set(dealt)


def test_processes_share_the_blocks(lm: LanguageModel, file: str) -> None:
    data = _data(lm, file)
    steps = [[data.blocks(rank, 2)[i] for i in range(6)] for rank in range(2)]
    assert [(s.block, s.index) for s in steps[0]] == [(b, i) for b in (0, 2) for i in range(3)]
    assert [(s.block, s.index) for s in steps[1]] == [(b, i) for b in (1, 3) for i in range(3)]
    assert len(data.blocks(0, 2)) == len(data.blocks(1, 2)) == 6
    with pytest.raises(ConfigError, match="5 blocks of 120 tokens for 6 processes"):
        data.blocks(0, 6)


def test_long_texts_are_cut_and_beginnings_skipped(lm: LanguageModel, file: str) -> None:
    data = _data(lm, file, max_length=4, skip_tokens=1, n_tokens=240)
    rows = [row for block in range(2) for row in data.rows_of(block)]
    assert {len(row) for row in rows} <= {2, 3, 4}
    batch = pad_rows([[5, 6, 7], [8, 9]], 1)
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.counted.tolist() == [[False, True, True], [False, True, False]]


def test_activations_are_those_of_each_text_alone(lm: LanguageModel) -> None:
    hook_points = [HookPoint(0, "mlp_out"), HookPoint(1, "residual")]
    rows = lm.rows(LINES[:9])
    total = sum(len(row) - 2 for row in rows)
    out = torch.full((2, total - 3, 16), torch.nan)

    def batches(lengths: list[int], device: str, ask: Any) -> None:
        assert lengths == [len(row) for row in rows]
        for part in ([8, 0, 3], [1, 2, 4], [7, 6, 5]):
            ask(part)

    read_activations(lm.model, hook_points, rows, out, 2, batches)
    expected = []
    for row in rows:
        with captured(lm.model, hook_points) as read:
            lm.model(torch.tensor([row]))
        expected.append(torch.stack([read[hook_point][0, 2:] for hook_point in hook_points]))
    torch.testing.assert_close(out, torch.cat(expected, 1)[:, :-3], atol=1e-5, rtol=1e-5)


def test_files_of_all_kinds_and_the_tiny_world(tmp_path: Path, lm: LanguageModel) -> None:
    jsonl, table = tmp_path / "a.jsonl", tmp_path / "b.csv"
    jsonl.write_text("\n".join(json.dumps({"text": line}) for line in LINES[:30]))
    table.write_text("text\n" + "\n".join(LINES[30:]))
    data = TextsDataModule([str(jsonl), str(table)], **SMALL)
    data.prepare(lm)
    assert data.n_texts == len(LINES)

    world_lm = LanguageModel.from_pretrained("tiny-world")
    data = TextsDataModule(knowledges=["city", "X+1"], n_held_out=5)
    data.prepare(world_lm)
    folder = Path(__file__).resolve().parents[2] / "lincorr_lightning" / "lm" / "tiny_world"
    knowledges = Catalogue.load().select(["city", "X+1"])
    said = {f"{s.text}." for s in World.load(folder / "world.json").statements(knowledges)}
    assert data.n_texts == len(said)
    # Nothing that the LM was not trained on.
    import yaml

    config = (folder.parents[2] / "configs" / "pretraining.yaml").read_text()
    assert list(SAID) == yaml.safe_load(config)["data"]["init_args"]["knowledges"]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"n_held_out": 70},
            SubjectsError,
            r"60 different texts.*= 70 takes 60: 0 tokens are left.*data\.texts.*data\.n_held_out",
        ),
        ({"batch_tokens": 600, "n_tokens": 6000}, SubjectsError, "a step alone takes 600"),
        ({"skip_tokens": 50}, SubjectsError, r"none of the 10 texts.*51 tokens.*data\.skip_tokens"),
        ({"n_tokens": 100}, ConfigError, "less than one block.*120"),
        ({"batch_tokens": 0}, ConfigError, "data.batch_tokens is 0"),
        ({"max_length": 1}, ConfigError, "data.max_length is 1"),
    ],
)
def test_too_little(
    lm: LanguageModel, file: str, changes: dict[str, int], error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        _data(lm, file, **changes)


def test_where_nothing_is_trained_all_texts_may_be_held_out(
    lm: LanguageModel, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr("lincorr_lightning.data.texts.rank_zero_info", told.append)
    data = TextsDataModule([file], n_held_out=70)  # batch_tokens as it stands, too
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        lightning_module=SimpleNamespace(language_model=lm), global_rank=0, world_size=1
    )
    for stage in ("validate", "test"):
        data.setup(stage)
    assert told == ["data.n_held_out is 70, but there are 60 different texts; all of them are read"]
    read = {
        tuple(row[mask.bool()].tolist())
        for batch in data.test_dataloader()
        for row, mask in zip(batch.input_ids, batch.attention_mask, strict=True)
    }
    assert read == {tuple(row) for row in lm.tokenizer(LINES)["input_ids"]}
    with pytest.raises(SubjectsError, match="0 tokens are left to train on"):
        data.setup("fit")

    # Fewer than there are: the very texts that training holds out.
    for_training, alone = _data(lm, file), TextsDataModule([file], **SMALL)
    alone.prepare(lm, trains=False)
    for ours, theirs in zip(for_training.val_dataloader(), alone.val_dataloader(), strict=True):
        assert ours.input_ids.tolist() == theirs.input_ids.tolist()


def test_bad_texts(tmp_path: Path, lm: LanguageModel) -> None:
    with pytest.raises(ConfigError, match=r"no world.json beside it. Name files"):
        TextsDataModule(**SMALL).prepare(lm)
    with pytest.raises(SubjectsError, match=r"missing.txt cannot be read"):
        TextsDataModule([str(tmp_path / "missing.txt")], **SMALL).prepare(lm)
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "a"}\n{"words": "b"}\n')
    with pytest.raises(SubjectsError, match=r'bad.jsonl, line 2: an object with a "text"'):
        TextsDataModule([str(path)], **SMALL).prepare(lm)
    data = TextsDataModule([str(path)], **SMALL)
    data.trainer = SimpleNamespace(lightning_module=torch.nn.Linear(1, 1))  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="model is Linear"):
        data.setup()
