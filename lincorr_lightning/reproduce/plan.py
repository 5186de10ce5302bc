"""The runs of a reproduction: its settings, and ``plan.yaml`` on the vocabulary of an LM."""

import json
from argparse import ArgumentError
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentParser

from lincorr_lightning.cli.config import find_config, read_config
from lincorr_lightning.cli.option_errors import explain
from lincorr_lightning.errors import ConfigError, LinearMapError, ReportError
from lincorr_lightning.functional import random_hit_rates
from lincorr_lightning.io import safe_names
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.knowledge.answer_tokens import unknown_words
from lincorr_lightning.knowledge.audit import audit_domains
from lincorr_lightning.linear_map import LinearMap
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.results.paper import PaperNumber, paper_numbers, paper_section, quantities
from lincorr_lightning.results.saved_run import SavedRun, config_verb

_LINEAR_MAP = "linear_map"
_VERSION = "version_0"
_NAMES = "name_country->country"
_CONTROL = "color"  # knowledge that an edit should not change, as a null of table 5
# An edit has fewer steps: only its end, and its first gradient, are measured.
_EVERY_N_STEPS = 100_000


@dataclass(frozen=True)
class Settings:
    """Settings of a reproduction; ``configs/reproduce.yaml`` explains them."""

    lm: list[str]
    after: list[str]
    size: str
    only: list[str]
    output: str
    overlays: list[str]
    options: dict[str, Any]
    sizes: dict[str, dict[str, dict[str, Any]]]

    @property
    def studies(self) -> Mapping[str, dict[str, Any]]:
        """Config and options of each study of the chosen size."""
        return self.sizes[self.size]


def read_settings(path: str, changed: Mapping[str, Any], options: Mapping[str, Any]) -> Settings:
    """Read the settings from a YAML file; raise ConfigError if they are not valid.

    Those `changed` replace the file's; None leaves a setting as it is. `options` come before those
    of the file: of all runs, as ``model.lm.dtype``, or of one study, as ``edits.data.n_edits``.
    """
    content = read_config(path) | {k: v for k, v in changed.items() if v is not None}
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Settings)
    try:
        settings = Settings(**parser.parse_object(content).as_dict())
    except ArgumentError as error:
        raise ConfigError(f"{path}: {explain(error, ['--config', path], parser)}") from error
    if settings.size not in settings.sizes:
        raise ConfigError(f"size is {settings.size!r}; {path} has {', '.join(settings.sizes)}.")
    if missing := {"probe", "edits", "ablation", "after"} - settings.studies.keys():
        raise ConfigError(f"{path}: sizes.{settings.size} lacks {', '.join(sorted(missing))}.")
    if not settings.lm:
        raise ConfigError("name an LM, as in: lincorr reproduce --lm MY/CHECKPOINT")
    if settings.after and len(settings.after) != len(settings.lm):
        raise ConfigError(
            f"there are {len(settings.after)} tuned LMs for {len(settings.lm)} LMs. Pass --after "
            "once for each --lm, in the same order, or not at all."
        )
    studies = settings.studies
    everywhere = {k: v for k, v in options.items() if k.partition(".")[0] not in studies}
    settings.options.update(everywhere)
    for study, config in studies.items():
        prefix = f"{study}."
        of_study = {k.removeprefix(prefix): v for k, v in options.items() if k.startswith(prefix)}
        config["options"].update(everywhere | of_study)
    return settings


@dataclass(frozen=True)
class Item:
    """One or more tables or figures of the paper that show the same quantity, see ``plan.yaml``."""

    places: tuple[str, ...]
    title: str
    runs: tuple[str, ...]
    figure: str = ""
    further: tuple[str, ...] = ()
    note: str = ""
    n_lms: int = 1
    needs_after: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Names for the command line, as ``table2``."""
        return tuple(place.lower().replace(" ", "") for place in self.places)

    @property
    def numbers(self) -> str:
        """The numbers, as ``Tables 8 and 14``."""
        kind = self.places[0].split()[0]
        *numbers, last = [place.split()[1] for place in self.places]
        return f"{kind}s {', '.join(numbers)} and {last}" if numbers else self.places[0]

    @property
    def heading(self) -> str:
        """The numbers, their sections in the paper, and the title."""
        sections = ", ".join(dict.fromkeys(map(paper_section, self.places)))
        return f"{self.numbers} ({sections}): {self.title}"

    def lacks(self, has_after: bool, n_lms: int) -> str:
        """Return what else is needed, given a number of LMs; empty if nothing is."""
        if self.needs_after and not has_after:
            return "--after"
        return f"{self.n_lms} LMs" if n_lms < self.n_lms else ""


@cache
def plan_data() -> Mapping[str, Any]:
    """Return the content of ``plan.yaml``."""
    return dict(yaml.safe_load(Path(__file__).with_name("plan.yaml").read_text(encoding="utf-8")))


@cache
def all_items() -> tuple[Item, ...]:
    """Return all tables and figures in the paper's order."""
    groups = plan_data()["groups"]
    items = []
    for entry in plan_data()["items"]:
        runs = tuple(run for name in entry["runs"] for run in groups.get(name, [name]))
        items.append(Item(**entry | {"places": tuple(entry["places"]), "runs": runs}))
    return tuple(items)


