"""What the feature-flow study measures on texts: groups, transitions, deactivation, steering."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from lincorr_lightning.flow.activity import FeatureActivity
from lincorr_lightning.flow.deactivation import (
    METHODS,
    Cases,
    Cut,
    Outcomes,
    find_cases,
    predecessors_by_method,
    run_cuts,
    summarize_outcomes,
)
from lincorr_lightning.flow.graph import GROUPS, Feature, FlowGraph
from lincorr_lightning.flow.groups import FeatureGroups
from lincorr_lightning.flow.matcher import DecoderMatcher
from lincorr_lightning.flow.matching import (
    carry_features,
    explained_variance,
    match_features,
    transition_matrix,
)
from lincorr_lightning.flow.results import (
    CutEffect,
    LayerGroups,
    SteeringPoint,
    Transition,
)
from lincorr_lightning.flow.settings import DeactivationSettings, SteeringSettings
from lincorr_lightning.flow.steering import (
    amounts,
    answer_probability,
    score,
    steering_weights,
    text_loss,
)
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.results.numbers import number
from lincorr_lightning.sae.forwards import Forward, run_with_hooks
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.interventions import add_features
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder

_N_BINS = 20
_TRANSITION_TOKENS = 2048
TRANSITION_K = (1, 2, 5, 10, 20)

SAEs = Mapping[HookPoint, SparseAutoencoder]
Rows = Sequence[Sequence[int]]


class TextPass:
    """One pass over texts, batch by batch: groups, activity, and a sample of activations.

    Args:
        lm: The LM, loaded.
        saes: At its places, on its device.
        flow: Their decoders.
    """

    def __init__(self, lm: LanguageModel, saes: SAEs, flow: DecoderMatcher) -> None:
        self._lm = lm
        self._saes = saes
        self._matches = {
            hook_point: flow.match(hook_point)
            for hook_point in flow.hook_points
            if flow.predecessors(hook_point)
        }
        self.groups = {
            hook_point: FeatureGroups(hook_point, m) for hook_point, m in self._matches.items()
        }
        self.activity = {
            hook_point: FeatureActivity(sae.n_features) for hook_point, sae in saes.items()
        }
        self.n_texts = 0
        self._sample: dict[HookPoint, list[Tensor]] = {hook_point: [] for hook_point in saes}

    @property
    def n_tokens(self) -> int:
        """Tokens seen."""
        return next(iter(self.activity.values())).n_tokens

    @property
    def sample(self) -> dict[HookPoint, Tensor]:
        """Activations of the first tokens at each place, ``(n, width)``."""
        return {hook_point: torch.cat(parts) for hook_point, parts in self._sample.items()}

    def update(self, rows: Rows, n_skipped: int = 0) -> None:
        """Read some texts.

        Args:
            rows: Their token ids.
            n_skipped: Tokens at the beginning of each that do not count.
        """
        self.n_texts += len(rows)
        run_with_hooks(
            self._lm,
            rows,
            lambda forward: self._look(forward, forward.counted(n_skipped)),
            hook_points=list(self._saes),
        )

    def _look(self, forward: Forward, counted: Tensor) -> None:
        missing = _TRANSITION_TOKENS - self.n_tokens
        features = {}
        for hook_point, sae in self._saes.items():
            x = forward.at[hook_point][counted]
            features[hook_point] = sae.encode(x)
            if missing > 0:
                self._sample[hook_point].append(x[:missing].float().cpu())
        for groups in self.groups.values():
            groups.update(features)
        predicted = forward.logits.argmax(-1)
        for hook_point, activity in self.activity.items():
            activity.update(features[hook_point], forward.ids, counted, predicted)

    def layers(self) -> list[LayerGroups]:
        """What the counts say, by layer."""
        layers = []
        for hook_point, groups in self.groups.items():
            joint = {kind: groups.joint_activation(kind, _N_BINS)[0] for kind in groups.kinds}
            matches = self._matches[hook_point]
            zero = {hook_point.id: next(iter(matches.values())).n_zero_targets}
            zero |= {source.id: found.n_zero_sources for source, found in matches.items()}
            layers.append(
                LayerGroups(
                    layer=hook_point.layer,
                    n_activations=int(groups.counts.sum()),
                    shares=groups.shares(),
                    auroc={kind: number(groups.auroc(kind)) for kind in groups.kinds},
                    histograms={
                        kind: dict(
                            zip(GROUPS, groups.histogram(kind, _N_BINS).tolist(), strict=True)
                        )
                        for kind in groups.kinds
                    },
                    joint={k: [number(v) for v in each.tolist()] for k, each in joint.items()},
                    zero_norm=zero,
                )
            )
        return layers


@torch.no_grad()
def measure_transitions(
    saes: SAEs, flow: DecoderMatcher, sample: Mapping[HookPoint, Tensor]
) -> list[Transition]:
    """Carry each predecessor's features to the next stream, and see what they explain there.

    Args:
        saes: At the LM's places.
        flow: Their decoders.
        sample: Activations of the same tokens at each place, ``(n, width)``.
    """
    found = []
    for target in flow.hook_points:
        for source in flow.predecessors(target):
            to, of = saes[target], saes[source]
            x = sample[target].to(to.decoder.device)
            features = of.encode(sample[source].to(of.decoder.device))
            own = number(explained_variance(x, to(x)))
            for compared in ("decoder", "encoder"):
                matches = match_features(
                    getattr(to, compared), getattr(of, compared), max(TRANSITION_K)
                )
                for k in TRANSITION_K:
                    t = transition_matrix(matches.indices[:, :k], of.n_features)
                    carried = to.decode(carry_features(features, t))
                    explained = number(explained_variance(x, carried))
                    found.append(
                        Transition(
                            str(source), str(target), source.kind, compared, k, explained, own
                        )
                    )
    return found


@torch.no_grad()
def measure_cuts(
    lm: LanguageModel,
    saes: SAEs,
    flow: DecoderMatcher,
    rows: Rows,
    groups: FeatureGroups,
    settings: DeactivationSettings,
    generator: torch.Generator,
    n_skipped: int = 0,
) -> list[CutEffect]:
    """Cut the predecessors of one layer's features in every way there is, beside the control.

    Args:
        lm: The LM, loaded.
        saes: At its places.
        flow: Their decoders.
        rows: Token ids of texts.
        groups: Of the layer.
        settings: How.
        generator: Draws cases and controls.
        n_skipped: Tokens at the beginning of each text that do not count.
    """
    cases = find_cases(lm, saes, rows, groups, settings.n_cases, generator, n_skipped)
    if not len(cases):
        return []
    cuts: list[Cut] = [({}, 1.0)]
    told: list[tuple[str, str, str, float]] = []  # method, matched or random, sources, r
    methods = predecessors_by_method(flow, groups.hook_point)
    for method in METHODS:
        chosen = {
            hook_point: index.cpu()[cases.features] for hook_point, index in methods[method].items()
        }
        control = cases.control(chosen, generator)
        for r, (cut, features) in product(
            settings.strengths, (("matched", chosen), ("random", control))
        ):
            cuts.append((features, r))
            told.append((method, cut, "all", r))
        if method == METHODS[0] and len(chosen) > 1:
            # One of several joint predecessors alone: circuits that can do without it show here.
            least = min(settings.strengths)
            for hook_point, (cut, features) in product(
                chosen, (("matched", chosen), ("random", control))
            ):
                cuts.append(({hook_point: features[hook_point]}, least))
                told.append((method, cut, hook_point.kind, least))
    doing = f"Cutting predecessors of layer {groups.hook_point.layer}"
    with progress_bar(doing, len(cuts) * len(cases), "text") as bar:
        before, *after = run_cuts(lm, saes, rows, cases, cuts, bar.update)
    effects = _Effects(cases, before)
    for outcomes, what in zip(after, told, strict=True):
        effects.add(outcomes, *what)
    return effects.rows


def progress_bar(doing: str, total: int, unit: str) -> tqdm[Any]:
    """A bar that is silent where no terminal shows it.

    Args:
        doing: What takes time.
        total: How many there are.
        unit: Of what.
    """
    return tqdm(total=total, desc=doing, unit=unit, disable=None, leave=False)


class _Effects:
    """Rows of the table, as they are found."""

    def __init__(self, cases: Cases, before: Outcomes) -> None:
        self.rows: list[CutEffect] = []
        self._cases = cases
        self._before = before

    def add(self, after: Outcomes, method: str, cut: str, sources: str, r: float) -> None:
        present = sorted(set(self._cases.groups.tolist()))
        which: dict[str, Tensor | None] = {"all": None}
        which |= {GROUPS[code]: self._cases.groups == code for code in present}
        for group, mask in which.items():
            effect = summarize_outcomes(self._before, after, mask)
            if effect is not None:
                layer = self._cases.hook_point.layer
                self.rows.append(CutEffect(layer, method, cut, sources, r, group, *effect))


class SteeredAnswer(NamedTuple):
    """An answer to steer towards.

    Attributes:
        label: As people read it.
        token_id: Its token.
        graph: Flow graph of the feature that carries it.
        prompts: Token ids of prompts whose answer is another one.
    """

    label: str
    token_id: int
    graph: FlowGraph
    prompts: Rows


def measure_steering(
    lm: LanguageModel,
    saes: SAEs,
    activity: Mapping[HookPoint, FeatureActivity],
    answers: Sequence[SteeredAnswer],
    texts: Rows,
    settings: SteeringSettings,
) -> list[SteeringPoint]:
    """Steer towards each answer at every strength, by every strategy.

    Args:
        lm: The LM, loaded.
        saes: At its places.
        activity: Of their features; it says what a typical activation is.
        answers: Towards what.
        texts: Token ids of other texts.
        settings: How.
    """
    points = []
    loss_before = text_loss(lm, texts)
    total = len(answers) * len(settings.strategies) * len(settings.strengths)
    bar = progress_bar("Steering", total, "strength")
    for answer in answers:
        start = answer.graph.start
        unsteered = answer_probability(lm, answer.prompts, answer.token_id)
        # Two strategies may add the same, as linear and exponential do where all is near.
        known: dict[frozenset[tuple[Feature, float]], tuple[float, float]] = {}
        for strategy, strength in product(settings.strategies, settings.strengths):
            weights = steering_weights(answer.graph, strategy, settings.decay)
            typical = {f: float(activity[f.hook_point].mean[f.index]) for f in weights}
            added = amounts(weights, strength, typical)
            key = frozenset((feature, amount) for feature, amount in added.items() if amount)
            if not key:
                known[key] = unsteered, loss_before
            if key not in known:
                edits = add_features(saes, added)
                behaviour = answer_probability(lm, answer.prompts, answer.token_id, edits)
                known[key] = behaviour, text_loss(lm, texts, edits)
            behaviour, loss = known[key]
            points.append(
                SteeringPoint(
                    answer.label, start.id, strategy, strength, len(weights),
                    *score(behaviour, loss, loss_before),
                )
            )  # fmt: skip
            bar.update()
    bar.close()
    return points


def name_features(
    lm: LanguageModel, activity: Mapping[HookPoint, FeatureActivity], features: Sequence[Feature]
) -> dict[str, str]:
    """What to call features: the last word where each is most active, and what comes next.

    Args:
        lm: The LM.
        activity: Of the features of each place.
        features: Which.

    Returns:
        Feature's id -> ``… word → next word``; features that are never active are left out.
    """
    names = {}
    for feature in features:
        peak = activity[feature.hook_point].peak(feature.index)
        if peak is not None:
            texts = lm.tokenizer.batch_decode([peak.context[-2:], [peak.predicted]])
            names[feature.id] = " → ".join(text.strip() for text in texts)
    return names
