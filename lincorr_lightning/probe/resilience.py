"""How well does a linear map that was fitted on one LM hold on another (paper, section 4.2)?"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lincorr_lightning.data.subjects import SubjectBatch, SubjectsDataModule
from lincorr_lightning.errors import ConfigError, LinearMapError, SubjectsError
from lincorr_lightning.frozen_lm import FrozenLMModule
from lincorr_lightning.functional import LeastSquares, Moments, summarize
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.knowledge.catalogue import split_names
from lincorr_lightning.linear_map.artifact import LinearMap
from lincorr_lightning.linear_map.layout import ProbeLayout, build_layout, domain_rows
from lincorr_lightning.linear_map.solver import label_r, split_targets
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.metrics import JointMoments
from lincorr_lightning.probe.resilience_results import PairResilience, ResilienceReport
from lincorr_lightning.results.numbers import number

_HALVES = ("fit", "test")
_NAMED = 5


class MapResilience(FrozenLMModule):
    """Scores maps of one LM, say before post-training, on another one, say after it.

    ``lincorr test`` reads the new LM's logits for both halves of the X's: on the held-out half the
    old maps are scored, beside maps that are fitted on the new LM's own fit half. What the old maps
    reach on the LM they are from is asked of that LM (`before`), or read in the run's results
    beside `linear_map`.

    Args:
        lm: The new LM.
        linear_map: Folder of the old maps, ``linear_map/`` of a probe's run; null fits some on
            `before`.
        before: The LM the maps are from; null leaves it out.
        knowledges: Knowledges to tie by name or family, where maps are fitted; a folder has
            its own.
        pairs: Ordered pairs, as ``city->country``; null takes all of the folder or of `knowledges`.
        knowledge_files: YAML files with knowledge of your own.
        ridge: Penalty on ``|W|^2`` of maps that are fitted; a folder's maps have their own, which
            the new LM's maps are given too.

    Raises:
        LinearMapError: The folder holds no map, or the LMs have other labels; it says which.
        ConfigError: Neither a folder nor an LM to fit maps on, or a pair the folder lacks.
        LanguageModelError: An LM cannot be read.
    """

    reads_both_halves = True
    """Tells `SubjectsDataModule` that a test takes the fit half as well."""

    def __init__(
        self,
        lm: LMConfig = LMConfig(),  # noqa: B008 (frozen)
        linear_map: str | None = None,
        before: LMConfig | None = None,
        knowledges: list[str] | str = ["city", "country"],  # noqa: B006 (never changed)
        pairs: list[str] | str | None = None,
        knowledge_files: list[str] = [],  # noqa: B006
        ridge: float = 0.0,
    ) -> None:
        lm = LMConfig(**lm) if isinstance(lm, Mapping) else lm
        before = LMConfig(**before) if isinstance(before, Mapping) else before
        if linear_map is None and before is None:
            raise ConfigError(
                "there is no map to test: set model.linear_map to the linear_map/ folder of a "
                "probe's run, or model.before to the LM to fit maps on."
            )
        if not 0 <= ridge < math.inf:
            raise ConfigError(f"model.ridge is {ridge}; it must be 0 or more.")
        super().__init__(lm)
        self.save_hyperparameters(
            {
                "lm": asdict(lm), "linear_map": linear_map,
                "before": None if before is None else asdict(before), "knowledges": knowledges,
                "pairs": pairs, "knowledge_files": knowledge_files, "ridge": ridge,
            },
            logger=False,
        )  # fmt: skip
        self.before = None if before is None else LanguageModel(before)
        self.stored = None if linear_map is None else LinearMap.from_pretrained(linear_map)
        catalogue = Catalogue.load(*knowledge_files)
        wanted = None if pairs is None else split_names(pairs)
        names = split_names(knowledges)
        if self.stored is not None:
            lacking = [pair for pair in wanted or () if pair not in self.stored.pairs]
            if lacking:
                raise ConfigError(
                    f"model.pairs names {lacking[0]}, which {linear_map} lacks; it has "
                    f"{', '.join(self.stored.pairs[:_NAMED])}, ... Leave model.pairs null for all."
                )
            wanted = wanted or self.stored.pairs
            names = []
        self.layout = build_layout(self.lm.tokenizer, catalogue, names, wanted, [], control=False)
        self.layout_before: ProbeLayout | None = None
        if self.before is not None:
            self.layout_before = build_layout(
                self.before.tokenizer, catalogue, names, wanted, [], control=False
            )
            theirs = {n: d.texts for n, d in self.layout_before.domains.items()}
            self._check_labels(theirs, self.before.config.name_or_path)
        if self.stored is not None:
            used = [name for name in self.stored.knowledges if name in self.layout.domains]
            theirs = {name: self.stored.labels(name) for name in used}
            self._check_labels(theirs, f"the map of {self.stored.lm}")
            self._check_prompts(self.stored)
        n = self.layout.n_columns
        self.moments = nn.ModuleDict({half: JointMoments(n) for half in _HALVES})
        self.moments_before = nn.ModuleDict(
            {half: JointMoments(n) for half in _HALVES if self.before is not None}
        )
        self.report: ResilienceReport | None = None

    def _check_labels(self, theirs: Mapping[str, list[str]], whose: str) -> None:
        """A map is of labels: each LM must have the same ones, whatever their tokens' numbers."""
        ours = {name: domain.texts for name, domain in self.layout.domains.items()}
        for name in dict.fromkeys([*ours, *theirs]):
            here, there = ours.get(name, []), theirs.get(name, [])
            if here != there:
                only_here = [text for text in here if text not in there][:_NAMED]
                only_there = [text for text in there if text not in here][:_NAMED]
                raise LinearMapError(
                    f"{name} has other labels in {self.lm.config.name_or_path} than in {whose}: "
                    f"only there {only_there or 'none'}, only here {only_here or 'none'}"
                    f"{'' if only_here or only_there else ', in another order'}. A map can be "
                    "tested between LMs whose tokenizers give the same labels; leave "
                    f"{name} out of model.pairs, or fit the map with the same knowledge files."
                )

    def _check_prompts(self, stored: LinearMap) -> None:
        for name, domain in self.layout.domains.items():
            if stored.templates[name] != domain.knowledge.template:
                raise LinearMapError(
                    f"the map was fitted with the {name} prompt {stored.templates[name]!r}, this "
                    f"run has {domain.knowledge.template!r}. Name the same model.knowledge_files."
                )

    # -- reading -----------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Load both LMs."""
        super().configure_model()
        if self.before is not None:
            self.before.load()

    def on_test_start(self) -> None:
        """Begin anew, and refuse to score maps on X's that they were fitted on.

        Raises:
            ConfigError: The X's come from elsewhere than `SubjectsDataModule`.
            SubjectsError: X's of the old maps' fit half are held out here.
        """
        for metric in (*self.moments.values(), *self.moments_before.values()):
            metric.reset()  # type: ignore[operator]
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, SubjectsDataModule):
            raise ConfigError(
                f"MapResilience asks about SubjectsDataModule; data is {type(data).__name__}. "
                "Pass --data SubjectsDataModule."
            )
        seen = self._fitted_on() & set(data.halves["test"])
        if seen:
            raise SubjectsError(
                f"{len(seen)} of the held-out X's, such as {min(seen)!r}, are among those that the "
                "old maps were fitted on. Use the data settings of the run that wrote them (its "
                "config.yaml), or other X's."
            )

    @property
    def _run(self) -> Path | None:
        """The run that wrote the maps, if they still lie in its folder."""
        folder = self.hparams["linear_map"]
        return None if folder is None else Path(folder).resolve().parent

    def _fitted_on(self) -> set[str]:
        path = None if self._run is None else self._run / "tables" / "inputs.csv"
        if path is None or not path.is_file():
            return set()
        with path.open(newline="", encoding="utf-8") as file:
            return {row["x"] for row in csv.DictReader(file) if row.get("half") == "fit"}

    @torch.no_grad()
    def test_step(self, batch: SubjectBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add X's of one half to the statistics of both LMs."""
        del batch_idx
        half = _HALVES[dataloader_idx]
        rows = domain_rows(self.lm, self.layout, batch.inputs)
        old = None
        if self.before is not None and (half == "test" or self.stored is None):
            assert self.layout_before is not None
            old = domain_rows(self.before, self.layout_before, batch.inputs)
        if batch.is_padding:
            return
        self.moments[half].update(rows)  # type: ignore[operator]
        if old is not None:
            self.moments_before[half].update(old)  # type: ignore[operator]

    # -- scoring -----------------------------------------------------------------------------

    def on_test_epoch_end(self) -> None:
        """Score all pairs."""
        now = {half: metric.gather() for half, metric in self.moments.items()}  # type: ignore[operator]
        then = {half: metric.gather() for half, metric in self.moments_before.items()}  # type: ignore[operator]
        told = {} if then else self._told_before()
        pairs: dict[tuple[str, str], PairResilience] = {}
        for source in self.layout.sources:
            x, y = self.layout.columns(source), self.layout.target_columns(source)
            weight = self._old_weight(source, then.get("fit"))
            scores = {
                "after": label_r(now["test"], weight, x, y),
                "refitted": label_r(now["test"], self._solved(now["fit"], source), x, y),
            }
            if then:
                scores["before"] = label_r(then["test"], weight, x, y)
            cut = {k: dict(split_targets(self.layout, source, r.cpu())) for k, r in scores.items()}
            for target in self.layout.targets(source):
                after = summarize(cut["after"][target])
                before = told.get(f"{source}->{target}")
                if "before" in cut:
                    before = number(summarize(cut["before"][target]).mean)
                pairs[source, target] = PairResilience(
                    source,
                    target,
                    before,
                    number(after.mean),
                    number(summarize(cut["refitted"][target]).mean),
                    number(after.std),
                    self.layout.sizes[target],
                )
        self.report = ResilienceReport(
            self.stored.lm if self.stored is not None else self.before.config.name_or_path,  # type: ignore[union-attr]
            self.lm.config.name_or_path,
            int(now["fit"].n),
            int(now["test"].n),
            [pairs[pair] for pair in self.layout.pairs],
        )

    def _ridges(self, source: str) -> Tensor:
        """Ridge strength of each target column of a source."""
        own = self.stored.ridge if self.stored is not None else {}
        return torch.cat(
            [
                torch.full(
                    (self.layout.sizes[target],),
                    own.get(f"{source}->{target}", self.hparams["ridge"]),
                    dtype=torch.float64,
                )
                for target in self.layout.targets(source)
            ]
        )

    def _solved(self, fit: Moments, source: str) -> Tensor:
        """W of a source to all its targets, ``(n_target, n_source)``."""
        device = fit.mean.device
        x = self.layout.columns(source).to(device)
        y = self.layout.target_columns(source).to(device)
        squares = LeastSquares(fit.scatter[x][:, x], fit.scatter[x][:, y])
        return squares.weight(self._ridges(source).to(device))

    def _old_weight(self, source: str, fit: Moments | None) -> Tensor:
        if self.stored is None:
            assert fit is not None
            return self._solved(fit, source)
        names = [f"{source}->{target}" for target in self.layout.targets(source)]
        return torch.cat([self.stored.weight(name) for name in names]).to(self.device)

    def _told_before(self) -> dict[str, float]:
        """What the run that wrote the maps found, if it lies beside them."""
        path = None if self._run is None else self._run / "results.json"
        if path is None or not path.is_file():
            rank_zero_warn(
                "what the maps reach on their own LM is not known: there is no results.json "
                "beside model.linear_map. Set model.before to that LM to have it measured."
            )
            return {}
        pairs = json.loads(path.read_text(encoding="utf-8")).get("pairs", [])
        return {
            f"{pair['source']}->{pair['target']}": pair["label_mean"]
            for pair in pairs
            if pair.get("label_mean") is not None
        }

    # -- the end -----------------------------------------------------------------------------

    def on_test_end(self) -> None:
        """Write the numbers, tables and figures."""
        self.write_study(self.report)
