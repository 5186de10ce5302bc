"""What edits do to an LM, edit by edit and step by step: a callback that keeps it in one file.

A run with this callback, of ``ripples.py``, leaves an ``.npz`` of what every question about its
edits is answered from, without the LM: see `EditRecorder`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.common import write_numbers
from lincorr_lightning.callbacks.relation import RelationCallback, RelationState, at_source_prompt
from lincorr_lightning.finetune.batches import EditBatch, answer_losses
from lincorr_lightning.finetune.cases import Logits
from lincorr_lightning.finetune.edits import nearness, reference_mask, taught_labels
from lincorr_lightning.functional.precision import neighbor_weights
from lincorr_lightning.knowledge import Domain
from lincorr_lightning.linear_map.fitting import fit_linear_map
from lincorr_lightning.linear_map.layout import JointLayout
from lincorr_lightning.lm.query_cache import Query
from lincorr_lightning.lm.vocabulary import SubjectKind, sample_up_to
from lincorr_lightning.results.results import Results

NOBODY = ("The weather today is", "My favorite book is about")
"""Prompts without a person: an edit that puts its target there has changed everything."""
CONTROLS = ("color", "pet")
N_PARAPHRASES = 2
CHANGES = ("change", "others_change", "predicted")
"""Arrays of target logits after steps, which are most of a file."""
UNITS = {
    **dict.fromkeys(CHANGES, 1 / 8),
    **dict.fromkeys(("before", "in_context", "prior", "context_of_other"), 1 / 16),
    **dict.fromkeys(("nearest", "cosine"), 1 / 256),
    **dict.fromkeys(("W", "W0"), 1 / 512),
    **dict.fromkeys(("gradient", "others_gradient"), 1 / 64),
}
"""What a unit of the stored integers is worth; logits of an edit change by about 1 to 10."""


class EditRecorder(RelationCallback):
    """Keeps what each edit does after each of some steps, in a file of arrays.

    ``n`` edits, ``s`` steps of `steps`, ``t`` target labels and ``m`` other people give, with
    labels as their numbers in the target's domain:

    - ``probability`` ``(s, n)`` of the taught answer, the geometric mean over its tokens;
      ``learned`` ``(s, n)``, whether its label leads;
    - ``own`` ``(s, n)``, ``others`` ``(s, n, m)``, ``nobody`` ``(s, n, 2)``, ``paraphrases``
      ``(s, n, p)``: the leading target label at the edit's own target prompt, at that of other
      people, at `NOBODY`, and at other wordings; ``controls`` ``(s, n, c)``, whether the leading
      label of an unrelated prompt is that of before;
    - ``change``, ``others_change``, ``predicted`` ``(k, n, t)``, after `kept` steps: the change of
      the target's logits, its mean over the other people, and W · ΔF of the source (plain W);
      ``others_taught`` ``(k, n, m)``, whether the taught label leads at their source prompts;
    - ``before`` ``(n, t)``, target logits before training; ``in_context`` ``(n, t)``, the same
      after the taught statement; ``before_others`` and so on, the labels that lead before training;
    - ``W``, ``W0``, ``nearest``, ``cosine`` ``(n, t)``: how near the labels are to the taught one,
      by the map (``ridge: auto``), the vocabulary's map, the nearest word and the cosine of the
      head's rows;
    - ``reference`` ``(n, t)``, labels that are right; ``prior`` ``(t,)``, the target's logits, mean
      over other people.

    Args:
        path: File of the arrays, ending in ``.npz``; what they are of is beside it, in ``.json``.
        steps: Steps after which the edits are measured, from 1.
        kept: Those of them whose changes are kept.
        n_others: Number of other people.
        others_kind: Which strings they are.
        n_subjects: Number of subjects that maps are fitted on.
        seed: Seed of the other people.
        about: What else is to be written beside the arrays.
    """

    study = "edit_recorder"
    state_class = RelationState

    def __init__(
        self,
        path: str,
        steps: list[int],
        kept: list[int],
        n_others: int = 8,
        others_kind: SubjectKind = "names",
        n_subjects: int = 1000,
        seed: int = 0,
        about: dict[str, Any] | None = None,
        relation: str | None = None,
    ) -> None:
        super().__init__(relation)
        self.path = Path(path)
        self.steps = steps
        self.kept = kept
        self.n_others = n_others
        self.others_kind = others_kind
        self.seed = seed
        self.about = about or {}
        self.set_map(None, "auto", n_subjects)

    def open(self) -> Iterable[str]:
        run = self.run
        tokenizer = run.cache.lm.tokenizer
        self.resolve_relation(CONTROLS)
        self._resolved = self.resolve_edits(None, "EditRecorder.edits")
        self.others = sample_up_to(
            tokenizer,
            self.n_others,
            self._resolved.subjects,
            self.seed + 1,
            self.others_kind,
        )
        run.measured.update([*self._resolved.subjects, *self.others])
        target = self.tokenized.target
        self.wordings = [
            replace(target.knowledge, template=text)
            for text in target.knowledge.paraphrases[:N_PARAPHRASES]
        ]
        self._w0 = at_source_prompt(self.tokenized)
        self.announce_map()
        run.announce(JointLayout.of_relation(self._w0), self.n_subjects)
        return []

    def prepare(self) -> None:
        run, relation, edits = self.run, self.tokenized, self._resolved.edits
        name, n = relation.name, len(edits)
        labels = taught_labels(edits)
        self.state.base = self._read(self._queries_of(range(n), [None] * n), n)
        weight, _, ridge = self.fit_map()
        self.plain = self.fit_map(0.0)[0]
        subjects = run.fit_subjects(self.n_subjects)
        w0 = fit_linear_map(run.cache.lm, self._w0, subjects, ridge, run.reader()).weight(name)
        near = nearness(run.nearest_words, relation)
        head = run.cache.lm.head_rows()
        assert near is not None
        assert head is not None
        rows = [head.rows(side.token_ids) for side in (relation.source, relation.target)]
        stated = [
            relation.source.knowledge.statement(edit.subject, edit.answer)
            + ". "
            + relation.target.knowledge.prompt(edit.subject)
            for edit in edits
        ]
        in_context, nobody = run.cache.read(
            [
                ([Query(prompt) for prompt in stated], relation.target.token_ids),
                ([Query(prompt) for prompt in NOBODY], relation.target.token_ids),
            ]
        )
        base = self.state.base
        self.arrays = {
            "labels": labels,
            "reference": reference_mask(edits, len(relation.target.labels)),
            "before": base["target"],
            "in_context": in_context,
            "before_source": base["source"].argmax(1),
            "before_others": base["others_logits"][0].argmax(1),
            "before_others_source": base["others_source"][0],
            "before_nobody": nobody.argmax(1),
            "before_paraphrases": base["paraphrases"],
            "prior": base["others_logits"][0].mean(0),
            "W": weight.T[labels],
            "W0": w0.T[labels],
            "nearest": near.T[labels],
            "cosine": neighbor_weights(*rows).T[labels],
        }
        self.ridge = ridge

    def _queries_of(
        self, ids: Sequence[int], adapters: Sequence[int | None], with_sources: bool = True
    ) -> list[tuple[list[Query], Domain]]:
        """Return the prompts of edits, and what is read after them, in the order of `_read`.

        Those of other people's sources are left out without `with_sources`.
        """
        subjects = [self._resolved.subjects[i] for i in ids]
        target = self.domains["target"]
        queries = self.queries(subjects, adapters)
        parts = [(part, self.domains[name]) for name, part in queries.items()]

        def in_each(prompts: Sequence[tuple[str, str]]) -> list[Query]:
            return [Query(text, one, who) for one in adapters for text, who in prompts]

        for side in (target, self.domains["source"]):
            others = self.others if side is target or with_sources else []
            prompts = [(side.knowledge.prompt(other), other) for other in others]
            parts.append((in_each(prompts), side))
        parts.append((in_each([(text, "") for text in NOBODY]), target))
        wordings = [
            Query(wording.prompt(subject), one, subject)
            for subject, one in zip(subjects, adapters, strict=True)
            for wording in self.wordings
        ]
        return [*parts, (wordings, target)]

    def _read(self, parts: list[tuple[list[Query], Domain]], n: int) -> Logits:
        logits = self.run.cache.read([(part, domain.token_ids) for part, domain in parts])
        named = dict(zip(self.domains, logits, strict=False))
        others, others_source, nobody, wordings = logits[len(named) :]
        controls = [x.argmax(1) for name, x in named.items() if name not in ("source", "target")]
        return {
            "source": named["source"],
            "target": named["target"],
            "controls": torch.stack(controls, 1),
            "others_logits": others.view(n, len(self.others), -1),
            "others_source": others_source.argmax(1).view(n, len(others_source) // n),
            "nobody": nobody.argmax(1).view(n, len(NOBODY)),
            "paraphrases": wordings.argmax(1).view(n, len(self.wordings)),
        }

    def before_batch(self, edits: EditBatch | None) -> None:
        assert edits is not None
        is_kept = edits.step + 1 in self.kept
        self._parts = self._queries_of(edits.ids, range(len(edits.ids)), is_kept)
        if edits.step + 1 in self.steps:
            self.prefetch({str(i): part for i, (part, _) in enumerate(self._parts)})

    def after_update(self, edits: EditBatch | None) -> None:
        assert edits is not None
        step = edits.step + 1
        if step not in self.steps or not edits.edits:
            return
        base = {key: rows[edits.ids] for key, rows in self.state.base.items()}
        n = len(edits.ids)
        now = self._read(self._parts, n)
        labels = self.arrays["labels"][edits.ids]
        contexts = self.run.cache.contexts(range(n))
        with torch.no_grad(), nullcontext() if contexts is None else contexts(range(n)):
            losses = answer_losses(self.run.cache.lm.model, edits)
        kept = {
            "probability": (-losses.double()).exp().cpu(),
            "learned": now["source"].argmax(1) == labels,
            "own": now["target"].argmax(1),
            "others": now["others_logits"].argmax(2),
            "nobody": now["nobody"],
            "paraphrases": now["paraphrases"],
            "controls": now["controls"] == base["controls"],
        }
        if step in self.kept:
            kept["others_taught"] = now["others_source"] == labels[:, None]
            kept["change"] = now["target"] - base["target"]
            kept["others_change"] = (now["others_logits"] - base["others_logits"]).mean(1)
            kept["predicted"] = (now["source"] - base["source"]) @ self.plain.T
        self.state.keep(edits, kept)

    def finish(self) -> Results:
        by_step = self.state.readings_by_step()
        rows = [logits for _, (logits,) in by_step.values()]
        arrays = {key: x.numpy() for key, x in self.arrays.items()}
        for key in dict.fromkeys(key for row in rows for key in row):
            arrays[key] = np.stack([row[key].numpy() for row in rows if key in row])
        relation = self.tokenized
        about = {
            **self.about,
            "relation": relation.name,
            "steps": [step + 1 for step in by_step],
            "kept": [step for step in self.kept if step - 1 in by_step],
            "ridge": self.ridge,
            "subjects": self._resolved.subjects,
            "answers": [edit.answer for edit in self._resolved.edits],
            "targets": [*relation.target.texts],
            "n_sources": len(relation.source.labels),
            "others": self.others,
            "wordings": [wording.template for wording in self.wordings],
        }
        write_arrays(self.path, arrays)
        write_numbers(self.path.with_suffix(".json"), about)
        return Results(self.name, {"path": self.path.name})


def write_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write arrays as integers of `UNITS` where there is one, low and high bytes apart."""
    stored: dict[str, Any] = {}
    for key, values in arrays.items():
        if values.dtype == bool:
            stored[key] = values
        elif key in UNITS or np.issubdtype(values.dtype, np.integer):
            integers = np.round(values / UNITS.get(key, 1)).astype(np.int16)
            # Bytes of one kind are alike, which makes the file a sixth smaller.
            stored[f"{key}.bytes"] = np.stack([integers & 255, integers >> 8]).astype(np.uint8)
        else:
            stored[key] = values.astype(np.float16)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **stored)


def read_arrays(path: Path) -> dict[str, Any]:
    """Return the arrays that `write_arrays` wrote."""
    arrays: dict[str, Any] = {}
    with np.load(path) as file:
        for name, values in file.items():
            key = name.removesuffix(".bytes")
            assert key != name or values.dtype != np.int16, f"{path} was not written so"
            if key != name:
                low, high = values.astype(np.int16)
                integers = low | (high << 8)
                values = integers * UNITS[key] if key in UNITS else integers
            arrays[key] = values
    return arrays
