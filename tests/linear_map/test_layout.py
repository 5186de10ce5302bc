"""Joint rows are those that the LM gives now, read once for everything that was announced."""

import numpy as np

from lincorr_lightning import LanguageModel
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.linear_map.layout import JointLayout, RowReader
from tests.probe.test_module import read_alone
from tests.toys import recorded_passes

SUBJECTS = ["name1", "name2", "name3"]


def test_rows_of_all_announced_layouts_come_from_one_pass(small_lm, monkeypatch):
    lm, catalogue = LanguageModel.from_pretrained(small_lm), Catalogue.load()
    layouts = [
        JointLayout.of_relation(TokenizedRelation.of(name, catalogue, lm.tokenizer))
        for name in ("city->country", "city->color", "country->city")
    ]
    passes = recorded_passes(monkeypatch)
    reader = RowReader(lm)
    for layout in layouts[:2]:
        reader.announce(layout, SUBJECTS)
    for layout in layouts:  # the third has the domains of the first, in another order
        alone = [
            read_alone(lm, [one.knowledge.template.format(x) for x in SUBJECTS], one.token_ids)
            for one in layout.domains.values()
        ]
        found = reader.read(layout, SUBJECTS).numpy()
        np.testing.assert_allclose(found, np.hstack(alone), atol=1e-5, rtol=0)
    # Other subjects, and what was not announced, are read, too.
    reader.read(layouts[0], SUBJECTS[:2])
    reader.read(layouts[1], SUBJECTS[:2])
    assert [(len(read), len(read[0])) for read in passes] == [(3, 3), (2, 2), (1, 2)]