def select_items(only: Sequence[str]) -> list[Item]:
    """Return the items of some tables and figures; all if none is named."""
    known = [key for item in all_items() for key in item.keys]
    wanted = {name.lower().replace(" ", ""): name for name in only}
    for key, name in wanted.items():
        if key not in known:
            names = ", ".join(known)
            raise ConfigError(f"there is no table or figure {name!r} to reproduce, only {names}.")
    return [item for item in all_items() if not only or not wanted.keys().isdisjoint(item.keys)]


@dataclass(frozen=True)
class PlannedRun:
    """A run of `lincorr`."""

    name: str  # as edits_city->country
    folder: Path
    study: str  # of a size, as edits
    verb: str  # of the command line, as fit
    configs: tuple[str, ...]
    options: Mapping[str, Any]  # over the configs, without the LM
    probe: Path | None = None  # edits are of subjects that its maps were not fitted on
    answers: tuple[str, ...] = ()  # of the edits, one each; empty if they are sampled

    @property
    def key(self) -> str:
        """Its LM's folder and its name."""
        return f"{self.folder.parent.name}/{self.name}"

    def saved(self) -> SavedRun | None:
        """Return the finished run; None if it is not finished, or its files are damaged."""
        with suppress(ReportError):
            return SavedRun.read(self.folder / _VERSION)
        return None

    @property
    def arguments(self) -> Iterator[str]:
        """The command line without the LM."""
        yield self.verb
        yield from (f"--config={config}" for config in self.configs)
        for key, value in self.options.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield f"--{key}={text}"


