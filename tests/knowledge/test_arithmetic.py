"""The math family, against Python's own arithmetic."""

import pytest

from lincorr_lightning.knowledge.arithmetic import arithmetic_knowledge, arithmetic_reference

NAMES = [f"X{operator}{n}" for operator in "+-*/" for n in range(1, 5)]


def test_sixteen_prompts():
    kinds = arithmetic_knowledge()
    assert [knowledge.name for knowledge in kinds] == NAMES
    for knowledge in kinds:
        assert knowledge.template == "{}" + knowledge.name[1:] + "="
        assert [answer.text for answer in knowledge.answers] == [str(n) for n in range(11)]
        assert not knowledge.leading_space
        assert (knowledge.family, knowledge.language) == ("math", "en")


@pytest.mark.parametrize("source", NAMES)
def test_references_by_trying_every_subject(source):
    """Ask both queries of every X in steps of 1/12, which covers every N, and compare."""
    for target in NAMES:
        expected = {}
        for twelfths in range(-10 * 12, 60 * 12):
            # X in twelfths, everything times 12, so that all stays whole numbers.
            given, follows = (calculate(name, twelfths) for name in (source, target))
            if given in range(0, 121, 12) and follows in range(0, 121, 12):
                expected[str(given // 12)] = {str(follows // 12)}
        assert arithmetic_reference(source, target) == expected


def calculate(name, twelfths):
    operator, n = name[1], int(name[2])
    if operator == "/":
        return twelfths // n if twelfths % n == 0 else None
    return {"+": twelfths + 12 * n, "-": twelfths - 12 * n, "*": twelfths * n}[operator]
