"""Trees of prompts against the prompts themselves."""

import random

import pytest
import torch

from lincorr_lightning.lm.shared_prefixes import PromptTree, grow_trees, pack_trees

CPU = torch.device("cpu")


def paths(tree: PromptTree) -> dict[int, list[int]]:
    """Each prompt, read from its end up to the root."""
    found = {}
    for index, node in tree.ends:
        row = []
        while node >= 0:
            row.append(tree.token_ids[node])
            node = tree.parents[node]
        found[index] = row[::-1]
    return found


def beginnings(rows: list[list[int]]) -> int:
    return len({tuple(row[: i + 1]) for row in rows for i in range(len(row))})


def random_rows(seed: int, n: int = 30) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(3) for _ in range(chance.randint(1, 6))] for _ in range(n)]


@pytest.mark.parametrize("seed", range(5))
def test_one_tree_holds_every_prompt_and_each_beginning_once(seed: int) -> None:
    rows = random_rows(seed)
    (tree,) = grow_trees(dict(enumerate(rows)))
    assert paths(tree) == dict(enumerate(rows))
    assert len(tree.token_ids) == beginnings(rows)
    assert all(parent < node for node, parent in enumerate(tree.parents))


@pytest.mark.parametrize("most", [1, 4, 9, 30])
def test_trees_are_cut_at_their_bound_and_lose_nothing(most: int) -> None:
    rows = random_rows(0)
    trees = list(grow_trees(dict(enumerate(rows)), most))
    found = {index: row for tree in trees for index, row in paths(tree).items()}
    assert found == dict(enumerate(rows))
    assert sum(len(tree.ends) for tree in trees) == len(rows)
    for tree in trees:
        assert len(tree.token_ids) <= max(most, *(len(rows[index]) for index, _ in tree.ends))


def test_duplicates_end_at_one_node_and_a_prompt_may_end_within_another() -> None:
    (tree,) = grow_trees({7: [5, 6, 8], 2: [5, 6], 4: [5, 6, 8], 1: [9]})
    assert tree.token_ids == [5, 6, 8, 9]
    assert tree.parents == (-1, 0, 1, -1)
    assert sorted(tree.ends) == [(1, 3), (2, 1), (4, 2), (7, 2)]
    assert list(grow_trees({})) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_node_sees_its_ancestors_and_has_its_depth(dtype: torch.dtype) -> None:
    trees = [t for seed in (3, 4, 5) for t in grow_trees(dict(enumerate(random_rows(seed, 8))))]
    batch = pack_trees(trees, 99, dtype, CPU)
    length = max(len(tree.token_ids) for tree in trees)
    assert batch["input_ids"].shape == batch["position_ids"].shape == (3, length)
    assert batch["attention_mask"].shape == (3, 1, length, length)
    assert batch["attention_mask"].dtype == dtype
    assert set(batch["attention_mask"].unique().tolist()) == {0.0, torch.finfo(dtype).min}
    for row, tree in enumerate(trees):
        for node in range(length):
            sees = set((batch["attention_mask"][row, 0, node] == 0).nonzero()[:, 0].tolist())
            if node >= len(tree.token_ids):
                assert sees == {node} and batch["input_ids"][row, node] == 99
                continue
            expected, up = set(), node
            while up >= 0:
                expected.add(up)
                up = tree.parents[up]
            assert sees == expected
            assert batch["position_ids"][row, node] == len(expected) - 1
            assert batch["input_ids"][row, node] == tree.token_ids[node]


def test_trees_of_one_shape_have_one_mask() -> None:
    trees = [next(grow_trees({0: [x, 5], 1: [x, 6]})) for x in (3, 4)]
    same = pack_trees(trees, 0, torch.float32, CPU)
    assert same["attention_mask"].stride(0) == 0
    assert same["input_ids"].tolist() == [[3, 5, 6], [4, 5, 6]]
