"""The runs of a reproduction, and what an LM's vocabulary leaves out of them."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lincorr_lightning.config import find_packaged, read_config
from lincorr_lightning.errors import ConfigError, DomainError
from lincorr_lightning.io import safe_names
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.knowledge.answer_tokens import unknown_words
from lincorr_lightning.knowledge.domain import build_domain
from lincorr_lightning.reproduce.items import (
    CITY,
    PLACES,
    PRINTED_EDITS,
    SUBWORD_EDITS,
    SUBWORD_PROBE,
    Item,
    needed_runs,
    probe_run,
)
from lincorr_lightning.reproduce.settings import Settings, StudyConfig
from lincorr_lightning.results.paper import paper_numbers
from lincorr_lightning.results.saved_run import config_verb

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LINEAR_MAP, VERSION = "linear_map", "version_0"
# An edit has fewer steps, so that only its end is measured.
_AT_THE_END = 100_000
NAMES = "name_country->country"
CONTROL = "color"
"""Knowledge that an edit should not change, as a null of table 5."""


@dataclass(frozen=True)
class PlannedRun:
    """A run of `lincorr`.

    Attributes:
        name: Its name, as ``edits_city->country``.
        folder: The folder of its ``version_0``.
        arguments: Command line without the LM.
        study: One of `STUDIES`.
        what: What it measures, in words.
        probe: Folder of the probe whose maps are used, on subjects that they were not fitted on.
        answers: Answers that the edits teach, one each; empty if they are sampled.
    """

    name: str
    folder: Path
    arguments: tuple[str, ...]
    study: str
    what: str
    probe: Path | None = None
    answers: tuple[str, ...] = ()


@dataclass
class LMPlan:
    """The runs on one LM.

    Attributes:
        lm: The LM.
        after: The same LM after post-training; None without.
        name: Name of its folder.
        runs: The runs, in their order.
        left_out: What cannot be run, and why: the name of a run or kind of knowledge.
        too_few_subjects: That the vocabulary has fewer subjects than the probes ask for; or empty.
        tokenizer: The LM's tokenizer; None before `plan_lm`.
        fingerprint: The LM's fingerprint.
        after_fingerprint: That of the LM after post-training.
    """

    lm: str
    after: str | None
    name: str
    runs: list[PlannedRun] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    too_few_subjects: str = ""
    tokenizer: PreTrainedTokenizerBase | None = None
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    after_fingerprint: Mapping[str, str] = field(default_factory=dict)


def packaged(name: str) -> Path:
    """Return a packaged config, or the path as it is.

    Raises:
        ConfigError: There is neither.
    """
    if Path(name).is_file():
        return Path(name)
    found = find_packaged(Path(name))
    if found is None:
        raise ConfigError(f"there is no config {name}, neither as a file nor in the package.")
    return found


def plan_lm(
    plan: LMPlan,
    items: Iterable[Item],
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    n_subjects: int,
) -> None:
    """Fill the plan of an LM.

    Args:
        plan: The plan, without runs.
        items: The tables and figures.
        settings: The settings.
        tokenizer: The LM's tokenizer.
        folder: Folder of its runs.
        n_subjects: Number of subjects that the vocabulary has.
    """
    catalogue = Catalogue.load()
    plan.tokenizer = tokenizer
    left_out: dict[str, str] = {}
    known = _known(catalogue, tokenizer, left_out)
    n_lms = len(settings.lm)
    wanted = [item for item in items if item.is_available(plan.after is not None, n_lms)]
    names = needed_runs(wanted)
    # Families of probes, and both ends of relations.
    used = {part for name in names for part in name.partition("_")[2].split("->")}
    plan.left_out |= {
        name: reason
        for name, reason in left_out.items()
        if catalogue[name].family in used or name in used
    }
    planner = _Planner(catalogue, known, left_out, settings, n_subjects, tokenizer, folder)
    folders = safe_names(names)
    for name in names:
        found = planner.run(name, folder / folders[name])
        if isinstance(found, str):
            plan.left_out[name] = found
        else:
            plan.runs.append(found)


def _known(
    catalogue: Catalogue, tokenizer: PreTrainedTokenizerBase, left_out: dict[str, str]
) -> dict[str, list[str]]:
    """Return the labels of each kind of knowledge; note which have none, and why."""
    found = {}
    for name, knowledge in catalogue.items():
        unknown = unknown_words(knowledge, tokenizer)
        try:
            labels = [text.strip() for text in build_domain(knowledge, tokenizer).texts]
        except DomainError:
            left_out[name] = "no answer is a label of the vocabulary"
            continue
        if unknown:
            left_out[name] = f"the vocabulary lacks words of the prompt: {', '.join(unknown)}"
        elif len(labels) < 2:
            left_out[name] = "only one answer is a label of the vocabulary"
        else:
            found[name] = labels
    return found


def family_pairs(family: str, catalogue: Catalogue, known: Iterable[str]) -> list[str]:
    """Return the pairs of a family: all, and for cross_language those of one kind of knowledge."""
    names = [n for n in catalogue if catalogue[n].family == family and n in set(known)]
    if family != "cross_language":
        pairs = [f"{source}->{target}" for source, target in permutations(names, 2)]
        # Tables 8, 9 and 14 have a pair whose target is an attribute.
        return pairs + [NAMES] * (family == "simile" and set(NAMES.split("->")) <= set(known))
    kinds = dict.fromkeys(catalogue[name].kind for name in names)
    groups = [
        [n for n in known if (catalogue[n].kind or n) == kind and n in (kind, *names)]
        for kind in kinds
    ]
    return [f"{s}->{t}" for group in groups for s, t in permutations(group, 2)]


@dataclass(frozen=True)
class _Planner:
    """Plans the runs of one LM.

    Attributes:
        catalogue: The catalogue of knowledge.
        known: Labels of each kind of knowledge that has some.
        left_out: Why other kinds of knowledge have none.
        settings: The settings.
        n_available: Number of subjects that the vocabulary has.
        tokenizer: The LM's tokenizer.
        folder: Folder of the runs.
    """

    catalogue: Catalogue
    known: Mapping[str, Sequence[str]]
    left_out: Mapping[str, str]
    settings: Settings
    n_available: int
    tokenizer: PreTrainedTokenizerBase
    folder: Path

    def run(self, name: str, where: Path) -> PlannedRun | str:
        """Return a run in the folder `where`, or why it cannot be."""
        kind, _, rest = name.partition("_")
        if kind in ("probe", "after"):
            return self._probe(name, where, kind, rest)
        relation = CITY if name in (SUBWORD_EDITS, PRINTED_EDITS) else rest
        lacking = [end for end in relation.split("->") if end not in self.known]
        if lacking:
            return f"{lacking[0]}: {self.left_out[lacking[0]]}"
        if kind == "edits":
            return self._edits(name, where, relation)
        return self._ablation(name, where, relation)

    def _probe(self, name: str, where: Path, kind: str, family: str) -> PlannedRun | str:
        """Plan the fit of a family's maps, or (`kind` ``after``) their scores on the tuned LM."""
        wanted = study_setting(self.settings, kind, "data", "n_subjects")
        n_subjects = self.n_available if wanted is None else min(wanted, self.n_available)
        options: dict[str, Any]
        if name == SUBWORD_PROBE:
            used, options = CITY.split("->"), {"model.subwords": True, "model.pairs": [CITY]}
        else:
            pairs = family_pairs(family, self.catalogue, self.known)
            if not pairs:
                return f"fewer than two kinds of knowledge of the family {family} have labels"
            used = list(dict.fromkeys(end for pair in pairs for end in pair.split("->")))
            options = {"model.pairs": pairs}
        options["model.knowledge"] = used
        if kind == "after":
            maps = self.folder / probe_run(family) / VERSION / LINEAR_MAP
            options = {"model.before": None, "model.linear_map": str(maps)}
        what = f"{len(used)} prompts of {n_subjects:,} subjects"
        fixed = {"data.n_subjects": n_subjects}
        return self._planned(name, where, kind, what, options, fixed)

    def _edits(self, name: str, where: Path, relation: str) -> PlannedRun | str:
        with_subwords = name == SUBWORD_EDITS
        # The subword probe also has beginnings of words as source labels, which edits lack.
        probed = None if with_subwords else relation_probe(relation, self.catalogue)
        probe = None if probed is None else self.folder / probed / VERSION
        stored = None if probe is None else str(probe / LINEAR_MAP)
        controls = [CONTROL] if CONTROL in self.known and CONTROL not in relation else []
        outcomes = {"controls": controls, "linear_map": stored, "every_n_steps": _AT_THE_END}
        callbacks: list[dict[str, Any]] = [
            {"class_path": "Generalization", "init_args": outcomes}
        ]  # fmt: skip
        if name not in PLACES:
            gradients = {"class_path": "GradientCorrelation", "init_args": {"linear_map": stored}}
            callbacks.append(gradients)
        options = {
            "data.relation": relation, "trainer.callbacks": callbacks, "model.forecast": False,
            "data.subwords": with_subwords,
        }  # fmt: skip
        n_edits, fixed = _number(self.settings, "edits", "data", "n_edits"), {}
        answers: tuple[str, ...] = ()
        if name == PRINTED_EDITS:
            printed = [n.answer for n in paper_numbers() if n.place == PLACES[name]]
            labels = self.known[relation.partition("->")[0]]
            answers = tuple(city for city in dict.fromkeys(printed) if city in labels)
            if not answers:
                return "no city of the paper's table is a label of the vocabulary"
            n_edits, fixed = len(answers), {"data.n_edits": None}
        run = self._planned(name, where, "edits", f"{n_edits} edits", options, fixed)
        return replace(run, probe=probe, answers=answers)

    def _ablation(self, name: str, where: Path, relation: str) -> PlannedRun:
        mappings = ["reference", "permuted", "letters"] if relation == CITY else ["reference"]
        options: dict[str, Any] = {"data.relation": relation, "model.mapping": mappings}
        if relation != CITY:
            options["data.max_source_labels"] = None  # they have few labels
        epochs = sum(
            _number(self.settings, "ablation", "model", f"{phase}.epochs")
            for phase in ("compose", "learn")
        )
        n_seeds = len(study_setting(self.settings, "ablation", "model", "seeds") or [0])
        n = len(mappings) * n_seeds
        what = ("1 training" if n == 1 else f"{n} trainings") + f" of {epochs:,} epochs"
        return self._planned(name, where, "ablation", what, options, {})

    def _planned(
        self,
        name: str,
        where: Path,
        study: str,
        what: str,
        options: Mapping[str, Any],
        fixed: Mapping[str, Any],
    ) -> PlannedRun:
        """Return a run; the settings' options replace `options`, and `fixed` replaces those."""
        fixed = {"trainer.default_root_dir": str(where.parent), "name": where.name, **fixed}
        arguments = _arguments(self.settings.studies[study], self.settings, options, fixed)
        return PlannedRun(name, where, tuple(arguments), study, what)


