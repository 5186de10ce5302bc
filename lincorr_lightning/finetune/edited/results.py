"""Results of edits that were made elsewhere: outcomes, and what else the edits reach."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lincorr_lightning.finetune import cases
from lincorr_lightning.finetune.batches import EditDataset
from lincorr_lightning.finetune.edits import reference_mask, skip_counts
from lincorr_lightning.finetune.results import case_results, outcomes_table, skipped_tables
from lincorr_lightning.functional import Outcome
from lincorr_lightning.lm.fingerprint import fingerprint_data
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.table import Mean, Table, number


def edited_results(
    edits: EditDataset,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    maps: tuple[Tensor, Tensor | None],
    controls: Sequence[str],
    lms: Sequence[Mapping[str, Any]],
    asked: Mapping[str, Sequence[Sequence[str]]],
    neighbours: Sequence[str],
) -> Results:
    """Return the results of what the LMs before and after n edits answer.

    By kind of knowledge, and of neighbours of each LM, they have logits, ``(n, n_labels)``;
    ``probability``, ``(n, 2)``, is that of new and old source answer; for other wordings there is
    whether a right label leads. `maps` are W and the `vocabulary_nearness`; `lms` are their infos.
    By kind of other wordings, `asked` are the prompts of each edit; `neighbours` are subjects.
    """
    relation, made = edits.relation, edits.edits
    ends, n_lms = relation.name.split("->"), len(edits.edited_lms) or 1
    labels, old = (torch.tensor([getattr(x, k) for x in made]) for k in ("label", "source_before"))
    is_other = labels != old  # where old is new, there is no old answer
    mask = reference_mask(made, len(relation.target.labels))
    texts = [relation.source.texts[i] for i in labels.tolist()]  # the answers' first tokens
    columns: dict[str, list[Any]] = {"id": [row.id for row in edits.rows], "source_label": texts}
    shares, wordings = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
    logits, near = list[cases.DomainLogits](), list[cases.DomainLogits]()
    for stage, read, repeats in (("before", before, n_lms), ("after", after, 1)):
        source, target = (read[name] for name in ends)
        logits.append(cases.DomainLogits(source, target, tuple(read[name] for name in controls)))
        x, y = (read[f"neighbours/{name}"].repeat(repeats, 1) for name in ends)
        near.append(cases.DomainLogits(x, y))
        leading, (p_new, p_old) = source.argmax(1), read["probability"].T
        columns[f"source_{stage}"] = [relation.source.texts[i] for i in leading.tolist()]
        p_old, is_higher = p_old.where(is_other, torch.nan), p_new > p_old
        columns |= {f"p_new_{stage}": p_new.tolist(), f"p_old_{stage}": p_old.tolist()}
        values = {
            "source_learned": leading == labels,
            "generalized": mask.gather(1, target.argmax(1, keepdim=True))[:, 0],
            "p_new": p_new,
            "p_old": p_old[is_other],
            "efficacy": is_higher[is_other],
        }
        pairs = zip(is_higher.tolist(), is_other.tolist(), strict=True)
        columns[f"efficacy_{stage}"] = [higher if other else None for higher, other in pairs]
        if stage == "before":
            for name in ("source_learned", "generalized"):
                columns[f"{name}_before"] = values[name].tolist()
        shares[stage] = {name: _mean(value) for name, value in values.items()}
        own, follow, others = (read[kind] for kind in asked)
        wordings[stage] = {
            "paraphrases": {
                "source_learned": _mean(own),
                "generalized": _mean(follow),
                "n": len(own),
                "n_target": len(follow),
            },
            "questions": {"generalized": _mean(others), "n": len(others)},
        }
    if warning := _warning(*lms):
        rank_zero_warn(warning)
    own_cases = cases.edit_cases(
        relation,
        [edit.subject for edit in made],
        [edit.answer for edit in made],
        labels,
        mask,
        logits[0].target,
        logits[1].target,
        leading == labels,
        *maps,
    )
    means = cases.edit_means(logits[0], logits[1], mask, labels, controls)
    means, n_near = means | cases.neighbour_means(*near), len(near[0].source) // n_lms
    results: dict[str, Any] = {
        **shares["after"],
        **wordings["after"],
        **cases.outcome_values(relation.name, means, mask, own_cases, {"neighbours": n_near}),
        "before": shares["before"] | wordings["before"],
        "skipped": skip_counts(edits.skipped),
        "lm_before": lms[0],
        "warning": warning,
        "edited_lms": {
            "n": n_lms,
            "fingerprint": fingerprint_data([lm["fingerprint"] for lm in lms[1:]]),
        },
    }
    table, figures = case_results(own_cases, relation.name, results["random"])
    formats = {**table.formats, **{name: ".1%" for name in columns if name.startswith("p_")}}
    numbers = shares["before"]
    of_cases = {**table.means, **{f"before_{name}": Mean(f"{name}_before") for name in numbers}}
    of_cases |= {name: Mean(f"{name}_after") for name in ("p_new", "p_old", "efficacy")}
    nullable = {name: "boolean" for name in columns if name.startswith("efficacy")}
    frame = table.frame.assign(**columns).astype(nullable)
    table = replace(table, frame=frame, formats=formats, means=of_cases)
    scalars = {f"test/{name}": results[name] for name in ("source_learned", *Outcome)}
    plain = Results("edited_lm", results, scalars, figures=figures)
    tables = [outcomes_table([plain], plain), _reach_table(results), table]
    prompts = _prompts_table(edits, before, after, near, asked, neighbours)
    tables += [prompts] if len(prompts) else []
    return replace(plain, tables=[*tables, *skipped_tables(edits.skipped)])


def _prompts_table(
    edits: EditDataset,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    near: Sequence[cases.DomainLogits],
    asked: Mapping[str, Sequence[Sequence[str]]],
    neighbours: Sequence[str],
) -> Table:
    rows, means = list[tuple[Any, ...]](), dict[str, Mean]()
    for kind, prompts in asked.items():
        own = [(x, text) for x, texts in zip(edits.edits, prompts, strict=True) for text in texts]
        hits = zip(own, before[kind].tolist(), after[kind].tolist(), strict=True)
        rows += [(x.subject, x.answer, kind, text, *hit) for (x, text), *hit in hits]
        held, (group, name) = Mean("held_before", where={"kind": kind}), kind.split("_", 1)
        means |= {f"before_{kind}": held, f"{group} before_{name}": held}
    stays = [f"as before in {x.id}" for x in edits.rows] if edits.edited_lms else ["as before"]
    for end in ("source", "target"):
        ask = getattr(edits.relation, end).knowledge.prompt
        old, new = (getattr(logits, end).argmax(1) for logits in near)
        kind, all_same = f"neighbours_{end}_unchanged", iter((old == new).tolist())
        rows += [(x, one, kind, ask(x), True, next(all_same)) for one in stays for x in neighbours]
    return Table.of(
        "prompts",
        rows,
        ("subject", "answer", "kind", "prompt", "held_before", "holds"),
        "The prompts beside those of the edits, and whether the answer holds after the edits.",
    ).sampled(
        "subject", "answer", **means, **{x[2]: Mean("holds", where={"kind": x[2]}) for x in rows}
    )


def _warning(before: Mapping[str, Any], *edited: Mapping[str, Any]) -> str:
    """Return what is wrong with the edited LMs, or with some of them; empty if nothing."""
    own, kinds, parts = before["fingerprint"]["weights"], ("dtype", "quantization"), []
    rounded = [lm for lm in edited if any(lm.get(kind) != before.get(kind) for kind in kinds)]
    same = [lm for lm in edited if lm["fingerprint"]["weights"] == own]
    for found, what in (
        (rounded, "different dtypes or quantizations: part of what changed is rounding."),
        (same, "the same weights: nothing was edited."),
    ):
        for first in found[:1]:
            some = f"{len(found)} of {len(edited)} edited LMs, such as {first['name_or_path']},"
            parts.append(f"model.before and {some if edited[1:] else 'model.lm'} have {what}")
    return " ".join(parts)


def _mean(values: Tensor) -> float | None:
    return number(values.double().mean().item())


def _reach_table(values: Mapping[str, Any]) -> Table:
    n, n_skipped = {"n": values["n_edits"]}, sum(values["skipped"].values())
    rows = [{**values["before"], **n, "prompts": "before"}, {**values, **n, "prompts": "after"}]
    for name in ("paraphrases", "questions"):
        rows.append({**values["before"][name], "prompts": f"{name} before"})
        rows.append({**values[name], "prompts": name})
    rows = [row for row in (*rows, {**values["neighbours"], "prompts": "neighbours"}) if row["n"]]
    shares = {
        "source_learned": "learned",
        "generalized": "generalized",
        "p_new": "p of new",
        "p_old": "p of old",
        "efficacy": "efficacy",
        "source_unchanged": "source stays",
        "target_unchanged": "target stays",
    }
    counts = {"n": "n", "n_target": "n target"}
    skipped = f" Rows that are no edit: {n_skipped} (tables/skipped.csv)." * bool(n_skipped)
    return Table.of(
        "reach",
        rows,
        ["prompts", *counts, *shares],
        f"What the edits of {values['relation']} reach.",
        "paraphrases: other wordings of source (n) and target (n target); neighbours: subjects "
        "without an edit; p: mean probability, in the whole vocabulary, of the first token of the "
        "new source answer, and of the one that led before (old); efficacy: how often p of new is "
        f"above p of old.{skipped} {values['warning']}".rstrip(),
        headline=True,
        headings=counts | shares,
        formats=dict.fromkeys(counts, ",d") | dict.fromkeys(shares, ".0%"),
    )