@dataclass
class LMRuns:
    """The runs on one LM: the plan, and what is finished of it."""

    name: str  # of its folder
    lm: str
    after: str | None = None  # the same LM after post-training
    tokenizer: Any = None
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    after_fingerprint: Mapping[str, str] = field(default_factory=dict)
    labels: dict[str, list[str]] = field(default_factory=dict)  # by kind of knowledge
    left_out: dict[str, str] = field(default_factory=dict)  # run or kind of knowledge -> why
    runs: list[PlannedRun] = field(default_factory=list)
    finished: dict[str, SavedRun] = field(default_factory=dict)  # by name, as the next two
    errors: dict[str, str] = field(default_factory=dict)  # why runs are not finished
    seconds: dict[str, float] = field(default_factory=dict)

    def collect(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Read the finished runs, and from the entries of a state why others are missing."""
        for run in self.runs:
            entry = state.get(run.key, {})
            self.seconds[run.name] = entry.get("seconds", 0.0)
            if (saved := run.saved()) is not None:
                self.finished[run.name] = saved
            else:
                self.errors[run.name] = entry.get("error", "not finished")

    def linear_map(self, relation: str) -> LinearMap | None:
        """Return the maps of the probe that has a relation's; None if they cannot be read."""
        with suppress(LinearMapError, KeyError):
            run = self.finished[relation_probe(relation) or ""]
            return LinearMap.from_pretrained(run.folder / _LINEAR_MAP)
        return None

    def find(self, quantity: str, relation: str, answer: str = "", place: str = "") -> float | None:
        """Return a quantity of ``paper.yaml`` as measured here; None if it was not.

        `place` is the table of the paper that shows it: some have runs of their own.
        """
        tables = plan_data()["table_of_run"]
        table = place if place in tables.values() else None
        runs = (run for name, run in self.finished.items() if tables.get(name) == table)
        values = (quantities()[quantity].of(run, relation, answer) for run in runs)
        return next((value for value in values if value is not None), None)

    def number(self, number: PaperNumber) -> float | None:
        """Return a number of the paper as measured here; None if it was not."""
        return self.find(number.quantity.name, number.relation, number.answer, number.place)

    def null(self, quantity: str, relation: str) -> float | None:
        """Return the strongest null of a quantity as measured here; None if it has none."""
        if nulls := plan_data()["nulls"].get(quantity):
            values = [self.find(null, relation) for null in nulls]
            return max((value for value in values if value is not None), default=None)
        # Of Hit@N, it is that of weights in random order.
        direction, _, rank = quantity.rpartition("_")
        hits = self.random_hits(relation).get(direction)
        return hits["135".index(rank)] if hits and rank in ("1", "3", "5") else None

    def random_hits(self, relation: str) -> dict[str, list[float]]:
        """Return Hit@1, 3 and 5 of weights in random order by direction, with a reference only."""
        if self.tokenizer is None or self.find("influenced_1", relation) is None:
            return {}
        tokenized = TokenizedRelation.of(relation, Catalogue.load(), self.tokenizer)
        mask = torch.from_numpy(tokenized.reference_mask)
        ways = {"influenced": mask, "influencing": mask.T}
        rates = {way: random_hit_rates(right) for way, right in ways.items()}
        return {way: [float(rate[n] or 0) for n in "135"] for way, rate in rates.items()}


class _LeftOutError(Exception):
    """Why a run cannot be made on an LM."""


def plan_runs(
    plan: LMRuns, lm: LanguageModel, items: Iterable[Item], settings: Settings, folder: Path
) -> None:
    """Add the runs that tables and figures need to the plan of an LM, in folders below `folder`."""
    plan.tokenizer = lm.tokenizer
    _read_labels(plan)
    wanted = [item for item in items if not item.lacks(plan.after is not None, len(settings.lm))]
    distinct = dict.fromkeys(name for item in wanted for name in item.runs)
    names = sorted(distinct, key=lambda name: not name.startswith("probe"))  # others use their maps
    for name, safe_name in safe_names(names).items():
        try:
            plan.runs.append(_plan_run(name, folder / safe_name, plan, settings))
        except _LeftOutError as reason:
            plan.left_out[name] = str(reason)


def _read_labels(plan: LMRuns) -> None:
    """Find the labels of each kind of knowledge; note which have none, and why."""
    for name, labels in _labels(plan.tokenizer).items():
        if unknown := ", ".join(unknown_words(Catalogue.load()[name], plan.tokenizer)):
            plan.left_out[name] = f"the vocabulary lacks words of the prompt: {unknown}"
        elif len(labels) < 2:
            number = "only one answer" if labels else "no answer"
            plan.left_out[name] = f"{number} is a label of the vocabulary"
        else:
            plan.labels[name] = labels


def _labels(tokenizer: Any) -> dict[str, list[str]]:
    domains = audit_domains(Catalogue.load().values(), tokenizer)
    return {domain.knowledge.name: [text.strip() for text in domain.texts] for domain in domains}


def check_tuned(plan: LMRuns, tuned: LanguageModel) -> None:
    """Refuse an LM after post-training whose tokenizer gives other labels; raise ConfigError."""
    labels = _labels(tuned.tokenizer)
    if others := [name for name in plan.labels if labels[name] != plan.labels[name]]:
        raise ConfigError(
            f"the tokenizer of {plan.after} gives other labels of {others[0]} than that of "
            f"{plan.lm}. Pass the tuned version of the same LM as --after."
        )


def _family_pairs(family: str, known: Iterable[str]) -> list[str]:
    """Return the pairs of a family: all, and for cross_language those of one kind of knowledge."""
    catalogue = Catalogue.load()
    names = [name for name in known if catalogue[name].family == family]
    groups = [names]
    if family == "cross_language":
        of_kind = {n: catalogue[n].kind or n for n in known}
        kinds = dict.fromkeys(catalogue[name].kind for name in names)
        groups = [[n for n in known if of_kind[n] == k and n in (k, *names)] for k in kinds]
    pairs = [f"{s}->{t}" for group in groups for s, t in permutations(group, 2)]
    if family == "simile" and {*_NAMES.split("->")} <= {*known}:
        pairs.append(_NAMES)  # tables 8, 9 and 14 have a pair whose target is an attribute
    if not pairs:
        raise _LeftOutError(f"fewer than two kinds of knowledge of the family {family} have labels")
    return pairs


def relation_probe(relation: str) -> str | None:
    """Return the name of the probe that has the map of a relation; None if there is none."""
    catalogue = Catalogue.load()
    families = {catalogue[end].family for end in relation.split("->")}
    for family in ("cross_language", "simile"):  # these also have pairs with attributes
        if family in families:
            return f"probe_{family}"
    return f"probe_{families.pop()}" if len(families) == 1 else None


def _plan_run(name: str, folder: Path, plan: LMRuns, settings: Settings) -> PlannedRun:
    study, _, subject = name.partition("_")
    relation = "city->country" if name in plan_data()["table_of_run"] else subject
    pairs = [relation]
    probe: str | None = f"probe_{subject}"  # whose maps an LM after post-training is scored with
    if study in ("probe", "after") and subject != "subwords":
        pairs = _family_pairs(subject, plan.labels)
        relation = pairs[0]
    elif study == "edits":
        # The maps of probe_subwords have beginnings of words as source labels, which edits lack.
        probe = relation_probe(relation) if subject != "subwords" else None
    if missing := [end for end in relation.split("->") if end not in plan.labels]:
        raise _LeftOutError(f"{missing[0]}: {plan.left_out[missing[0]]}")
    maps = folder.parent / probe / _VERSION if probe else None
    options: dict[str, Any] = {}
    answers: list[str] = []
    if study == "probe":
        # Texts: of a list of n, jsonargparse makes n copies whenever it looks at it.
        options["model.pairs"] = ",".join(pairs)
        ends = dict.fromkeys(end for pair in pairs for end in pair.split("->"))
        options["model.knowledge"] = ",".join(ends)
        options |= {"model.subwords": True} if subject == "subwords" else {}
    elif study == "after":
        options = {"model.before": None, "model.linear_map": f"{maps}/{_LINEAR_MAP}"}
    elif study == "ablation":
        options = {"data.relation": relation, "model.mapping": ["reference"]}
        if relation == "city->country":
            options["model.mapping"] = ["reference", "permuted", "letters"]
        else:  # most relations have few labels
            options["data.max_source_labels"] = None
    else:
        options = {"data.relation": relation, "data.subwords": subject == "subwords"}
        options["trainer.callbacks"] = _edit_callbacks(subject, relation, maps, plan)
        answers = _printed_answers(plan) if subject == "printed" else []
    config = settings.studies[study]["config"]
    configs = tuple(map(find_config, (config, *settings.overlays)))
    verb = config_verb(Path(configs[0]).read_text(encoding="utf-8"))
    options |= {
        **settings.options,
        **settings.studies[study]["options"],
        "trainer.default_root_dir": str(folder.parent),
        "name": folder.name,
        **({"data.n_edits": None} if answers else {}),
    }
    held_out = maps if study == "edits" else None
    return PlannedRun(name, folder, study, verb, configs, options, held_out, tuple(answers))


def _edit_callbacks(
    subject: str, relation: str, maps: Path | None, plan: LMRuns
) -> list[dict[str, Any]]:
    has_control = _CONTROL in plan.labels and _CONTROL not in relation
    settings: dict[str, Any] = {
        "linear_map": f"{maps}/{_LINEAR_MAP}" if maps else None,
        "every_n_steps": _EVERY_N_STEPS,
    }
    generalization = settings | {"controls": [_CONTROL] if has_control else []}
    if subject == "subwords":  # W of the paper's table 18 has none
        generalization["ridge"] = 0
    callbacks = [{"class_path": "Generalization", "init_args": generalization}]
    if subject == relation:  # not of a table alone
        callbacks.append({"class_path": "GradientCorrelation", "init_args": settings})
    return callbacks


def _printed_answers(plan: LMRuns) -> list[str]:
    """Return the cities of table 6 that are labels."""
    printed = dict.fromkeys(n.answer for n in paper_numbers() if n.place == "Table 6")
    answers = [answer for answer in printed if answer in plan.labels["city"]]
    if not answers:
        raise _LeftOutError("no city of the paper's table is a label of the vocabulary")
    return answers


def describe(plan: LMRuns, items: Sequence[Item], settings: Settings) -> Iterator[str]:
    """Yield the lines that show a plan."""
    runs = f"{len(plan.runs)} run{'s' if len(plan.runs) != 1 else ''}"
    yield f"{plan.name}: {runs}" + (f", tuned: {plan.after}" if plan.after else "")
    for run in plan.runs:
        state = ", finished" if run.saved() is not None else ""
        yield f"  {run.name}: {settings.studies[run.study]['config']}{state}"
    for name, where, reason in left_out(plan, items, len(settings.lm)):
        yield f"  left out: {name}{where and f' ({where})'}: {reason}"


def left_out(plan: LMRuns, items: Sequence[Item], n_lms: int) -> Iterator[tuple[str, str, str]]:
    """Yield what is left out on an LM, which tables and figures that concerns, and why."""
    needs = {item.numbers: item.lacks(bool(plan.after), n_lms) for item in items}
    parts = {item.numbers: _parts(item) for item in items if not needs[item.numbers]}
    for name, reason in {**plan.left_out, **plan.errors}.items():
        if where := "; ".join(numbers for numbers, names in parts.items() if name in names):
            yield name, where, reason.rstrip(".")
    for numbers, needed in needs.items():
        if needed:
            yield numbers, "", f"needs {needed}"


def _parts(item: Item) -> set[str]:
    """Return the runs and the kinds of knowledge that an item needs."""
    catalogue = Catalogue.load()
    printed = [number.relation for number in paper_numbers() if number.place in item.places]
    families = {run.partition("_")[2] for run in item.runs}
    # A table has some pairs of a family only.
    ends = {end for relation in printed for end in relation.split("->")}
    return {*item.runs, *(ends or (n for n in catalogue if catalogue[n].family in families))}
