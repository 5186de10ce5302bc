"""Joint rows are those that the LM gives now, read once for everything that was announced."""

import numpy as np
import pytest
import torch

from lincorr_lightning import LanguageModel
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.linear_map.layout import JointLayout, RowReader
from tests.probe.test_module import read_alone
from tests.toys import recorded_passes

SUBJECTS = ["name1", "name2", "name3"]


@pytest.fixture
def lm(small_lm):
    return LanguageModel.from_pretrained(small_lm)


@pytest.fixture
def layouts(lm):
    names = ("city->country", "city->color", "country->city")
    catalogue = Catalogue.load()
    return [
        JointLayout.of_relation(TokenizedRelation.of(n, catalogue, lm.tokenizer)) for n in names
    ]


def by_hand(lm, layout):
    """One prompt at a time, all logits, sliced."""
    rows = [
        read_alone(lm, [one.knowledge.template.format(x) for x in SUBJECTS], one.token_ids)
        for one in layout.domains.values()
    ]
    return torch.from_numpy(np.hstack(rows))


def test_rows_of_all_announced_layouts_come_from_one_pass(lm, layouts, monkeypatch):
    passes = recorded_passes(monkeypatch)
    reader = RowReader(lm)
    for layout in layouts[:2]:
        reader.announce(layout, SUBJECTS)
    for layout in layouts:  # the third has the domains of the first, in another order
        torch.testing.assert_close(
            reader.read(layout, SUBJECTS), by_hand(lm, layout), atol=1e-5, rtol=0
        )
    # Other subjects, and what was not announced, are read, too.
    reader.read(layouts[0], SUBJECTS[:2])
    reader.read(layouts[1], SUBJECTS[:2])
    assert [(len(read), len(read[0])) for read in passes] == [(3, 3), (2, 2), (1, 2)]