def study_setting(settings: Settings, study: str, part: str, name: str) -> Any:
    """Return a setting of a study, as the options or its config have it; None if none has it."""
    chosen = settings.studies[study]
    for options in (chosen.options, settings.options):
        if f"{part}.{name}" in options:
            return options[f"{part}.{name}"]
    found: Any = read_config(str(packaged(chosen.config))).get(part, {}).get("init_args", {})
    for key in name.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _number(settings: Settings, study: str, part: str, name: str) -> int:
    value = study_setting(settings, study, part, name)
    if not isinstance(value, int):
        config = settings.studies[study].config
        raise ConfigError(f"{config} has no number {part}.init_args.{name}; add it.")
    return value


def relation_probe(relation: str, catalogue: Catalogue) -> str | None:
    """Return the name of the probe that has the map of a relation; None if there is none."""
    families = {catalogue[end].family for end in relation.split("->")}
    for family in ("cross_language", "simile"):  # these also have pairs with attributes
        if family in families:
            return probe_run(family)
    return probe_run(families.pop()) if len(families) == 1 else None


def _arguments(
    study: StudyConfig, settings: Settings, options: Mapping[str, Any], fixed: Mapping[str, Any]
) -> Iterator[str]:
    config = packaged(study.config)
    yield config_verb(config.read_text(encoding="utf-8"))
    for file in (config, *map(packaged, settings.overlays)):
        yield "--config"
        yield str(file)
    for key, value in {**options, **settings.options, **study.options, **fixed}.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        yield f"--{key}={text}"


