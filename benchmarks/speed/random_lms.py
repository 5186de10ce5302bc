"""What commands.py measures the growth on: made-up knowledge, and LMs with random weights.

    python -m benchmarks.speed.random_lms FOLDER

writes a file of two kinds of knowledge for each number of labels, ``20.yaml``, and the folder of an
LM of Llama's shape and the tiny world's words for each size, ``15M``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers as hf
from jsonargparse import auto_cli

from benchmarks.common import write_text
from lincorr_lightning import LanguageModel
from lincorr_lightning.lm import LMConfig, usable_strings

LABELS = (20, 60, 180, 500, 1000)
SHAPES = {"15M": (320, 9), "135M": (768, 14), "500M": (1280, 19), "1.5B": (2048, 22)}
"""Width and number of layers."""


def knowledge_of(words: Sequence[str]) -> str:
    """Return a file with two kinds of knowledge whose answers are these words."""
    about = {"family": "attribute", "language": "en", "answers": "word"}
    templates = {"first": "{} lives in the city of", "second": "{} lives in the country of"}
    knowledge = {name: about | {"template": text} for name, text in templates.items()}
    entities = {"word": {word: {} for word in words}}
    content = {"version": 1, "source": "vocabulary", "entities": entities, "knowledge": knowledge}
    return json.dumps(content)


def main(folder: Path) -> None:
    """Write all files into a folder."""
    tokenizer = LanguageModel(LMConfig()).tokenizer
    words = usable_strings(tokenizer, whole_words=True)
    for n in LABELS:
        write_text(folder / f"{n}.yaml", knowledge_of(words[:n]))
    for name, (width, n_layers) in SHAPES.items():
        config = hf.LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=n_layers,
            num_attention_heads=width // 64,
        )
        model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for part in (model, tokenizer):
            part.save_pretrained(folder / name)


if __name__ == "__main__":
    auto_cli(main)
