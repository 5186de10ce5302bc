"""How well linear maps of one LM hold on another one (paper, section 4.2; figures 8, 9, 19-21)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lincorr_lightning.data.subjects import SubjectBatch, require_fit_half_first
from lincorr_lightning.errors import ConfigError, require
from lincorr_lightning.functional.significance import mean_interval, weight_cosine
from lincorr_lightning.io import number
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.knowledge.catalogue import split_names
from lincorr_lightning.linear_map import fitting
from lincorr_lightning.linear_map.artifact import LinearMap, require_same_labels
from lincorr_lightning.linear_map.baselines import beside_baselines
from lincorr_lightning.linear_map.fitting import Ridge
from lincorr_lightning.linear_map.layout import Pair, build_layout, domain_rows
from lincorr_lightning.linear_map.scores import PairScore, score_maps
from lincorr_lightning.linear_map.solver import FittedMaps, Solution, fit_layout
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.modes import dtype_name
from lincorr_lightning.probe.accumulation import HalfMoments
from lincorr_lightning.probe.results import Matrix, pair_matrices
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.table import Table, clean, percent, points, short_name
from lincorr_lightning.study import LMStudy, as_settings

_MIN_R = 0.2  # below this r a fraction of it means nothing
_MATRICES = (
    Matrix("after", "after", "The old map on the new LM"),
    Matrix(
        "kept",
        "kept",
        "Fraction of the refitted map's r that the old map keeps",
        f"fraction of r, where the refitted r is {_MIN_R:g} or more",
    ),
    Matrix(
        "after_std",
        "after_std",
        "The old map on the new LM, standard deviation of r over answers",
        "standard deviation of r",
        (0.0, 1.0),
    ),
)


_SHOWN = {
    "before": "",
    "after": "",
    "difference": "",
    "refitted": "",
    "kept": "",
    "random_label_mean": "after, random words",
    "random_kept": "kept, random words",
}
"""Numbers of a pair that tables show, and what they call them."""
# Numbers of the old map on the new LM that a pair has under their own names; those of a map that is
# fitted on the new LM itself begin with `refitted_`.
_FROM_OLD_MAP = (
    *("random_label_mean", "same_prompt_label_mean", "excess_over_random", "n_labels"),
    *("influenced_1", "macro_1", "gaussian_states_1", "gaussian_states_macro_1"),
)
_FROM_REFITTED_MAP = ("influenced_1", "macro_1")


class MapResilience(LMStudy):
    """Scores the maps of one LM on another, such as the same LM after post-training.

    ``lincorr test`` reads the new LM's logits for both halves of the subjects: on the held-out half
    the old maps are scored, beside maps that are fitted on the new LM's own fit half, and on their
    own LM, if that is read, too (`before`).

    Takes `SubjectBatch`, those of the fit half first: `SubjectsDataModule` with ``test_on: all``.

    Args:
        lm: The new LM.
        linear_map: Folder of the old maps, ``linear_map/`` of a probe; null fits some on `before`.
        before: The LM that the maps are from, which is read in the dtype of `lm`; null leaves it
            out. If maps of a folder were fitted in another dtype, the results have a warning: part
            of the change in r is due to precision.
        knowledge: Kinds of knowledge by name or family, where maps are fitted.
        pairs: Ordered pairs, as ``city->country``; null takes all of the folder or of `knowledge`.
        knowledge_files: YAML files with knowledge of your own.
        ridge: Penalty on ``|W|^2`` of maps that are fitted, see `Ridge`; ``auto`` chooses
            strengths on the old LM. The maps of a folder have their own. The maps of the new LM
            get the strengths of the old ones.
        random_labels: Number of source labels whose r is compared with that of as many random
            words. They need `before`, to fit maps on, and the same tokenizer; 0 leaves them out.
        prefix: Text before each prompt, such as examples; with `lm.chat_template`, the user's turn.
    """

    study = "resilience"
    batch_type = SubjectBatch
    shards_lm = True

    def __init__(
        self,
        lm: LMConfig = LMConfig(),
        linear_map: str | None = None,
        before: LMConfig | None = None,
        knowledge: list[str] | str = ["city", "country"],  # noqa: B006
        pairs: list[str] | str | None = None,
        knowledge_files: list[str] = [],  # noqa: B006
        ridge: Ridge = "auto",
        random_labels: int = 20,
        prefix: str = "",
    ) -> None:
        if linear_map is None and before is None:
            raise ConfigError(
                "there is no map to test: set model.linear_map to the linear_map/ folder of a "
                "probe's run, or model.before to the LM to fit maps on."
            )
        fitting.check_ridge(ridge)
        require("model.random_labels", random_labels, at_least=0)
        super().__init__(lm, prefix)
        self.save_hyperparameters()
        self.ridge = ridge
        self.random_labels = random_labels
        self.stored: LinearMap | None = None
        self._fitted_on: set[str] = set()
        wanted = None if pairs is None else split_names(pairs)
        if linear_map is not None:
            self.stored = LinearMap.from_pretrained(linear_map)
            self._fitted_on = fitting.read_fit_subjects(Path(linear_map).resolve().parent)
            wanted = wanted or self.stored.pairs
            for pair in wanted:
                self.stored.weight(pair)  # a LinearMapError if it has no such pair
        make_layout = partial(
            build_layout,
            catalogue=Catalogue.load(*knowledge_files),
            knowledge=split_names(knowledge),
            pairs=wanted,
            n_random=0 if before is None else random_labels,
        )
        self.layout = self.layout_before = make_layout(self.lm.tokenizer)
        self.before: LanguageModel | None = None
        if before is not None:
            dtype = dtype_name(self.lm.dtype)
            self.before = self.other_lm(replace(as_settings(LMConfig, before), dtype=dtype))
            self.layout_before = make_layout(self.before.tokenizer)
            words, words_before = (
                [one.tokenizer.convert_ids_to_tokens(tokens) for tokens in layout.words.values()]
                for one, layout in ((self.lm, self.layout), (self.before, self.layout_before))
            )
            if words != words_before:
                self.layout = replace(self.layout, words={})
                self.layout_before = replace(self.layout_before, words={})
            labels_before, labels = (
                {name: one.texts for name, one in layout.domains.items()}
                for layout in (self.layout_before, self.layout)
            )
            for name in labels_before | labels:
                both = labels_before.get(name, []), labels.get(name, [])
                require_same_labels(name, *both, self.before.config.name_or_path)
        if self.stored is not None:
            self.stored.check_domains(self.layout.domains.values(), self.lm)
        chooses_ridges = self.stored is None and ridge == "auto"
        self.moments = HalfMoments(self.layout, chooses_ridges=False)
        self.moments_before = HalfMoments(self.layout_before, chooses_ridges)
        self.ridges: dict[Pair, float] = {}  #: Strengths of the maps of both LMs, after a test.

    def prepare_lm(self) -> None:
        """Load the LM before, too."""
        if self.before is not None:
            self.before.load()

    def on_test_start(self) -> None:
        """Begin a test."""
        for moments in (self.moments, self.moments_before):
            moments.reset("fit")
            moments.reset("test")

    def test_step(self, batch: SubjectBatch, batch_idx: int) -> None:
        """Add subjects of one half to the moments of both LMs."""
        require_fit_half_first(batch, batch_idx)
        if batch.half == "test":
            fitting.require_held_out(batch.subjects, self._fitted_on)
        reads = [(self.lm, self.layout, self.moments)]
        if self.before is not None and (batch.half == "test" or self._fits_old_maps):
            reads.append((self.before, self.layout_before, self.moments_before))
        for lm, layout, moments in reads:
            rows = domain_rows(lm, layout.reads_of(batch.half), batch.subjects)
            if not batch.is_padding:
                moments.add(batch.half, rows, batch.first)

    @property
    def _fits_old_maps(self) -> bool:
        """Whether maps are fitted on the LM before: those of pairs, or those of random words."""
        return self.before is not None and (self.stored is None or bool(self.layout.words))

    def build_results(self) -> Results:
        """Score all pairs."""
        fit, test = self.moments.gather_fit().every, self.moments.test.gather()
        if self.stored is not None:
            self.ridges = {pair: self.stored.ridge["->".join(pair)] for pair in self.layout.pairs}
        old = None
        if self._fits_old_maps:
            moments = self.moments_before.gather_fit()
            if self.stored is None:
                old = fitting.fit_maps(moments, self.layout_before, self.ridge)
                self.ridges = dict(old.ridges)
            else:
                old = fit_layout(moments.every, self.layout_before, self.ridges)
        new = fit_layout(fit, self.layout, self.ridges)
        old = old or new
        if self.stored is not None:
            old = replace(old, maps={**old.maps, "y": self._stored_maps(self.stored)})
        before: Mapping[Pair, float | None] = {}
        if self.before is not None:
            scores = score_maps(old, self.moments_before.test.gather())
            before = {score.ends: score["label_mean"] for score in scores}
        after, refitted = (
            beside_baselines(score_maps(maps, test), maps, test, lm, self.random_labels, skipped=())
            for maps, lm in ((old, self.before or self.lm), (new, self.lm))
        )
        cosines = _cosines(old, new)
        pairs = [
            _compare(one, other, before.get(one.ends), cosines[one.ends])
            for one, other in zip(after, refitted, strict=True)
        ]
        about = self._about() | {"n_fit": int(fit.n), "n_test": int(test.n)}
        return resilience_results(pairs, about, self.lm.config.name_or_path)

    def _stored_maps(self, stored: LinearMap) -> dict[str, Solution]:
        maps = {}
        for source in self.layout.sources:
            pairs = [f"{source}->{target}" for target in self.layout.targets[source]]
            weight, bias = (
                torch.cat([part(pair) for pair in pairs]).to(self.device)
                for part in (stored.weight, stored.bias)
            )
            maps[source] = Solution(weight, torch.zeros_like(weight[0]), bias)
        return maps

    def _about(self) -> dict[str, Any]:
        lm, old, new = "", "", dtype_name(self.lm.dtype)
        if self.before is not None:
            lm, old = self.before.config.name_or_path, dtype_name(self.before.dtype)
        if self.stored is not None:
            lm, old = lm or self.stored.lm, self.stored.fingerprint["dtype"]
        warning = None
        if old != new:
            warning = (
                f"The old maps are those of an LM in {old}, and the new LM is in {new}: part of "
                f"the change in r is due to precision. Set model.lm.dtype to {old}."
            )
            rank_zero_warn(warning)
        return {"lm_before": lm, "dtypes": {"before": old, "after": new}, "warning": warning}


def _cosines(old: FittedMaps, new: FittedMaps) -> dict[Pair, dict[str, Any]]:
    """Return the cosines between two LMs of W, and, where W₀ is known, of W₀ and W - W₀."""
    weights, others = old.weights(), new.weights()
    sides = {pair: {"cosine": (w, others[pair])} for pair, w in weights.items()}
    others0 = new.weights("vocabulary")
    for pair, w0 in old.weights("vocabulary").items():
        sides[pair]["same_prompt_cosine"] = w0, others0[pair]
        sides[pair]["rest_cosine"] = weights[pair] - w0, others[pair] - others0[pair]
    return {
        pair: {name: number(weight_cosine(*both)) for name, both in by_name.items()}
        for pair, by_name in sides.items()
    }


def _compare(
    old: PairScore, refitted: PairScore, before: float | None, cosines: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the numbers of a pair: each r is a mean over labels, on held-out subjects."""
    after, refitted_r = old["label_mean"], refitted["label_mean"]
    random_r, refitted_random_r = old["random_label_mean"], refitted["random_label_mean"]
    return {
        "source": old.source,
        "target": old.target,
        "before": before,
        "after": after,
        "difference": None if after is None or before is None else after - before,
        "refitted": refitted_r,
        "kept": _kept(after, refitted_r),
        **{name: old[name] for name in _FROM_OLD_MAP},
        "random_refitted": refitted_random_r,
        "random_kept": _kept(random_r, refitted_random_r),
        "after_std": old["label_std"],
        **{f"refitted_{name}": refitted[name] for name in _FROM_REFITTED_MAP},
        **dict.fromkeys(("cosine", "same_prompt_cosine", "rest_cosine")),
        **cosines,
    }


