"""Which target is taught with which source."""

from collections import Counter

import numpy as np
import pytest

from lincorr_lightning.ablation.mappings import map_labels, pair_labels
from lincorr_lightning.errors import SubjectsError
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation


def target_text(pairs, i):
    return pairs.relation.target.texts[pairs.targets[i]]


def test_each_source_has_a_target_of_its_own_while_there_are(world_tokenizer):
    relation = TokenizedRelation.of("city->country", Catalogue.load(), world_tokenizer)
    countries = {
        int(np.flatnonzero(column)[0]) for column in relation.reference_mask.T if column.any()
    }
    few = pair_labels(relation, 12, seed=3)
    assert len(few.sources) == 12
    assert len(set(few.targets)) == 12
    many = pair_labels(relation, len(countries) + 5, seed=3)
    assert len(set(many.targets)) == len(countries)
    assert all(
        relation.reference_mask[t, s] for s, t in zip(many.sources, many.targets, strict=True)
    )
    assert pair_labels(relation, 12, seed=4).sources != few.sources


def test_a_permuted_target_is_always_wrong(world_tokenizer):
    for name in ("city->country", "country->continent"):
        pairs = pair_labels(TokenizedRelation.of(name, Catalogue.load(), world_tokenizer))
        true = map_labels(pairs, "reference", world_tokenizer)
        seen = set()
        for seed in range(5):
            mixed = map_labels(pairs, "permuted", world_tokenizer, seed)
            assert mixed.source_tokens == true.source_tokens
            assert Counter(mixed.target_tokens) == Counter(true.target_tokens)
            assert mixed.domain_tokens == true.domain_tokens
            column = {token: i for i, token in enumerate(true.domain_tokens)}
            taught = [column[token] for token in mixed.target_tokens]
            rows = range(len(taught))
            assert not true.reference[rows, taught].any()  # no fixed point in the reference
            assert mixed.reference[rows, taught].all()
            seen.add(mixed.target_tokens)
        assert len(seen) > 1


def test_permuted_targets_are_the_same_for_all_sources_of_a_target(world_tokenizer):
    for name in ("city->country", "country->continent"):
        pairs = pair_labels(TokenizedRelation.of(name, Catalogue.load(), world_tokenizer))
        relation, seen = pairs.relation, set()
        texts = dict(zip(relation.target.token_ids, relation.target.texts, strict=True))
        for seed in range(4):
            mixed = map_labels(pairs, "permuted_targets", world_tokenizer, seed)
            taught = {}
            for i, token in enumerate(mixed.target_tokens):
                taught.setdefault(target_text(pairs, i), set()).add(texts[token])
                good = np.flatnonzero(relation.reference_mask[:, pairs.sources[i]])
                assert texts[token] not in {relation.target.texts[j] for j in good}
                assert mixed.reference[i, mixed.domain_tokens.index(token)]
                assert mixed.reference[i].sum() == pairs.reference[i].sum()
            assert all(len(each) == 1 for each in taught.values())
            assert set.union(*taught.values()) == set(taught)  # a permutation
            seen.add(mixed.target_tokens)
        assert len(seen) > 1


def test_targets_have_few_sources(world_tokenizer):
    most = 3
    relation = TokenizedRelation.of("country->continent", Catalogue.load(), world_tokenizer)
    every, few = pair_labels(relation, seed=2), pair_labels(relation, None, 2, most)
    counts = Counter(every.targets)
    assert max(counts.values()) > most
    assert Counter(few.targets) == {target: min(n, most) for target, n in counts.items()}
    assert pair_labels(relation, None, 3, most).sources != few.sources
    with pytest.raises(SubjectsError, match=r"raise data\.max_sources_per_target"):
        pair_labels(relation, len(few) + 1, 2, most)


def test_letters_are_the_first_of_both_answers(world_tokenizer):
    pairs = pair_labels(
        TokenizedRelation.of("city->country", Catalogue.load(), world_tokenizer), 15
    )
    cut = map_labels(pairs, "letters", world_tokenizer)
    words = world_tokenizer.convert_ids_to_tokens
    for i in range(15):
        assert words(cut.source_tokens[i]) == pairs.relation.source.texts[pairs.sources[i]][0]
        assert words(cut.target_tokens[i]) == target_text(pairs, i)[0]
        right = [
            words(t) for t, yes in zip(cut.domain_tokens, cut.reference[i], strict=True) if yes
        ]
        assert right == [target_text(pairs, i)[0]]
