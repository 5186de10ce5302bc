"""Knowledge geometry: closeness of two prompts' clouds against the correlation of their logits."""

from collections.abc import Mapping
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lincorr_lightning.data.subjects import SubjectBatch, require_fit_half_first
from lincorr_lightning.distributed import gather
from lincorr_lightning.errors import ConfigError, require
from lincorr_lightning.geometry import observables
from lincorr_lightning.geometry.closeness import Floats, KnowledgeCloseness
from lincorr_lightning.geometry.token_clouds import CloudSettings, read_last_states
from lincorr_lightning.io import read_json
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.knowledge.catalogue import split_names
from lincorr_lightning.linear_map.baselines import fit_and_score
from lincorr_lightning.linear_map.layout import build_layout, domain_rows
from lincorr_lightning.linear_map.scores import PairScore
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.metrics import JointMoments
from lincorr_lightning.results.results import RESULTS_FILE, SCHEMA, Results
from lincorr_lightning.study import LMStudy


class KnowledgeGeometry(LMStudy):
    """Compares the closeness of prompts in geometry with the correlation of their logits.

    ``lincorr test`` reads the prompt of each kind of knowledge for the same held-out subjects. The
    cloud of a kind of knowledge at a layer is the hidden states of its prompts' last tokens, a
    point per subject. Two measures of closeness, the overlap of neighborhoods in two clouds (are a
    subject's neighbors the same under both prompts?) and the difference of their intrinsic
    dimensions, are correlated with the label-wise r and Hit@1 of the linear maps between the two,
    over pairs, with a test that permutes the kinds of knowledge. So is the similarity of the
    prompts' wording, which is the null of closeness; that of the scores are random words after the
    same prompts and the strongest pairing by the vocabulary alone, as in the probe. Hidden states
    of all prompts are kept in memory.

    Reads any DataLoader of `SubjectBatch`; to fit maps, with the fit half first (``test_on: all``).

    Args:
        lm: The LM.
        probe: Folder of a finished run of LinearProbe on this LM, whose scores are taken; None fits
            maps on the fit half of the subjects.
        knowledge: Kinds of knowledge by name or family, if maps are fitted; a probe has its own.
        knowledge_files: YAML files with more knowledge.
        ridge: Penalty on ``|W|^2`` of maps that are fitted.
        random_labels: Number of source labels whose r is compared with that of as many random
            words, if maps are fitted; 0 leaves out random words and the vocabulary.
        range_scalings: Range scalings n2 of the intrinsic dimension; None takes 2, 4, 8, ... up to
            a quarter of the held-out subjects, at most 256.
        ks: Sizes of the neighborhoods whose overlap is taken.
        n_permutations: Number of permutations of a test; all permutations if there are no more.
        prefix: Text before each prompt, such as examples; with `lm.chat_template`, the user's turn.
        seed: Seed of the permutations.

    After a test, `closeness` holds the measurements.
    """

    study = "knowledge_geometry"
    batch_type = SubjectBatch
    shards_lm = True

    def __init__(
        self, lm: LMConfig = LMConfig(), probe: str | None = None,
        knowledge: list[str] | str = "attribute", knowledge_files: list[str] = [],  # noqa: B006
        ridge: float = 0.0, random_labels: int = 20, range_scalings: list[int] | None = None,
        ks: list[int] = [2, 10, 31], n_permutations: int = 9999, seed: int = 0,  # noqa: B006
        prefix: str = "",
    ) -> None:  # fmt: skip
        super().__init__(lm, prefix)
        require("model.ridge", ridge, at_least=0)
        require("model.random_labels", random_labels, at_least=0)
        require("model.n_permutations", n_permutations, at_least=1)
        require("model.seed", seed, at_least=0)
        self.save_hyperparameters(logger=False)
        self.probe, self.ridge, self.random_labels = probe, ridge, random_labels
        self.range_scalings, self.ks = range_scalings, ks
        self.n_permutations, self.seed = n_permutations, seed
        self.probed = None if probe is None else _read_probe(Path(probe))
        names, pairs = split_names(knowledge), None
        if self.probed is not None:
            knowledge_files = knowledge_files or self.probed["settings"]["knowledge_files"]
            pairs = ["{source}->{target}".format(**pair) for pair in self.probed["pairs"]]
            random_labels = 0
        catalogue = Catalogue.load(*knowledge_files)
        tokenizer, n = self.lm.tokenizer, random_labels
        self.layout = build_layout(tokenizer, catalogue, names, pairs, n_random=n)
        kept = (0,) if self.probed is not None else (self.layout.n_columns, self.layout.blocks)
        self.fit_moments, self.test_moments = JointMoments(*kept), JointMoments(*kept)
        self.closeness: KnowledgeCloseness | None = None
        self._states: dict[str, list[tuple[int, Tensor]]] = {}

    def setup(self, stage: str) -> None:
        """Refuse to read only the first batches, which are those of the fit half."""
        super().setup(stage)
        limit = self.trainer.limit_test_batches
        # 1.0 is all batches, and 1 is the first.
        if (isinstance(limit, int) or limit < 1) and self.probed is None:
            raise ConfigError(
                f"trainer.limit_test_batches is {limit}; it must be 1.0, as the held-out subjects "
                "come last. For a short run, lower data.n_subjects."
            )

    def on_test_start(self) -> None:
        """Forget an earlier test, and refuse a probe of another LM."""
        self.closeness = None
        self.fit_moments.reset()
        self.test_moments.reset()
        self._states = {name: [] for name in self.layout.domains}
        if self.probed is None:
            return
        other = self.probed["lm"]
        for part, value in self.lm_info["fingerprint"].items():
            if other["fingerprint"].get(part) != value:
                raise ConfigError(
                    f"the probe in {self.probe} is of {other['name_or_path']}, whose "
                    f"{part} differs from that of {self.lm.config.name_or_path} as it is read "
                    "here. Give model.lm and model.prefix as that run has them (its config.yaml)."
                )

    @torch.no_grad()
    def test_step(self, batch: SubjectBatch, batch_idx: int) -> None:
        if self.probed is None:
            require_fit_half_first(batch, batch_idx)
            rows = domain_rows(self.lm, self.layout.reads, batch.subjects)
            if not batch.is_padding:
                (self.fit_moments if batch.half == "fit" else self.test_moments).update(rows)
        if batch.half == "fit":
            return
        for name, domain in self.layout.domains.items():
            prompts = [domain.knowledge.prompt(subject) for subject in batch.subjects]
            states = read_last_states(self.lm, prompts).cpu()
            if not batch.is_padding:
                self._states[name].append((batch.first, states))

    def on_test_epoch_end(self) -> None:
        if self.probed is not None:
            scores = [PairScore(**pair) for pair in self.probed["pairs"]]
        else:
            fit, test = self.fit_moments.gather(), self.test_moments.gather()
            scores = fit_and_score(fit, test, self.layout, self.lm, self.ridge, self.random_labels)
        near: dict[str, Tensor] = {}
        dimension: dict[str, Floats] = {}
        for name in self.layout.domains:
            parts = sorted(chain(*gather(self._states.pop(name))), key=lambda part: part[0])
            # The hidden states of all ranks in the subjects' order.
            cloud = torch.cat([states for _, states in parts]).transpose(0, 1).to(self.device)
            n = cloud.shape[1]
            settings = CloudSettings.of(n, self.range_scalings, self.ks, False, "model")
            way_out = "Raise data.n_subjects, or name smaller model.range_scalings."
            nearest = settings.nearest(cloud, f"the cloud of {name}", way_out)
            # Of a cloud, only each point's neighbors are kept.
            near[name] = observables.neighborhoods(nearest, max(settings.ks))
            by_layer = observables.intrinsic_dimension(nearest, settings.range_scalings)
            dimension[name] = by_layer.cpu().numpy()
        overlap = {}
        for a, b in combinations(near, 2):
            by_token = observables.neighborhood_overlap(near[a], near[b], settings.ks)
            overlap[a, b] = by_token.mean(1).cpu().numpy()
        prompts = {name: each.knowledge.prompt(" ") for name, each in self.layout.domains.items()}
        self.closeness = KnowledgeCloseness(
            n, scores, settings.layers(len(cloud)), settings.range_scalings, settings.ks,
            dimension, overlap, wording_similarity(self.lm.tokenizer, prompts),
            self.n_permutations, self.seed,
        )  # fmt: skip

    def build_results(self) -> Results | None:
        if self.closeness is None:
            return None
        from lincorr_lightning.geometry.results import knowledge_geometry_results

        return knowledge_geometry_results(self.closeness, self.lm.config.name_or_path)


def wording_similarity(
    tokenizer: PreTrainedTokenizerBase, prompts: Mapping[str, str]
) -> dict[tuple[str, str], float]:
    """Return the fraction of the tokens of two prompts that both have, by pair (Jaccard index)."""
    rows = tokenizer([*prompts.values()], add_special_tokens=False)["input_ids"]
    pairs = combinations(zip(prompts, map(set, rows), strict=True), 2)
    return {(a, b): len(own & other) / len(own | other) for (a, own), (b, other) in pairs}


def _read_probe(folder: Path) -> dict[str, Any]:
    way_out = f"model.probe {folder} holds no finished run; name the folder of one."
    results = read_json(folder / RESULTS_FILE, ConfigError, way_out)
    if (results.get("study"), results.get("schema")) != ("linear_probe", SCHEMA):
        raise ConfigError(f"model.probe {folder} is not a run of LinearProbe of this version.")
    return results
