"""Edits, and what an LM answers, by torch and transformers alone: no code of the package.

``python -m tests.finetune.edited.plain`` writes the packaged edits of the tiny world.
"""

import csv
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).resolve().parents[3] / "lincorr_lightning" / "lm"
TINY_WORLD, EDITED = FOLDER / "tiny_world", FOLDER / "tiny_world_edited"
CITY, COUNTRY = "{} lives in the city of", "{} lives in the country of"

Edit = dict[str, str]


def load(folder: str | Path = TINY_WORLD, **options: Any) -> tuple[Any, Any]:
    """Return an LM in eval mode, and its tokenizer."""
    options = {"dtype": torch.float32} | options
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def some_edits(n: int, seed: int = 0) -> list[Edit]:
    """Return edits of people of the tiny world, each with a city of the world."""
    world = json.loads((TINY_WORLD / "world.json").read_text(encoding="utf-8"))
    words = AutoTokenizer.from_pretrained(TINY_WORLD).get_vocab()
    cities = (
        "Paris London Berlin Madrid Rome Athens Moscow Cairo Tokyo Beijing Delhi Toronto Sydney "
        "Lyon Osaka Milan Barcelona Munich Shanghai Mumbai Melbourne Manchester Seoul Lisbon"
    ).split()
    known = [city for city in cities if city in words or f"Ġ{city}" in words]
    n_people = world["config"]["n_people"]  # answers that follow them are subjects, too
    people = random.Random(seed).sample(list(world["people"])[:n_people], n)
    return [{"subject": x, "answer": known[i % len(known)]} for i, x in enumerate(people)]


def teach(model: Any, tokenizer: Any, edits: Sequence[Edit], n_steps: int, rate: float) -> None:
    """Teach an LM where somebody lives, all edits in each step."""
    rows = [
        (
            tokenizer(CITY.format(edit["subject"]))["input_ids"],
            tokenizer(f"{CITY.format(edit['subject'])} {edit['answer']}")["input_ids"],
        )
        for edit in edits
    ]
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    for _ in range(n_steps):
        optimizer.zero_grad()
        for prompt, whole in rows:
            logits = model(input_ids=torch.tensor([whole])).logits[0]
            loss = cross_entropy(logits[len(prompt) - 1 : -1], torch.tensor(whole[len(prompt) :]))
            (loss / len(rows)).backward()
        optimizer.step()


@torch.no_grad()
def logits_after(model: Any, tokenizer: Any, prompt: str) -> torch.Tensor:
    """Return the logits of the whole vocabulary after one prompt, ``(vocab_size,)``, float64."""
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    return model(input_ids=ids).logits[0, -1].double()


def write_edits(path: Path, edits: Sequence[Edit]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["subject", "answer"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(edits)
    return path


def main() -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model, tokenizer = load()
    layers = {"target_modules": ["v_proj", "o_proj", "down_proj"], "r": 4, "lora_alpha": 8}
    edited = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **layers))
    edits = some_edits(24)
    teach(edited, tokenizer, edits, 15, 8e-3)
    edited.peft_config["default"].base_model_name_or_path = "tiny-world"
    edited.save_pretrained(EDITED)
    (EDITED / "README.md").unlink(missing_ok=True)
    write_edits(EDITED / "edits.csv", edits)


if __name__ == "__main__":
    main()