def describe(
    plan: LMPlan, items: Iterable[Item], n_lms: int, finished: Container[str]
) -> Iterator[str]:
    """Yield the lines that show a plan.

    Args:
        plan: The plan.
        items: The tables and figures.
        n_lms: Number of LMs on the page.
        finished: Names of the runs that are finished.
    """
    catalogue = Catalogue.load()
    runs = "1 run" if len(plan.runs) == 1 else f"{len(plan.runs)} runs"
    yield f"{plan.name}: {runs}" + (f", tuned: {plan.after}" * bool(plan.after))
    for run in plan.runs:
        yield f"  {run.name}: {run.what}" + (", finished" if run.name in finished else "")
    if plan.too_few_subjects:
        yield f"  {plan.too_few_subjects}"
    served = [item for item in items if item.is_available(plan.after is not None, n_lms)]
    by_reason: dict[tuple[str, str], list[str]] = {}
    for name, reason in plan.left_out.items():
        short = reason.partition(":")[0] if name in catalogue else reason
        where = "; ".join(i.numbers for i in served if _is_part(name, i, catalogue))
        if name in catalogue and not where:
            continue  # no table that was asked for has it
        by_reason.setdefault((short, where), []).append(name)
    for (reason, where), names in by_reason.items():
        yield f"  left out: {', '.join(names)} ({where}): {reason}"
    for item in items:
        if item not in served:
            needed = "--after" if item.needs_after and not plan.after else f"{item.n_lms} LMs"
            yield f"  left out: {item.numbers}: needs {needed}"


def _is_part(name: str, item: Item, catalogue: Catalogue) -> bool:
    """Return whether a run or a kind of knowledge is part of an item."""
    printed = [n.relation.split("->") for n in paper_numbers() if n.place in item.places]
    if printed and name in catalogue:  # a table has some pairs of a family only
        return any(name in ends for ends in printed)
    for run in item.runs:
        kind, _, rest = run.partition("_")
        if name == run or name in rest.split("->"):
            return True
        if kind in ("probe", "after") and name in catalogue and catalogue[name].family == rest:
            return True
    return False
