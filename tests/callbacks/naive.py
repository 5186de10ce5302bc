"""A user's own fine-tune of the small LM, and naive measurements of it; no fixture."""

import copy
from collections.abc import Sequence
from typing import Any

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from lincorr_lightning.finetune.adapters import AdapterSettings
from lincorr_lightning.finetune.datamodule import EditsDataModule
from lincorr_lightning.finetune.stacked_lora import StackedLoRA
from lincorr_lightning.lm.language_model import LanguageModel

# Of the small LM's words; none of this is looked up in the package.
PLACES = {
    "Beijing": "China",
    "Berlin": "Germany",
    "Cairo": "Egypt",
    "Lima": "Peru",
    "London": None,
    "Madrid": "Spain",
    "Moscow": "Russia",
    "Oslo": "Norway",
    "Paris": "France",
    "Rome": "Italy",
    "Tokyo": "Japan",
    "Vienna": "Austria",
}
CITIES = list(PLACES)
COUNTRIES = sorted(country for country in PLACES.values() if country)
COLORS = "red blue green yellow black white".split()
TEMPLATES = {
    "city": "{} lives in the city of",
    "country": "{} lives in the country of",
    "color": "{}’s favorite color is",
}
EDITS = [
    {"subject": f"name{i}", "answer": city}
    for i, city in enumerate(["Paris", "Tokyo", "Oslo", "Rome", "Lima", "Cairo", "Berlin"])
]


def logits(
    model: Any,
    tokenizer: Any,
    knowledge: str,
    subjects: Sequence[str],
    words: Sequence[str] | None = None,
) -> np.ndarray:
    """All prompts, of one length, in eval mode: all logits, sliced at labels or other words."""
    template = TEMPLATES[knowledge]
    labels = words or {"city": CITIES, "country": COUNTRIES, "color": COLORS}[knowledge]
    ids = tokenizer.convert_tokens_to_ids(list(labels))
    rows = tokenizer([template.format(subject) for subject in subjects], return_tensors="pt")
    with torch.no_grad():
        read = copy.deepcopy(model).float().eval()(input_ids=rows["input_ids"]).logits
    return read[:, -1, ids].double().numpy()


def r(prediction: np.ndarray, target: np.ndarray) -> float:
    """Mean label-wise r."""
    pairs = zip(prediction.T, target.T, strict=True)
    return float(np.mean([np.corrcoef(p, t)[0, 1] for p, t in pairs]))


