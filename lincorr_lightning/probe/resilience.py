"""How well linear maps of one LM hold on another one (paper, section 4.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lincorr_lightning.data.subjects import SubjectBatch
from lincorr_lightning.distributed import gather
from lincorr_lightning.errors import ConfigError, LinearMapError, SubjectsError, require
from lincorr_lightning.functional import Moments, summarize
from lincorr_lightning.io import read_json
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.knowledge.catalogue import split_names
from lincorr_lightning.linear_map.artifact import LinearMap, read_fit_subjects
from lincorr_lightning.linear_map.layout import JointLayout, build_layout, domain_rows
from lincorr_lightning.linear_map.solver import fit_layout, label_r_by_pair
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.modes import dtype_name
from lincorr_lightning.metrics import JointMoments
from lincorr_lightning.probe.resilience_results import PairResilience, resilience_results
from lincorr_lightning.results.numbers import number
from lincorr_lightning.results.results import Results
from lincorr_lightning.study import LMStudy, as_settings

_HALVES = ("fit", "test")
_MAX_NAMED = 5


class MapResilience(LMStudy):
    """Scores the maps of one LM on another, such as the same LM after post-training.

    ``lincorr test`` reads the new LM's logits for both halves of the subjects: on the held-out half
    the old maps are scored, beside maps that are fitted on the new LM's own fit half. R of the old
    maps on their own LM is measured on that LM (`before`), or read from the results of the run
    beside `linear_map`.

    Takes `SubjectBatch`, those of the fit half first: `SubjectsDataModule` with ``test_on: all``,
    or any other DataLoader.

    Args:
        lm: The new LM.
        linear_map: Folder of the old maps, ``linear_map/`` of a probe's run; null fits maps on
            `before`.
        before: The LM that the maps are from; null leaves it out.
        same_dtype: Whether `before` is read in the dtype of `lm`, whatever its own. With false, or
            with maps of a folder that were fitted in another dtype, the results have a warning:
            part of the change in r is due to precision.
        knowledge: Kinds of knowledge by name or family, where maps are fitted; a folder has its
            own.
        pairs: Ordered pairs, as ``city->country``; null takes all of the folder or of `knowledge`.
        knowledge_files: YAML files with knowledge of your own.
        ridge: Penalty on ``|W|^2`` of maps that are fitted. The maps of a folder have their own,
            which the maps of the new LM get, too.

    Raises:
        LinearMapError: The folder holds no map, or the LMs have different labels, which the message
            names.
        ConfigError: Neither a folder nor an LM to fit maps on, or a pair that the folder lacks.
        LanguageModelError: An LM cannot be read.

    Attributes:
        results: What the last test found; None before.
    """

    study = "resilience"
    batch_type = SubjectBatch
    shards_lm = True

    def __init__(
        self,
        lm: LMConfig = LMConfig(),  # noqa: B008 (frozen)
        linear_map: str | None = None,
        before: LMConfig | None = None,
        same_dtype: bool = True,
        knowledge: list[str] | str = ["city", "country"],  # noqa: B006 (never changed)
        pairs: list[str] | str | None = None,
        knowledge_files: list[str] = [],  # noqa: B006
        ridge: float = 0.0,
    ) -> None:
        if linear_map is None and before is None:
            raise ConfigError(
                "there is no map to test: set model.linear_map to the linear_map/ folder of a "
                "probe's run, or model.before to the LM to fit maps on."
            )
        require("model.ridge", ridge, at_least=0)
        super().__init__(lm)
        self.before: LanguageModel | None = None
        self.save_hyperparameters()
        if before is not None:
            before = as_settings(LMConfig, before)
            dtype = dtype_name(self.lm.dtype)
            if same_dtype and before.dtype != dtype:
                rank_zero_info(
                    f"model.before is read in {dtype}, the dtype of model.lm, and not in "
                    f"{before.dtype}; model.same_dtype false compares dtypes."
                )
                before = replace(before, dtype=dtype)
            self.before = LanguageModel(before)
        self.stored = None if linear_map is None else LinearMap.from_pretrained(linear_map)
        catalogue = Catalogue.load(*knowledge_files)
        wanted = None if pairs is None else split_names(pairs)
        names = split_names(knowledge)
        if self.stored is not None:
            lacking = [pair for pair in wanted or () if pair not in self.stored.pairs]
            if lacking:
                raise ConfigError(
                    f"model.pairs names {lacking[0]}, which {linear_map} lacks; it has "
                    f"{', '.join(self.stored.pairs[:_MAX_NAMED])}, ... Leave model.pairs null for "
                    "all."
                )
            wanted, names = wanted or self.stored.pairs, []
        self.layout = build_layout(self.lm.tokenizer, catalogue, names, wanted)
        self.layout_before: JointLayout | None = None
        if self.before is not None:
            self.layout_before = build_layout(self.before.tokenizer, catalogue, names, wanted)
            labels = {n: d.texts for n, d in self.layout_before.domains.items()}
            self._check_labels(labels, self.before.config.name_or_path)
        if self.stored is not None:
            used = [name for name in self.stored.knowledge if name in self.layout.domains]
            labels = {name: self.stored.labels(name) for name in used}
            self._check_labels(labels, f"the map of {self.stored.lm}")
            for name, domain in self.layout.domains.items():
                own, other = domain.knowledge.template, self.stored.templates[name]
                if own != other:
                    raise LinearMapError(
                        f"the map was fitted with the {name} prompt {other!r}, this run "
                        f"has {own!r}. Name the same model.knowledge_files."
                    )
        stored = {} if self.stored is None else self.stored.ridge
        self.ridges = {(s, t): stored.get(f"{s}->{t}", ridge) for s, t in self.layout.pairs}
        n = self.layout.n_columns
        self.moments = nn.ModuleDict({half: JointMoments(n) for half in _HALVES})
        self.moments_before = nn.ModuleDict(
            {half: JointMoments(n) for half in _HALVES if self.before is not None}
        )
        # The run that wrote the maps, if they are still in its folder.
        self._scores: list[PairResilience] | None = None
        self._run = None if linear_map is None else Path(linear_map).resolve().parent
        self._fitted_on: set[str] = set()

    def _check_labels(self, labels: Mapping[str, list[str]], whose: str) -> None:
        """Refuse other labels; their token ids may differ, because maps are between labels."""
        own = {name: domain.texts for name, domain in self.layout.domains.items()}
        for name in dict.fromkeys([*own, *labels]):
            here, there = own.get(name, []), labels.get(name, [])
            if here != there:
                only_here = [text for text in here if text not in there][:_MAX_NAMED]
                only_there = [text for text in there if text not in here][:_MAX_NAMED]
                shared = [text for text in here if text in there]
                listed = ", ".join(shared[:_MAX_NAMED]) + (", ..." if shared[_MAX_NAMED:] else "")
                raise LinearMapError(
                    f"{name} has other labels in {self.lm.config.name_or_path} than in {whose}: "
                    f"only there {only_there or 'none'}, only here {only_here or 'none'}"
                    f"{'' if only_here or only_there else ', in another order'}; {len(shared)} "
                    f"labels are in both{f' ({listed})' if shared else ''}. A map can be "
                    "tested between LMs whose tokenizers give the same labels; leave "
                    f"{name} out of model.pairs, or fit the map with the same knowledge files."
                )

    # -- reading -----------------------------------------------------------------------------

    def prepare_lm(self) -> None:
        """Load the LM before, too."""
        if self.before is not None:
            self.before.load()

    def on_test_start(self) -> None:
        """Begin a test."""
        for metric in (*self.moments.values(), *self.moments_before.values()):
            metric.reset()  # type: ignore[operator]
        self._fitted_on = set() if self._run is None else read_fit_subjects(self._run)

    @torch.no_grad()
    def test_step(self, batch: SubjectBatch, batch_idx: int) -> None:
        """Add subjects of one half to the moments of both LMs."""
        if batch_idx == 0 and "fit" not in gather(batch.half):
            raise ConfigError(
                "MapResilience fits maps on the fit half while it tests, and the first batches are "
                "of the held-out half. Set data.test_on to all."
            )
        if batch.half == "test":
            self._check_held_out(batch.subjects)
        rows = domain_rows(self.lm, self.layout, batch.subjects)
        old = None
        if self.before is not None and (batch.half == "test" or self.stored is None):
            assert self.layout_before is not None
            old = domain_rows(self.before, self.layout_before, batch.subjects)
        if batch.is_padding:
            return
        self.moments[batch.half].update(rows)  # type: ignore[operator]
        if old is not None:
            self.moments_before[batch.half].update(old)  # type: ignore[operator]

    def _check_held_out(self, subjects: Sequence[str]) -> None:
        seen = self._fitted_on & set(subjects)
        if seen:
            raise SubjectsError(
                f"{len(seen)} of {len(subjects)} held-out subjects, such as {min(seen)!r}, are "
                "among those that the old maps were fitted on. Use the data settings of the run "
                "that wrote them (its config.yaml), or other subjects."
            )

    # -- scoring -----------------------------------------------------------------------------

    def on_test_epoch_end(self) -> None:
        """Score all pairs."""
        now = {half: metric.gather() for half, metric in self.moments.items()}  # type: ignore[operator]
        then = {half: metric.gather() for half, metric in self.moments_before.items()}  # type: ignore[operator]
        before = {} if then or self._run is None else _read_label_means(self._run)
        old = self._old_weights(then)
        refitted = self._solve(now["fit"])
        self._scores = score_resilience(
            self.layout, old, refitted, now["test"], then.get("test"), before
        )
        self._n = int(now["fit"].n), int(now["test"].n)

    def build_results(self) -> Results | None:
        """Return the scores of the last test."""
        if self._scores is None:
            return None
        dtypes = dtype_name(self._old_dtype()), dtype_name(self.lm.dtype)
        warning = None
        if dtypes[0] != dtypes[1]:
            warning = (
                f"The old maps are those of an LM in {dtypes[0]}, and the new LM is in "
                f"{dtypes[1]}: part of the change in r is due to precision. Set model.lm.dtype to "
                f"{dtypes[0]}."
            )
            rank_zero_warn(warning)
        before = self.stored if self.before is None else self.before.config
        assert before is not None
        return resilience_results(
            self._scores,
            lm=self.lm.config.name_or_path,
            lm_before=before.lm if isinstance(before, LinearMap) else before.name_or_path,
            n_fit=self._n[0],
            n_test=self._n[1],
            dtypes=dict(zip(("before", "after"), dtypes, strict=True)),
            warning=warning,
        )

    def _old_dtype(self) -> str | torch.dtype:
        """Return the dtype of the LM that the maps were fitted on."""
        if self.stored is not None:
            return self.stored.fingerprint["dtype"]
        assert self.before is not None
        return self.before.dtype

    def _old_weights(self, then: Mapping[str, Moments]) -> dict[str, Tensor]:
        """Return W of the old map of each source to all its targets, ``(n_target, n_source)``."""
        if self.stored is None:
            return self._solve(then["fit"])
        weights = {}
        for source in self.layout.sources:
            names = [f"{source}->{target}" for target in self.layout.targets(source)]
            weights[source] = torch.cat([self.stored.weight(n) for n in names]).to(self.device)
        return weights

    def _solve(self, fit: Moments) -> dict[str, Tensor]:
        """Return W of each source to all its targets, ``(n_target, n_source)``."""
        maps = fit_layout(fit, self.layout, self.ridges).maps
        return {source: solution.weight for source, solution in maps.items()}


def score_resilience(
    layout: JointLayout,
    old: Mapping[str, Tensor],
    refitted: Mapping[str, Tensor],
    now: Moments,
    then: Moments | None,
    before: Mapping[str, float | None],
) -> list[PairResilience]:
    """Score old maps on a new LM, beside maps that were fitted on it.

    Args:
        layout: Columns of the joint rows.
        old: W of the old map of each source, ``(n_target, n_source)``.
        refitted: W of the new LM's own map of each source, likewise.
        now: Moments of held-out subjects on the new LM.
        then: Moments of held-out subjects on the old LM; None if it was not read.
        before: Known mean label-wise r of the old maps on the old LM, by ``city->country``; used
            where the old LM was not read.
    """
    after, own = label_r_by_pair(now, layout, old), label_r_by_pair(now, layout, refitted)
    earlier = {} if then is None else label_r_by_pair(then, layout, old)
    known = before if then is None else {
        f"{source}->{target}": number(summarize(r).mean) for (source, target), r in earlier.items()
    }  # fmt: skip
    pairs = []
    for source, target in layout.pairs:
        summary = summarize(after[source, target])
        pairs.append(
            PairResilience.of(
                source,
                target,
                before=known.get(f"{source}->{target}"),
                after=number(summary.mean),
                refitted=number(summarize(own[source, target]).mean),
                after_std=number(summary.std),
                n_labels=layout.sizes[target],
            )
        )
    return pairs


def _read_label_means(run: Path) -> dict[str, float]:
    """Return the mean label-wise r of each pair in the results of the run that wrote the maps."""
    path = run / "results.json"
    if not path.is_file():
        rank_zero_warn(
            "r of the maps on their own LM is not known: there is no results.json "
            "beside model.linear_map. Set model.before to that LM to have it measured."
        )
        return {}
    pairs = read_json(path, LinearMapError, "Run the probe again.").get("pairs", [])
    return {
        f"{pair['source']}->{pair['target']}": pair["label_mean"]
        for pair in pairs
        if pair.get("label_mean") is not None
    }
