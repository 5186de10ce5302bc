"""What a vocabulary ablation found: scores of its networks, and the files of a run."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lincorr_lightning.ablation.datamodule import PairedTextsDataModule
from lincorr_lightning.ablation.results import AblationReport, RunScores
from lincorr_lightning.io import write_csv, write_json
from lincorr_lightning.version import __version__

if TYPE_CHECKING:
    from lincorr_lightning.ablation.module import VocabularyAblation
    from lincorr_lightning.ablation.pooled_texts import PooledTexts

CASES = (
    "mapping", "subject", "source_answer", "source_said", "reference", "target_in_domain",
    "target_said", "generalized",
)  # fmt: skip
_VERSIONS = ("torch", "lightning", "transformers")


def score_runs(
    texts: PooledTexts,
    mappings: Sequence[str],
    seeds: Sequence[int],
    source_logits: Tensor,
    target_logits: Tensor,
) -> list[RunScores]:
    """What each network says of its new subjects.

    Args:
        texts: All runs' texts.
        mappings: Their names.
        seeds: Of the runs.
        source_logits: At the source texts, ``(n_seeds, n_mappings · n_new, n_candidates)``.
        target_logits: At the target texts, likewise.

    Returns:
        The mappings of the first seed, then those of the next.
    """
    shape = (len(seeds), len(mappings), texts.n_new)
    says_source = source_logits.argmax(-1).view(shape)
    says_target = target_logits.argmax(-1).view(shape)
    source = texts.answers_to(texts.rows_of("new", "source"))
    in_domain, right = _in_domain(texts, target_logits)
    # Of all candidates the first must be one that is right, not only the first of the domain.
    of_all = right & (says_target == in_domain)
    found = {
        "source_learned": says_source == source,
        "generalized": right,
        "unrestricted": of_all,
        "says_source": says_target == source,
    }
    shares = {name: hits.double().mean(-1).tolist() for name, hits in found.items()}
    return [
        RunScores(mapping, seed, **{name: rows[s][m] for name, rows in shares.items()})
        for s, seed in enumerate(seeds)
        for m, mapping in enumerate(mappings)
    ]


def _in_domain(texts: PooledTexts, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the target's domain, and whether it is right, ``(n_seeds, n_mappings, n)``."""
    logits = logits.view(len(logits), texts.n_mappings, -1, logits.shape[-1])
    domain = texts.domain[:, :, None].expand(-1, -1, logits.shape[2], -1)
    among = logits.gather(-1, domain.clamp(min=0)).masked_fill(domain < 0, -torch.inf)
    first = among.argmax(-1, keepdim=True)
    return domain.gather(-1, first)[..., 0], texts.right.gather(-1, first)[..., 0]


def chance(texts: PooledTexts) -> tuple[Tensor, Tensor]:
    """Shares that an answer drawn from the domain, and the most frequent one, get right.

    Args:
        texts: All runs' texts.

    Returns:
        Both ``(n_seeds, n_mappings)``.
    """
    n_domain = (texts.domain >= 0).sum(-1)
    per_answer = texts.right.double().mean(2)
    return per_answer.sum(-1) / n_domain, per_answer.amax(-1)


def write_results(
    module: VocabularyAblation, data: PairedTextsDataModule, folder: Path, seconds: float
) -> None:
    """Write ``results.json``, tables, figures, and show them in TensorBoard.

    Args:
        module: After training.
        data: What was told.
        folder: The run's.
        seconds: How long training took.
    """
    embedding = module.embedding
    assert embedding is not None
    finished = module.finished
    random, majority = (values.mean(0).tolist() for values in chance(module.texts))
    report = AblationReport(
        relation=data.relation.name,
        lm=embedding.name_or_path,
        mappings=module.mappings,
        composed=tuple(finished.get("learn") or module.scores()),
        uncomposed=tuple(finished.get("uncomposed", ())),
        random=tuple(random),
        majority=tuple(majority),
        n_new=module.texts.n_new,
        history=module.history,
    )
    results: dict[str, Any] = {
        "study": "vocabulary_ablation",
        **report.results(),
        "relation": data.relation.name,
        "n_paired": module.texts.n_paired,
        "n_source_labels": len(module.labels.sources),
        "n_target_labels": len(module.labels.target_domain),
        "seconds": round(seconds, 2),
        "lm": embedding.name_or_path,
        "embedding": {"key": embedding.key, "shape": list(embedding.weight.shape)},
        "settings": {"model": dict(module.hparams), "data": dict(data.hparams)},
        "versions": {
            "lincorr_lightning": __version__,
            **{name: importlib.metadata.version(name) for name in _VERSIONS},
        },
    }
    write_json(folder / "results.json", results)
    write_csv(folder / "tables" / "runs.csv", *report.runs_table())
    write_csv(folder / "tables" / "summary.csv", *report.summary_table())
    write_csv(folder / "tables" / "cases.csv", CASES, _cases(module))
    data.write_texts(folder / "tables" / "texts.csv", module.labels, module.told[0])
    report.write_pictures(folder)
    report.show(module.trainer)


@torch.no_grad()
def _cases(module: VocabularyAblation) -> Iterator[list[Any]]:
    """Every new subject of the first seed under every mapping."""
    texts, told = module.texts, module.told[0]
    tokenizer = module.embedding.tokenizer  # type: ignore[union-attr]
    source, target = (
        texts.logits(module.networks(texts.inputs(texts.rows_of("new", side))))
        for side in ("source", "target")
    )
    in_domain, right = _in_domain(texts, target)
    says = [
        logits.argmax(-1).view(texts.n_seeds, texts.n_mappings, -1) for logits in (source, target)
    ]
    wanted = [texts.answers_to(texts.rows_of("new", side)) for side in ("source", "target")]

    def text(candidate: Tensor) -> str:
        token = texts.candidate_tokens[0][int(candidate)]
        return str(tokenizer.decode([token], clean_up_tokenization_spaces=False)).strip()

    for m, mapping in enumerate(module.mappings):
        for i, subject in enumerate(told.subjects[texts.n_paired :]):
            yield [
                mapping,
                subject,
                text(wanted[0][0, m, i]),
                text(says[0][0, m, i]),
                text(wanted[1][0, m, i]),
                text(in_domain[0, m, i]),
                text(says[1][0, m, i]),
                bool(right[0, m, i]),
            ]
