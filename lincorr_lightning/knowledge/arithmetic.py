"""The math family: prompts ``X+1`` to ``X/4``, whose answers and references are computed."""

import operator
from collections.abc import Callable
from fractions import Fraction

from lincorr_lightning.knowledge.schema import Answer, Knowledge

KIND = "number"  #: Kind of entity of every answer in this family.
OPERANDS = range(1, 5)  #: Second operand N of ``X+N`` (paper, table 12).
NUMBERS = range(11)  #: Answers (paper, table 12: a domain of eleven).

# Operation and inverse by symbol.
_OPERATIONS: dict[str, tuple[Callable[[Fraction, int], Fraction], ...]] = {
    "+": (operator.add, operator.sub),
    "-": (operator.sub, operator.add),
    "*": (operator.mul, operator.truediv),
    "/": (operator.truediv, operator.mul),
}


def arithmetic_knowledge() -> tuple[Knowledge, ...]:
    """Return the math family: ``X+1`` to ``X+4``, then the same with ``-``, ``*`` and ``/``."""
    answers = tuple(Answer(str(number), str(number)) for number in NUMBERS)
    names = [f"X{symbol}{operand}" for symbol in _OPERATIONS for operand in OPERANDS]
    return tuple(
        Knowledge(name, "math", "en", f"{{}}{name[1:]}=", KIND, answers, False, paper_size=11)
        for name in names
    )


def calculate(name: str, x: Fraction) -> Fraction:
    """Return the exact answer of a prompt, such as ``X+1``, for a number."""
    return _OPERATIONS[name[1]][0](x, int(name[2:]))


def arithmetic_reference(source: str, target: str) -> dict[str, frozenset[str]]:
    """Return the target answer that follows from each source answer.

    The source answer determines X, and X determines the target answer. X may be any number (3 is
    the answer of ``X*2`` for X = 1.5); source answers whose target answer is not a whole number
    from 0 to 10 are left out.
    """
    solve = _OPERATIONS[source[1]][1]
    operand = int(source[2:])
    results = {n: calculate(target, solve(Fraction(n), operand)) for n in NUMBERS}
    return {str(n): frozenset({str(x)}) for n, x in results.items() if x in NUMBERS}
