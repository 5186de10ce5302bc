from collections import Counter
from itertools import product

import numpy as np
import pytest

from lincorr_lightning.data.tiny_world.world import BalancedDraw


def test_every_option_is_drawn_equally_often_for_every_fact():
    rng = np.random.default_rng(0)
    draw = BalancedDraw(rng)
    seen = Counter()
    for i in rng.permutation(360):
        facts = {"sport": f"sport {i % 3}", "pet": f"pet {i // 3 % 4}"}
        drawn = draw.draw(["north", "south", "east"], facts)
        seen.update((drawn, value) for value in facts.values())
    for place, (name, n) in product(("north", "south", "east"), (("sport", 3), ("pet", 4))):
        for k in range(n):
            assert seen[place, f"{name} {k}"] == pytest.approx(120 / n, abs=3)
