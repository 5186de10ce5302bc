"""How many answers change by rounding, and by any training: an error bar for single subjects.

    python -m benchmarks.real_lms.perturbations FOLDER

FOLDER holds a folder for each LM. Each is changed in ways that teach it no fact in question:
weights rounded once more, to eight and to four bits, and 40 steps of AdamW on eight unrelated
sentences. ``benchmarks/results/real_lms/rounding.csv`` gets a row for each way: the share of
subjects to whom the LM gives another country than before, and r of city→country.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from jsonargparse import auto_cli
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks import common
from benchmarks.real_lms.run import REAL_LMS
from lincorr_lightning import correlate
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.lm import LanguageModel, LMConfig
from lincorr_lightning.lm.vocabulary import sample_up_to
from lincorr_lightning.results.table import column

NAME = "rounding.csv"
SENTENCES = (
    "Water boils at a lower temperature on a mountain.",
    "The old clock on the wall had stopped at noon.",
    "A good soup needs time, salt and patience.",
    "Most birds see colors that people do not.",
    "The second chapter is longer than the first.",
    "Rust forms where iron meets air and water.",
    "She closed the window because of the noise.",
    "Prime numbers have exactly two divisors.",
)
N_STEPS = 40
BLOCK = 32  # weights that share a scale
KINDS = {"strings": "any", "names": "names"}
N_SUBJECTS = {"strings": 400, "names": 200}
MARGIN = 1.0
"""Lead of a country, in logits, from which on an answer counts as clear."""


@dataclass(frozen=True)
class Perturbation:
    """What a change of an LM's weights does to answers it was not about."""

    lm: str = column("LM")
    change: str = column()
    strings: float = column("other country, any string", ".0%")
    clear_strings: float = column("of clear answers", ".0%")
    names: float = column("other country, names", ".0%")
    clear_names: float = column("of clear answers", ".0%")
    n_clear_strings: int = column("clear answers, any string", "d")
    n_clear_names: int = column("clear answers, names", "d")
    r: float = column("r of city→country", ".3f")


@torch.no_grad()
def round_weights(model: nn.Module, bits: int) -> None:
    """Round the matrices of all layers to integers of some bits, in blocks with one scale each."""
    largest = 2 ** (bits - 1) - 1
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight is not head_weight(model):
            blocks = module.weight.reshape(-1, BLOCK)
            scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-12) / largest
            module.weight.copy_(((blocks / scale).round() * scale).view_as(module.weight))


def head_weight(model: nn.Module) -> Tensor | None:
    """Return the matrix of an LM's head, which is often that of the token embeddings."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return None if head is None else head.weight


def train(lm: LanguageModel, rate: float) -> None:
    """Train all weights on the sentences."""
    model = lm.model.requires_grad_(True)
    rows = lm.rows(SENTENCES)
    width = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    labels = torch.tensor([[*row[1:], *[-100] * (width - len(row) + 1)] for row in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for _ in range(N_STEPS):
        logits = model(input_ids=tokens).logits
        cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.requires_grad_(False)


def changes() -> Mapping[str, Callable[[LanguageModel], None]]:
    """Return the ways to change an LM, by name."""
    return {
        "none": lambda lm: None,
        "8 bits": lambda lm: round_weights(lm.model, 8),
        "4 bits": lambda lm: round_weights(lm.model, 4),
        **{f"{N_STEPS} steps, {rate:g}": partial(train, rate=rate) for rate in (1e-5, 5e-5)},
    }


def perturbations(path: Path, n_subjects: int, known: set[str]) -> Iterator[Perturbation]:
    """Yield what each change does to an LM; those that are known are left out."""
    lm = LanguageModel(LMConfig(str(path), dtype="float32")).load()
    tokenizer = lm.tokenizer
    country = TokenizedRelation.of("city->country", Catalogue.load(), tokenizer).target
    prompts = {}
    for name, n in N_SUBJECTS.items():
        subjects = sample_up_to(tokenizer, n, kind=KINDS[name])
        prompts[name] = [country.knowledge.prompt(subject) for subject in subjects]

    def logits() -> dict[str, Tensor]:
        return {name: lm.domain_logits(part, country.token_ids) for name, part in prompts.items()}

    base = [parameter.detach().clone() for parameter in lm.model.parameters()]
    before = logits()
    leads = {name: x.topk(2).values.diff(dim=1).abs()[:, 0] for name, x in before.items()}
    for change, apply in changes().items():
        if change in known:
            continue
        apply(lm)
        after = logits()
        moved = {name: x.argmax(1) != before[name].argmax(1) for name, x in after.items()}
        clear = {name: lead > MARGIN for name, lead in leads.items()}
        results = correlate(lm, "city->country", n_subjects=n_subjects)
        yield Perturbation(
            path.name,
            change,
            **{name: float(x.double().mean()) for name, x in moved.items()},
            **{f"clear_{k}": float(x[clear[k]].double().mean()) for k, x in moved.items()},
            **{f"n_clear_{name}": int(x.sum()) for name, x in clear.items()},
            r=results.values["pairs"][0]["label_mean"],
        )
        with torch.no_grad():
            for parameter, value in zip(lm.model.parameters(), base, strict=True):
                parameter.copy_(value)


def read_perturbations(results: Path) -> list[Perturbation]:
    """Return the rows that are known."""
    rows = common.read_csv(results / NAME).to_dict("records")
    return [Perturbation(**{str(key): value for key, value in row.items()}) for row in rows]


def main(folder: str, n_subjects: int = 1000, output: Path = REAL_LMS) -> None:
    """Change all LMs in all ways that the file lacks.

    Args:
        folder: Folder that holds a folder for each LM.
        n_subjects: Number of subjects of the probe, which r is of.
        output: Folder of the results.
    """
    file = output / NAME
    rows = common.read_csv(file) if file.exists() else pd.DataFrame(columns=["lm", "change"])
    for path in common.lms_in(folder):
        known = {*rows[rows["lm"] == path.name]["change"]}
        for row in perturbations(path, n_subjects, known):
            print(row, flush=True)
            rows = pd.concat([rows, pd.DataFrame([asdict(row)])], ignore_index=True)
            common.write_csv(file, rows)


if __name__ == "__main__":
    auto_cli(main)
