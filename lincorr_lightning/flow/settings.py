"""Settings of the feature-flow study's measurements."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lincorr_lightning.errors import ConfigError
from lincorr_lightning.flow.steering import STRATEGIES, Strategy


@dataclass(frozen=True)
class DeactivationSettings:
    """How predecessors are cut."""

    n_cases: int = 2000
    """Features at tokens that are tested in each layer; 0 leaves the test out."""

    strengths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75)
    """What is left of the predecessors, r: 0 removes them."""

    def __post_init__(self) -> None:
        """Refuse what no test can be."""
        known = all(math.isfinite(r) and r >= 0 for r in self.strengths)
        once = len(set(self.strengths)) == len(self.strengths) > 0
        if self.n_cases < 0 or not known or not once:
            raise ConfigError(
                f"model.deactivation has n_cases {self.n_cases} and strengths "
                f"{list(self.strengths)}; n_cases must be at least 0, and strengths, what is left "
                "of the predecessors, at least one number, each once and at least 0, such as "
                "[0.0, 0.5]."
            )


@dataclass(frozen=True)
class SteeringSettings:
    """How the LM is steered."""

    n_answers: int = 4
    """Answers that are steered towards; 0 leaves steering out."""

    strengths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    """How much is added, in typical activations of each feature."""

    strategies: tuple[Strategy, ...] = STRATEGIES
    """How strength falls along the flow."""

    decay: float = 0.5
    """Of exponential, for each step."""

    n_prompts: int = 64
    """Prompts whose answer is another one."""

    n_texts: int = 128
    """Texts whose perplexity is the coherence."""

    def __post_init__(self) -> None:
        """Refuse what no steering can be."""
        unknown = set(self.strategies) - set(STRATEGIES)
        if unknown or not self.strategies:
            raise ConfigError(
                f"model.steering.strategies is {list(self.strategies)}; choose some of "
                f"{', '.join(STRATEGIES)}."
            )
        if not self.strengths or not all(map(math.isfinite, self.strengths)):
            raise ConfigError(
                f"model.steering.strengths is {list(self.strengths)}; give at least one number, "
                "such as [0.0, 1.0]."
            )
        least = {"n_answers": 0, "n_prompts": 1, "n_texts": 1}
        if not 0 < self.decay <= 1 or any(getattr(self, name) < n for name, n in least.items()):
            raise ConfigError(
                f"model.steering has n_answers {self.n_answers}, decay {self.decay}, n_prompts "
                f"{self.n_prompts} and n_texts {self.n_texts}; decay is above 0 and at most 1, "
                "n_answers at least 0, the others at least 1."
            )