def _kept(after: float | None, refitted: float | None) -> float | None:
    """Return r as a fraction of that of a map fitted again; None where that is close to zero."""
    if after is None or refitted is None or refitted < _MIN_R:
        return None
    return after / refitted


def resilience_results(
    pairs: Sequence[Mapping[str, Any]], about: Mapping[str, Any], lm: str
) -> Results:
    """Build the results of the resilience study; `about` is what holds for all pairs."""
    formats = dict.fromkeys(_SHOWN, ".2f")
    style: dict[str, Any] = {"headings": _SHOWN, "formats": formats}
    every = Table.of("pairs", pairs, [*pairs[0]], "Scores of every pair", **style)
    mean = {key: number(every.frame[key].astype(float).mean()) for key in _SHOWN}
    ranked = sorted(pairs, key=lambda one: math.inf if one["kept"] is None else one["kept"])
    summary = Table.of(
        "summary",
        [{"pair": f"{one['source']}->{one['target']}", **one} for one in ranked],
        ["pair", *_SHOWN],
        f"r of the old maps on {about['n_test']:,} held-out subjects",
        "By the fraction of the refitted map's r that the old map keeps. Random words need "
        f"model.before. {about['warning'] or ''}",
        headline=True,
        **style,
    )
    note = (
        f"map of {short_name(about['lm_before'])}, on {short_name(lm)}; {about['n_test']:,} "
        f"held-out subjects; refitted on {about['n_fit']:,}"
    )
    numbers = {(one["source"], one["target"]): one for one in pairs}
    ending = ": r per answer of every ordered pair."
    matrices = list(pair_matrices(_MATRICES, numbers, ending, "", note))
    return Results(
        study="resilience",
        values={**about, "mean": mean, "pairs": list(pairs)},
        scalars={f"test/{name}": value for name, value in mean.items() if value is not None},
        tables=[summary, every, *(table for table, _ in matrices)],
        figures=[figure for _, figure in matrices],
        verdict=list(_verdict(ranked)),
    )


def _verdict(ranked: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    known = [one for one in ranked if one["kept"] is not None]
    both = [(one["kept"], one["random_kept"]) for one in known if one["random_kept"] is not None]
    if both:
        share, words = map(fmean, zip(*both, strict=True))
        low, high = mean_interval(torch.tensor([kept - other for kept, other in both]))
        more = f"{'more' if low > 0 else 'no more'} than random words ({points(low, high)})"
        yield (
            f"The old maps keep {percent(share)} of r, a mean over {len(both)} pairs, and maps of "
            f"random words {percent(words)}: "
            f"{'too few pairs to tell them apart' if math.isnan(low) else more}."
        )
    elif known:
        mean = fmean(one["kept"] for one in known)
        yield f"The old maps keep {percent(mean)} of r, a mean over {len(known)} pairs."
    if len(known) > 1:
        least, most = (
            f"{one['source']}->{one['target']} ({percent(one['kept'])})"
            for one in (known[0], known[-1])
        )
        yield clean(f"Least is kept of {least}, most of {most}.")