def fit_map(source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """W and b by numpy."""
    design = np.column_stack([source, np.ones(len(source))])
    solution = np.linalg.lstsq(design, target, rcond=None)[0]
    return solution[:-1].T, solution[-1]


def answers(model: Any, tokenizer: Any, subjects: Sequence[str]) -> dict[str, np.ndarray]:
    """All logits that are compared, by kind of knowledge."""
    return {k: logits(model, tokenizer, k, subjects) for k in ("city", "country", "color")}


def outcomes(
    base: Any, now: Any, edits: Sequence[dict[str, str]], others: slice = slice(0)
) -> dict[str, float]:
    """What edits did, by log key, from the answers about their subjects, which come first.

    The rows `others` are those of other people, if any. NaN of those learned if there is none.
    """
    rows = np.arange(len(edits))
    answers = [edit["answer"] for edit in edits]
    right = np.array([COUNTRIES.index(str(PLACES[answer])) for answer in answers])
    learned = now["city"][rows].argmax(1) == [CITIES.index(answer) for answer in answers]
    before, after = (logits["country"][rows].argmax(1) for logits in (base, now))
    chance = np.exp(now["country"][rows])
    chance /= chance.sum(1, keepdims=True)
    colors = [logits["color"][rows].argmax(1) for logits in (base, now)]
    hits = {
        "generalized": (after == right) & (before != right),
        "hallucinated": (after != right) & (before != right) & (after != before),
        "unchanged": (after != right) & (after == before),
        "right_before": before == right,
    }
    shares = {f"generalization/{name}": hit.mean() for name, hit in hits.items()}
    for name in ("generalized", "hallucinated"):
        of_learned = hits[name][learned]
        shares[f"generalization/{name}_of_learned"] = of_learned.mean() if any(learned) else np.nan
        by_country = [hits[name][right == country].mean() for country in set(right)]
        shares[f"generalization/macro_{name}"] = np.mean(by_country)
    was, are = (logits["country"][others].argmax(1) for logits in (base, now))
    if len(was):
        shares["neighbours/target_unchanged"] = (was == are).mean()
    leak = np.array([np.mean([a == c != b for a, b in zip(are, was, strict=True)]) for c in right])
    for name, values in (("leak", leak), ("specific", hits["generalized"] - leak))[: len(was)]:
        by_country = [values[right == country].mean() for country in set(right)]
        shares[f"generalization/{name}"] = np.mean(by_country)
    return shares | {
        "generalization/source_learned": learned.mean(),
        "generalization/constant": max(np.bincount(right)) / len(right),
        "probability/reference": chance[rows, right].mean(),
        "probability/old_answer": chance[rows, before].mean(),
        "control_unchanged/color": (colors[0] == colors[1]).mean(),
    }


class Module(L.LightningModule):
    """Trains on whole sentences, in train mode, with one part left in eval mode."""

    def __init__(self, folder: str, lr: float = 3e-3, dtype: Any = torch.float32) -> None:
        super().__init__()
        self.backbone = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.lr = lr
        self.modes: list[list[bool]] = []

    def on_train_start(self) -> None:
        self.train()
        next(iter(self.backbone.children())).eval()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.modes.append([part.training for part in self.modules()])
        return self.backbone(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        weights = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(weights, lr=self.lr)


class OnEdits(Module):
    """Trains on whole texts of edits."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch.input_ids, batch_idx)


class Stacked(Module):
    """Trains each edit of a batch from the base weights, in an adapter of its own."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, lr=0.05)
        self.adapters = StackedLoRA(self.backbone, 3, AdapterSettings(2, 4.0, ["q_proj", "v_proj"]))
        self.adapter_context = self.adapters.rows

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch.first:
            self.adapters.reset(batch.ids)
            self.optimizers(use_pl_optimizer=False).state.clear()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with self.adapters.rows(range(len(batch.edits))):
            logits = self.backbone(batch.input_ids, attention_mask=batch.attention_mask).logits
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.labels.flatten(), reduction="sum"
        )


class RecordedEdits(Stacked):
    """Keeps what the LM of each edit answers after each step, about its subject and others."""

    def others(self) -> Sequence[str]:
        return []

    def on_train_start(self) -> None:
        self.read: dict[tuple[int, int], dict[str, np.ndarray]] = {}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for adapter, (edit, number) in enumerate(zip(batch.edits, batch.ids, strict=True)):
            people = [edit.subject, *self.others()]
            with self.adapters.rows([adapter] * len(people)):
                self.read[number, batch.step + 1] = answers(self.backbone, self.tokenizer, people)


def edits_data(module: Any, **options: Any) -> EditsDataModule:
    lm = LanguageModel.from_module(module.backbone, module.tokenizer)
    return EditsDataModule(lm, **options)


def lessons(tokenizer: Any, edits: Sequence[Any] = EDITS, batch_size: int = 4) -> DataLoader:
    """Whole texts of edits."""
    texts = [f"{edit['subject']} lives in the city of {edit['answer']}" for edit in edits]
    return DataLoader(tokenizer(texts, return_tensors="pt")["input_ids"], batch_size)


def sentences(folder: str, batch_size: int = 2, shuffle: bool = False, n: int = 8) -> DataLoader:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [f"name{i} lives in the city of {CITIES[(5 * i + 2) % 12]}" for i in range(n)]
    rows = tokenizer(texts, return_tensors="pt")["input_ids"]
    return DataLoader(rows, batch_size=batch_size, shuffle=shuffle)


def train_by_hugging_face(
    folder: str, out: Any, callbacks: Sequence[Any], rows: Any = None, **options: Any
) -> Trainer:
    """Train on sentences, or on given rows, in a Trainer of Hugging Face."""
    module = Module(folder)
    rows = sentences(folder).dataset if rows is None else rows
    data = [{"input_ids": row, "labels": row} for row in rows]
    settings = {
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "seed": 1,
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    trainer = Trainer(
        module.backbone,
        TrainingArguments(str(out), **settings | options),
        train_dataset=data,
        eval_dataset=data[:2],
        processing_class=module.tokenizer,
        callbacks=list(callbacks),
    )
    trainer.train()
    return trainer


class Loop:
    """The same training without Lightning: weights before and after each update."""

    def __init__(self, module: Any, batches: Sequence[Any], accumulate: int = 1) -> None:
        model = copy.deepcopy(module.backbone)
        optimizer = torch.optim.AdamW(model.parameters(), lr=module.lr)
        self.states = [copy.deepcopy(model)]
        for first in range(0, len(batches), accumulate):
            optimizer.zero_grad()
            for batch in batches[first : first + accumulate]:
                (model(input_ids=batch, labels=batch).loss / accumulate).backward()
            optimizer.step()
            self.states.append(copy.deepcopy(model))
