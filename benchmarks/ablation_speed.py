"""Time an epoch of the vocabulary ablation, beside its bare matrix products.

    python benchmarks/ablation_speed.py [--lm FOLDER]

times the compose phase as the study runs it, the matrix products of its forward and backward passes
alone, and the plain way: every text pooled again at every step, and the loss over the whole
vocabulary.
Without --lm the vocabulary is random, 30,522 × 384 as that of a small sentence encoder.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from jsonargparse import auto_cli
from torch.nn.functional import cross_entropy, embedding_bag

from lincorr_lightning.ablation.datamodule import PairedTextsDataModule
from lincorr_lightning.ablation.module import PhaseSettings, VocabularyAblation
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.results.table import markdown_table

EPOCHS, BATCH = 10, 256


class Clock(L.Callback):
    """When the compose phase begins and ends."""

    began = ended = 0.0

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begin at its second epoch, when everything is warm."""
        if batch.phase == "compose" and batch.epoch == 1 and not self.began:
            self.began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End before the last epoch, which is scored."""
        if batch.phase == "compose" and batch.epoch == EPOCHS - 2 and batch.ends_epoch:
            self.ended = time.perf_counter()


def random_vocabulary(folder: Path) -> str:
    """A checkpoint with the words of the catalogue and many others, without any layer's weights."""
    from safetensors.torch import save_file
    from transformers import BertConfig

    from lincorr_lightning.data.tiny_world.words import build_tokenizer
    from lincorr_lightning.knowledge import Catalogue

    catalogue = Catalogue.load()
    words = [a.text for name in ("city", "country") for a in catalogue[name].answers]
    words += [catalogue[name].prompt("X") for name in ("city", "country")]
    build_tokenizer([*words, *(f"w{chr(97 + i % 26)}{chr(97 + i // 26 % 26)}{chr(97 + i // 676)}"
                              for i in range(17000))]).save_pretrained(folder)  # fmt: skip
    BertConfig(vocab_size=30522, hidden_size=384, intermediate_size=1536).save_pretrained(folder)
    torch.manual_seed(0)
    matrix = torch.randn(30522, 384) * 0.05
    save_file({"embeddings.word_embeddings.weight": matrix}, folder / "model.safetensors")
    return str(folder)


def median(step: Callable[[], object], n: int = 20) -> float:
    """Seconds of a step."""
    times = []
    for _ in range(n + 3):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return sorted(times[3:])[n // 2]


def studied(lm: str, n_networks: int, folder: str) -> tuple[float, VocabularyAblation]:
    """Seconds of an epoch of the study, and the study."""
    module = VocabularyAblation(
        LMConfig(lm), seeds=list(range(n_networks)), skip_compose_baseline=False, score_every=1000,
        compose=PhaseSettings(epochs=EPOCHS, batch_size=BATCH), learn=PhaseSettings(1, 128),
    )  # fmt: skip
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[clock],
    )  # fmt: skip
    trainer.fit(module, PairedTextsDataModule(module.plan, max_source_labels=40))
    return (clock.ended - clock.began) / (EPOCHS - 2), module


def products(module: VocabularyAblation, n_networks: int) -> Callable[[], object]:
    """The matrix products of one step, forward and backward, and nothing else."""
    texts = module.texts
    assert texts is not None
    d, k = texts.head.shape[1:]
    w = module.networks.weight_in.shape[2]
    shapes = [(BATCH, d, w), (BATCH, w, d), (BATCH, d, k),  # forward
              (BATCH, k, d), (BATCH, d, w), (w, BATCH, d), (d, BATCH, w)]  # backward  # fmt: skip
    pairs = [(torch.randn(n_networks, m, i), torch.randn(n_networks, i, n)) for m, i, n in shapes]
    return lambda: [torch.bmm(a, b) for a, b in pairs]


def plain_step(module: VocabularyAblation) -> Callable[[], object]:
    """One step the plain way, for one network."""
    assert module.embedding is not None and module.texts is not None
    weight, corpus = module.embedding.weight.float(), module.texts.corpus
    ids = corpus.token_ids[0][:BATCH]
    flat = torch.tensor([token for row in ids for token in row])
    starts = torch.tensor([0, *map(len, ids[:-1])]).cumsum(0)
    tokens = corpus.mapped[0][0].source_tokens
    answers = torch.tensor([tokens[i] for i in corpus.texts[0].answers[:BATCH]])
    d = weight.shape[1]
    network = torch.nn.Sequential(
        torch.nn.Linear(d, 4 * d), torch.nn.GELU(), torch.nn.Linear(4 * d, d)
    )
    optimizer = torch.optim.AdamW(network.parameters())

    def step() -> None:
        pooled = embedding_bag(flat, weight, starts, mode="mean")
        loss = cross_entropy((pooled + network(pooled)) @ weight.T, answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def main(lm: str | None = None, networks: list[int] | None = None) -> None:
    """Print the table.

    Args:
        lm: LM whose vocabulary is used: a folder, a hub id or tiny-world; null makes a random one.
        networks: Numbers of networks side by side.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        name = lm or random_vocabulary(Path(folder) / "lm")
        for n_networks in networks or [1, 3, 6]:
            seconds, module = studied(name, n_networks, folder)
            assert module.texts is not None
            n_steps = -(-2 * module.texts.corpus.n_paired // BATCH)
            bare = median(products(module, n_networks)) * n_steps
            plain = median(plain_step(module), 5) * n_steps * n_networks
            rows.append(
                [n_networks, f"{seconds * 1e3:.0f} ms", f"{bare * 1e3:.0f} ms",
                 f"{seconds / bare:.2f}x", f"{plain * 1e3:.0f} ms", f"{plain / seconds:.1f}x"]
            )  # fmt: skip
    shape = "random 30,522 × 384" if lm is None else lm
    print(f"{shape}, {torch.get_num_threads()} threads, {module.texts.head.shape[-1]} candidates\n")
    columns = ["networks", "epoch", "bare matrix products", "ratio", "plain way", "gain"]
    print(markdown_table(columns, rows))


if __name__ == "__main__":
    auto_cli(main)
