"""Are knowledges that are linearly tied closer in geometry too?"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lincorr_lightning.data.subjects import SubjectBatch, SubjectsDataModule
from lincorr_lightning.distributed import gather
from lincorr_lightning.errors import ConfigError, SubjectsError
from lincorr_lightning.frozen_lm import FrozenLMModule
from lincorr_lightning.functional import LeastSquares, hit_rates, summarize
from lincorr_lightning.geometry.intrinsic_dimension import intrinsic_dimension
from lincorr_lightning.geometry.knowledge_results import (
    KnowledgeGeometryReport,
    OrderedScore,
)
from lincorr_lightning.geometry.layer_states import read_last_states
from lincorr_lightning.geometry.neighborhoods import neighborhood_overlap, neighborhoods
from lincorr_lightning.geometry.token_clouds import CloudSettings
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.knowledge.catalogue import split_names
from lincorr_lightning.linear_map.layout import build_layout, domain_rows
from lincorr_lightning.linear_map.solver import label_r, split_targets
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.metrics import JointMoments
from lincorr_lightning.results.numbers import number

_HALVES = ("fit", "test")


class KnowledgeGeometry(FrozenLMModule):
    """Are the prompts of tied knowledges closer in geometry than those of untied ones?

    ``lincorr test`` asks every knowledge's prompt of the same held-out X's. A knowledge's cloud at
    a layer are the hidden states of its prompts' last tokens, a point an X. How close two
    knowledges are is told by the neighborhood overlap of their clouds (is an X among the same X's
    under both prompts?) and by the difference of their profiles of intrinsic dimension; that is set
    against the label-wise r and Hit@1 of the linear maps between them, over pairs of knowledges,
    with a permutation test over knowledges. So is how alike their prompts are worded, which is the
    null here. Hidden states of all prompts are kept in memory.

    Args:
        lm: The LM that is asked.
        probe: Folder of a finished run of LinearProbe on this LM, whose scores are taken; null fits
            maps here, on the fit half of the X's.
        knowledges: Knowledges by name or family, where maps are fitted; a probe has its own.
        knowledge_files: YAML files with knowledge of your own.
        ridge: Penalty on ``|W|^2`` of maps that are fitted.
        range_scalings: The n2's of the intrinsic dimension; null takes 2, 4, 8, ... up to a quarter
            of the held-out X's, 256 at most.
        ks: Sizes of the neighborhoods whose overlap is taken.
        n_permutations: Of the test; all there are, if no more.
        seed: Of the permutations.

    Raises:
        ConfigError: The probe's folder holds no finished probe, or there are too few knowledges.
        LanguageModelError: The LM cannot be read.
    """

    def __init__(
        self,
        lm: LMConfig = LMConfig(),  # noqa: B008 (frozen)
        probe: str | None = None,
        knowledges: list[str] | str = "attribute",
        knowledge_files: list[str] = [],  # noqa: B006 (never changed)
        ridge: float = 0.0,
        range_scalings: list[int] | None = None,
        ks: list[int] = [2, 10, 31],  # noqa: B006
        n_permutations: int = 9999,
        seed: int = 0,
    ) -> None:
        lm = LMConfig(**lm) if isinstance(lm, Mapping) else lm
        if not 0 <= ridge < math.inf:
            raise ConfigError(f"model.ridge is {ridge}; it must be 0 or more.")
        if n_permutations < 1 or seed < 0:
            raise ConfigError("model.n_permutations must be at least 1, and model.seed 0 or more.")
        super().__init__(lm)
        self.save_hyperparameters(
            {
                "lm": asdict(lm), "probe": probe, "knowledges": knowledges,
                "knowledge_files": knowledge_files, "ridge": ridge,
                "range_scalings": range_scalings, "ks": ks, "n_permutations": n_permutations,
                "seed": seed,
            },
            logger=False,
        )  # fmt: skip
        self.probed = None if probe is None else _read_probe(Path(probe))
        names, pairs = split_names(knowledges), None
        if self.probed is not None:
            knowledge_files = knowledge_files or self.probed["settings"]["knowledge_files"]
            names, pairs = [], [f"{p['source']}->{p['target']}" for p in self.probed["pairs"]]
        self.layout = build_layout(
            self.lm.tokenizer, Catalogue.load(*knowledge_files), names, pairs
        )
        n_columns = self.layout.n_columns if self.probed is None else 0
        self.moments = nn.ModuleDict({half: JointMoments(n_columns) for half in _HALVES})
        self.report: KnowledgeGeometryReport | None = None
        self._states: dict[str, list[tuple[int, Tensor]]] = {}

    # -- reading -----------------------------------------------------------------------------

    def on_test_start(self) -> None:
        """Begin anew, and refuse what does not fit.

        Raises:
            ConfigError: The X's come from elsewhere than `SubjectsDataModule`, there are too few for a
                range scaling or k, or the probe is of another LM.
        """
        for metric in self.moments.values():
            metric.reset()  # type: ignore[operator]
        self._states = {name: [] for name in self.layout.domains}
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, SubjectsDataModule):
            raise ConfigError(
                f"KnowledgeGeometry asks about SubjectsDataModule; data is {type(data).__name__}. "
                "Pass --data SubjectsDataModule."
            )
        if self.probed is not None:
            theirs = self.probed["lm"]["fingerprint"]
            differs = [part for part, ours in self.lm.fingerprint.items()
                       if theirs.get(part) != ours]  # fmt: skip
            if differs:
                raise ConfigError(
                    f"the probe in {self.hparams['probe']} is of "
                    f"{self.probed['lm']['name_or_path']}, whose "
                    f"{differs[0]} differs from that of {self.lm.config.name_or_path} as it is "
                    "read here. Give model.lm as that run has it (its config.yaml)."
                )
        n = len(data.halves["test"])
        self.settings = CloudSettings.of(
            n, self.hparams["range_scalings"], self.hparams["ks"], False, "model"
        )
        config = self.lm.model.config.get_text_config()
        size = len(self._states) * n * config.num_hidden_layers * config.hidden_size * 4 / 2**30
        rank_zero_info(
            f"{len(self._states)} clouds of {n} prompts; hidden states of {size:.2f} GiB"
        )

    @torch.no_grad()
    def test_step(self, batch: SubjectBatch, batch_idx: int) -> None:
        """Ask all prompts about some X's.

        Raises:
            NonFiniteError: A layer has NaN or infinite hidden states.
        """
        del batch_idx
        half = batch.half
        if self.probed is None:
            rows = domain_rows(self.lm, self.layout, batch.subjects)
            if not batch.is_padding:
                self.moments[half].update(rows)  # type: ignore[operator]
        if half == "fit":
            return
        for name, domain in self.layout.domains.items():
            prompts = [domain.knowledge.prompt(x) for x in batch.subjects]
            states = read_last_states(self.lm, prompts).cpu()
            if not batch.is_padding:
                self._states[name].append((batch.first, states))

    # -- scoring -----------------------------------------------------------------------------

    def on_test_epoch_end(self) -> None:
        """Compare all clouds, and set them beside the maps."""
        near: dict[str, Tensor] = {}
        dimension: dict[str, Tensor] = {}
        n_subjects = 0
        for name in self.layout.domains:
            parts = sorted((p for part in gather(self._states.pop(name)) for p in part),
                           key=lambda part: part[0])  # fmt: skip
            cloud = torch.cat([states for _, states in parts]).transpose(0, 1).to(self.device)
            n_subjects = cloud.shape[1]
            nearest = self.settings.nearest(cloud)
            needed = max(self.settings.range_scalings) + 1
            for layer in (nearest.distinct.sum(-1) < needed).nonzero()[:1].flatten().tolist():
                raise SubjectsError(
                    f"the cloud of {name} has {int(nearest.distinct[layer].sum())} distinct points "
                    f"of {n_subjects} in layer {layer + 1}; range scaling {needed - 1} needs "
                    f"{needed}. Raise data.n_subjects, or name smaller model.range_scalings."
                )
            # Of a cloud no more is kept than who is near whom.
            near[name] = neighborhoods(nearest, max(self.settings.ks))
            dimension[name] = intrinsic_dimension(
                nearest, self.settings.range_scalings
            ).dimension.cpu()
        names = list(near)
        overlap = {
            (a, b): neighborhood_overlap(near[a], near[b], self.settings.ks).mean(1).cpu().numpy()
            for i, a in enumerate(names)
            for b in names[i + 1 :]
        }
        self.report = KnowledgeGeometryReport(
            lm=self.lm.config.name_or_path,
            n_subjects=n_subjects,
            scores=self._fitted_scores() if self.probed is None else _told_scores(self.probed),
            layers=self.settings.layers(next(iter(dimension.values())).shape[0]),
            range_scalings=self.settings.range_scalings,
            ks=self.settings.ks,
            dimension={name: values.numpy() for name, values in dimension.items()},
            overlap=overlap,
            wording=self._wording(list(overlap)),
            n_permutations=self.hparams["n_permutations"],
            seed=self.hparams["seed"],
        )

    def _wording(self, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], float]:
        """Share of the tokens of two prompts that both have (Jaccard), X left out."""
        words = {
            name: set(self.lm.tokenizer(domain.knowledge.prompt(" "), add_special_tokens=False)
                      ["input_ids"])
            for name, domain in self.layout.domains.items()
        }  # fmt: skip
        return {(a, b): len(words[a] & words[b]) / len(words[a] | words[b]) for a, b in pairs}

    def _fitted_scores(self) -> list[OrderedScore]:
        """Label-wise r and Hit@1 of maps that are fitted on the fit half."""
        fit, test = (self.moments[half].gather() for half in _HALVES)  # type: ignore[operator]
        found = {}
        for source in self.layout.sources:
            x = self.layout.columns(source).to(fit.mean.device)
            y = self.layout.target_columns(source).to(fit.mean.device)
            squares = LeastSquares(fit.scatter[x][:, x], fit.scatter[x][:, y])
            weight = squares.weight(self.hparams["ridge"])
            r = dict(split_targets(self.layout, source, label_r(test, weight, x, y).cpu()))
            for target, block in split_targets(self.layout, source, weight, dim=0):
                reference = self.layout.references[source, target]
                hits: dict[str, float] = {}
                if reference is not None:
                    hits = hit_rates(block.cpu(), torch.from_numpy(reference))[0].by_rank()
                found[source, target] = OrderedScore(
                    source, target, number(summarize(r[target]).mean), None, hits
                )
        return [found[pair] for pair in self.layout.pairs]

    # -- the end -----------------------------------------------------------------------------

    def on_test_end(self) -> None:
        """Write the numbers, tables and figures."""
        self.write_study(self.report)


def _read_probe(folder: Path) -> dict[str, Any]:
    """The results of a finished probe."""
    path = folder / "results.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.probe {folder} holds no finished run: {path.name} cannot be read ({error})."
        ) from error
    if not isinstance(found, dict) or found.get("study") != "linear_probe":
        raise ConfigError(f"model.probe {folder} is no run of LinearProbe. Name the folder of one.")
    return found


def _told_scores(probed: Mapping[str, Any]) -> list[OrderedScore]:
    return [
        OrderedScore(
            pair["source"],
            pair["target"],
            pair["label_mean"],
            pair.get("excess"),
            (pair.get("precision") or {}).get("influenced", {}),
        )
        for pair in probed["pairs"]
    ]
