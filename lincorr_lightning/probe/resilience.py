"""How well linear maps of one LM hold on another one (paper, section 4.2; figures 8, 9, 19-21)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lincorr_lightning.data.subjects import SubjectBatch, require_fit_half_first
from lincorr_lightning.errors import ConfigError, LinearMapError, listed, require
from lincorr_lightning.functional import Moments
from lincorr_lightning.functional.significance import weight_cosine
from lincorr_lightning.io import number, read_json
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.knowledge.catalogue import split_names
from lincorr_lightning.linear_map.artifact import LinearMap
from lincorr_lightning.linear_map.baselines import R_BASELINES, beside_baselines
from lincorr_lightning.linear_map.fitting import (
    FitMoments,
    Ridge,
    RidgeRequest,
    fit_maps,
    read_fit_subjects,
    require_held_out,
    split_rows,
)
from lincorr_lightning.linear_map.layout import Pair, build_layout, domain_rows
from lincorr_lightning.linear_map.scores import PairScore, pair_number, score_maps
from lincorr_lightning.linear_map.solver import FittedMaps, Solution, fit_layout
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.modes import dtype_name
from lincorr_lightning.metrics import JointMoments
from lincorr_lightning.probe.results import pair_matrices
from lincorr_lightning.results.results import RESULTS_FILE, Results
from lincorr_lightning.results.table import Table, columns_of, short_name
from lincorr_lightning.study import LMStudy, as_settings

_HALVES = ("fit", "test")
_HITS = ("influenced_1", "macro_1", "gaussian_states_1", "gaussian_states_macro_1")
_MIN_R = 0.2  # below this r a fraction of it means nothing
_WITHOUT_WORDS = (
    "Without random words: they need model.before, an LM with the same words in its vocabulary, "
    "and model.random_labels."
)


@dataclass(frozen=True)
class PairResilience:
    """How well an old map holds on a new LM; each r is a mean over labels, on held-out subjects."""

    source: str
    target: str
    before: float | None = pair_number("", ".2f", "before", "The old map on the old LM")
    """None if r on the old LM is not known."""
    after: float | None = pair_number("", ".2f", "after", "The old map on the new LM")
    difference: float | None = pair_number(
        "", ".2f", "difference", "The old map on the new LM, minus on the old LM"
    )
    refitted: float | None = pair_number("", ".2f", "refitted", "A map fitted on the new LM itself")
    kept: float | None = pair_number(
        "",
        ".2f",
        "kept",
        "Fraction of the refitted map's r that the old map keeps",
        f"fraction of r, where the refitted r is {_MIN_R:g} or more",
    )
    """None where `refitted` is close to zero."""
    random_label_mean: float | None = pair_number(
        "after, random words", ".2f", "random", "Old maps of random source words on the new LM"
    )
    random_target_label_mean: float | None = None
    """R of the old maps to random words after the target prompt, on the new LM."""
    same_prompt_label_mean: float | None = None  #: R of the old LM's W₀ on the new LM.
    same_prompt_refitted: float | None = None  #: R of the new LM's own W₀.
    excess_over_random: float | None = None
    """R on the new LM of old maps of ``model.random_labels`` labels, above as many random words."""
    random_refitted: float | None = None  #: Of maps of random words, fitted on the new LM.
    random_kept: float | None = pair_number("kept, random words", ".2f")
    """`random_label_mean` as a fraction of `random_refitted`."""
    after_std: float | None = pair_number(
        "",
        "",
        "after_std",
        "The old map on the new LM, standard deviation of r over labels",
        "standard deviation of r",
        is_signed=False,
    )
    cosine: float | None = None  #: Of the old W and the refitted one.
    same_prompt_cosine: float | None = None  #: Of W₀ of both LMs.
    rest_cosine: float | None = None  #: Of W - W₀ of both LMs: what they add to the vocabulary.
    influenced_1: float | None = None  #: Hit@1 of the old W; next, of the refitted one.
    refitted_influenced_1: float | None = None
    macro_1: float | None = None  #: The same as a mean over references.
    refitted_macro_1: float | None = None
    gaussian_states_1: float | None = None  #: Hit@1 of the old W₀.
    gaussian_states_macro_1: float | None = None
    n_labels: int = 0  #: Number of target labels.


class MapResilience(LMStudy):
    """Scores the maps of one LM on another, such as the same LM after post-training.

    ``lincorr test`` reads the new LM's logits for both halves of the subjects: on the held-out half
    the old maps are scored, beside maps that are fitted on the new LM's own fit half. R of the old
    maps on their own LM is measured on it (`before`), or read from the run beside `linear_map`.

    Takes `SubjectBatch`, those of the fit half first: `SubjectsDataModule` with ``test_on: all``.

    Args:
        lm: The new LM.
        linear_map: Folder of the old maps, ``linear_map/`` of a probe; null fits some on `before`.
        before: The LM that the maps are from; null leaves it out.
        same_dtype: Whether `before` is read in the dtype of `lm`, whatever its own. With false, or
            with maps of a folder that were fitted in another dtype, the results have a warning:
            part of the change in r is due to precision.
        knowledge: Kinds of knowledge by name or family, where maps are fitted.
        pairs: Ordered pairs, as ``city->country``; null takes all of the folder or of `knowledge`.
        knowledge_files: YAML files with knowledge of your own.
        ridge: Penalty on ``|W|^2`` of maps that are fitted, see `RidgeRequest`; ``auto`` chooses
            strengths on the old LM. The maps of a folder have their own. The maps of the new LM
            get the strengths of the old ones.
        prefix: Text before each prompt, such as examples; with `lm.chat_template`, the user's turn.
        random_labels: Number of source labels whose r is compared with that of as many random
            words. They need `before`, to fit maps on, and the same tokenizer; 0 leaves them out.
    """

    study = "resilience"
    batch_type = SubjectBatch
    shards_lm = True

    def __init__(
        self,
        lm: LMConfig = LMConfig(),
        linear_map: str | None = None,
        before: LMConfig | None = None,
        same_dtype: bool = True,
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
        self.ridge_request = RidgeRequest(ridge)
        require("model.random_labels", random_labels, at_least=0)
        super().__init__(lm, prefix)
        self.save_hyperparameters()
        self.random_labels = random_labels
        self.stored = None if linear_map is None else LinearMap.from_pretrained(linear_map)
        # The run that wrote the maps, if they are still in its folder.
        self._run = None if linear_map is None else Path(linear_map).resolve().parent
        catalogue = Catalogue.load(*knowledge_files)
        names, wanted = split_names(knowledge), None if pairs is None else split_names(pairs)
        if self.stored is not None:
            wanted = wanted or self.stored.pairs
            if lacking := [pair for pair in wanted if pair not in self.stored.pairs]:
                raise ConfigError(
                    f"model.pairs names {lacking[0]}, which {linear_map} lacks; it has "
                    f"{listed(self.stored.pairs)}. Null takes all."
                )
        options: dict[str, Any] = {"n_random": 0 if before is None else random_labels}
        self.layout = build_layout(self.lm.tokenizer, catalogue, names, wanted, **options)
        self.before: LanguageModel | None = None
        self.layout_before = self.layout
        if before is not None:
            self.before = self._language_model_before(as_settings(LMConfig, before), same_dtype)
            self.layout_before = build_layout(
                self.before.tokenizer, catalogue, names, wanted, **options
            )
            texts = [
                [lm.tokenizer.convert_ids_to_tokens(tokens) for tokens in layout.words.values()]
                for lm, layout in ((self.lm, self.layout), (self.before, self.layout_before))
            ]
            if texts[0] != texts[1]:
                self.layout = replace(self.layout, words={})
                self.layout_before = replace(self.layout_before, words={})
            labels = {n: d.texts for n, d in self.layout_before.domains.items()}
            self._check_labels(labels, self.before.config.name_or_path)
        if self.stored is not None:
            used = [name for name in self.stored.knowledge if name in self.layout.domains]
            labels = {name: self.stored.labels(name) for name in used}
            self._check_labels(labels, f"the map of {self.stored.lm}")
            self.stored.check_domains(self.layout.domains.values(), self.lm, same_tokens=False)
        n, blocks = self.layout.n_columns, self.layout.blocks
        self.moments = nn.ModuleDict({half: JointMoments(n, blocks) for half in _HALVES})
        self.moments_before = nn.ModuleDict(
            {half: JointMoments(n, blocks) for half in _HALVES if self.before is not None}
        )
        # Of the old LM's rows, on which strengths are tried and judged.
        chooses_ridges = self.stored is None and self.ridge_request.is_auto
        self.tuning = nn.ModuleList(
            JointMoments(n, blocks) for _ in range(2 if chooses_ridges else 0)
        )
        self.ridges: dict[Pair, float] = {}  #: Strengths of the maps of both LMs, after a test.
        self._fitted_on: set[str] = set()

    def _language_model_before(self, config: LMConfig, same_dtype: bool) -> LanguageModel:
        dtype = dtype_name(self.lm.dtype)
        if same_dtype and config.dtype != dtype:
            rank_zero_info(
                f"model.before is read in {dtype}, the dtype of model.lm, and not in "
                f"{config.dtype}; model.same_dtype false compares dtypes."
            )
            config = replace(config, dtype=dtype)
        return self.other_lm(config)

    def _check_labels(self, labels: Mapping[str, list[str]], whose: str) -> None:
        """Refuse other labels; their token ids may differ, because maps are between labels."""
        own = {name: domain.texts for name, domain in self.layout.domains.items()}
        for name in dict.fromkeys([*own, *labels]):
            here, there = own.get(name, []), labels.get(name, [])
            if here != there:
                only_here, only_there = (
                    listed(sorted(set(a) - set(b))) for a, b in ((here, there), (there, here))
                )
                raise LinearMapError(
                    f"{name} has other labels in {self.lm.config.name_or_path} than in {whose}, or "
                    f"in another order: only there {only_there}; only here {only_here}. A map can "
                    "be tested between LMs whose tokenizers give the same labels; leave "
                    f"{name} out of model.pairs, or fit the map with the same knowledge files."
                )

    def prepare_lm(self) -> None:
        """Load the LM before, too."""
        if self.before is not None:
            self.before.load()

    def on_test_start(self) -> None:
        """Begin a test."""
        for metric in (*self.moments.values(), *self.moments_before.values(), *self.tuning):
            cast(JointMoments, metric).reset()
        self._fitted_on = set() if self._run is None else read_fit_subjects(self._run)

    def test_step(self, batch: SubjectBatch, batch_idx: int) -> None:
        """Add subjects of one half to the moments of both LMs."""
        require_fit_half_first(batch, batch_idx)
        if batch.half == "test":
            require_held_out(batch.subjects, self._fitted_on)
        reads = [(self.lm, self.layout, self.moments)]
        fits_old_maps = self.stored is None or bool(self.layout.words)
        if self.before is not None and (batch.half == "test" or fits_old_maps):
            reads.append((self.before, self.layout_before, self.moments_before))
        for lm, layout, moments in reads:
            rows = domain_rows(lm, layout.reads, batch.subjects)
            if batch.is_padding:
                continue
            cast(JointMoments, moments[batch.half]).update(rows)
            if lm is self.before and batch.half == "fit":
                for metric, part in zip(self.tuning, split_rows(rows, batch.first), strict=False):
                    cast(JointMoments, metric).update(part)

    def build_results(self) -> Results:
        """Score all pairs."""
        now, then = (
            {half: cast(JointMoments, metric).gather() for half, metric in moments.items()}
            for moments in (self.moments, self.moments_before)
        )
        old = None
        if then and then["fit"].n > 0:
            old = self._fit_old_maps(then["fit"])
        ridges = self._stored_ridges() if old is None else old.ridges
        self.ridges = dict(ridges)
        new = fit_layout(now["fit"], self.layout, ridges)
        lm_before = self.lm if old is None or self.before is None else self.before
        old = new if old is None else old
        if self.stored is not None:
            old = replace(old, maps={**old.maps, "y": self._stored_maps(self.stored)})
        before = _read_label_means(self._run) if self._run is not None and not then else {}
        if then:
            before = {score.pair: score.label_mean for score in score_maps(old, then["test"])}
        test, n = now["test"], self.random_labels
        after, refitted = (
            beside_baselines(score_maps(maps, test), maps, test, lm, n, counts=())[0]
            for maps, lm in ((old, lm_before), (new, self.lm))
        )
        kinds = ("y", "vocabulary")  # W and W₀
        weights = [[one.weights(kind) for one in (old, new)] for kind in kinds if kind in old.maps]
        pairs = [
            _compare(one, other, before.get(one.pair), _cosines(weights, one.pair))
            for one, other in zip(after, refitted, strict=True)
        ]
        about = self._about() | {f"n_{half}": int(moments.n) for half, moments in now.items()}
        return resilience_results(pairs, about, self.lm.config.name_or_path)

    def _fit_old_maps(self, moments: Moments) -> FittedMaps:
        """Fit maps on the old LM; all ranks call this."""
        if self.stored is not None:
            return fit_layout(moments, self.layout_before, self._stored_ridges())
        tuning = (cast(JointMoments, metric).gather() for metric in self.tuning)
        return fit_maps(FitMoments(moments, *tuning), self.layout_before, self.ridge_request)

    def _stored_ridges(self) -> dict[Pair, float]:
        assert self.stored is not None
        return {pair: self.stored.ridge["->".join(pair)] for pair in self.layout.pairs}

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
        return {
            "lm_before": lm,
            "dtypes": {"before": old, "after": new},
            "warning": warning,
            "without_random_words": None if self.layout.words else _WITHOUT_WORDS,
        }


def _cosines(weights: Sequence[Sequence[dict[Pair, Tensor]]], pair: Pair) -> dict[str, Any]:
    """Return the cosines between two LMs of W, and, where W₀ is known, of W₀ and W - W₀."""
    sides = [[of_lm[pair] for of_lm in both] for both in weights]
    if len(sides) > 1:
        sides.append([w - w0 for w, w0 in zip(*sides, strict=True)])
    names = "cosine", "same_prompt_cosine", "rest_cosine"
    return {name: number(weight_cosine(*both)) for name, both in zip(names, sides, strict=False)}


def _compare(
    old: PairScore, refitted: PairScore, before: float | None, cosines: dict[str, Any]
) -> PairResilience:
    after, row, new = old.label_mean, old.row(), refitted.row()
    numbers = {key: row[key] for key in (*R_BASELINES, *_HITS)} | cosines
    numbers |= {f"refitted_{key}": new[key] for key in _HITS[:2]}
    return PairResilience(
        *old.pair,
        before,
        after,
        difference=None if after is None or before is None else after - before,
        refitted=refitted.label_mean,
        kept=_kept(after, refitted.label_mean),
        same_prompt_refitted=refitted.same_prompt_label_mean,
        random_refitted=refitted.random_label_mean,
        random_kept=_kept(old.random_label_mean, refitted.random_label_mean),
        after_std=old.label_std,
        n_labels=old.n_labels,
        **numbers,
    )


def _kept(after: float | None, refitted: float | None) -> float | None:
    if after is None or refitted is None or refitted < _MIN_R:
        return None
    return after / refitted


def _read_label_means(run: Path) -> dict[Pair, float | None]:
    path = run / RESULTS_FILE
    if not path.is_file():
        rank_zero_warn(
            "r of the maps on their own LM is not known: there is no results.json "
            "beside model.linear_map. Set model.before to that LM to have it measured."
        )
        return {}
    pairs = read_json(path, LinearMapError, "Run the probe again.").get("pairs", [])
    return {(pair["source"], pair["target"]): pair.get("label_mean") for pair in pairs}


def resilience_results(
    pairs: Sequence[PairResilience], about: Mapping[str, Any], lm: str
) -> Results:
    """Build the results of the resilience study; `about` is what holds for all pairs."""
    _, headings, shown = columns_of(PairResilience)
    known = {key: [v for p in pairs if (v := getattr(p, key)) is not None] for key in shown}
    mean = {key: fmean(values) if values else None for key, values in known.items()}
    rows = [
        {"pair": f"{pair.source}->{pair.target}", **asdict(pair)}
        for pair in sorted(pairs, key=lambda p: math.inf if p.kept is None else p.kept)
    ]
    summary = Table.of(
        "summary",
        rows,
        ["pair", *shown],
        f"Label-wise r of the old maps on {about['n_test']:,} held-out subjects",
        "By the fraction of the refitted map's r that the old map keeps. "
        + " ".join(filter(None, (about["warning"], about["without_random_words"]))),
        headline=True,
        headings=headings,
        formats=shown,
    )
    every = Table.of("pairs", pairs, PairResilience, "Scores of every pair")
    note = (
        f"map of {short_name(about['lm_before'])}, on {short_name(lm)}; {about['n_test']:,} "
        f"held-out subjects; refitted on {about['n_fit']:,}"
    )
    ending = ": label-wise correlation of every ordered pair."
    matrices = list(pair_matrices(pairs, ending, "", note))
    return Results(
        study="resilience",
        values={**about, "mean": mean, "pairs": [asdict(pair) for pair in pairs]},
        scalars={f"test/{name}": value for name, value in mean.items() if value is not None},
        tables=[summary, every, *(table for table, _ in matrices)],
        figures=[figure for _, figure in matrices],
    )
