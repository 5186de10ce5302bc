"""Checkpoints of a LightningModule that holds an LM, and the logits of the LM that was trained."""

import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from written_lms import ROWS, make_lm, save_logits, save_tokenizer

FOLDER = Path(sys.argv[1])


class Holder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_lm()

    def training_step(self, ids: torch.Tensor, _: int) -> torch.Tensor:
        return self.net(input_ids=ids, labels=ids).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Sharded(Holder):
    def configure_model(self) -> None:
        from torch.distributed._composable.fsdp import fully_shard

        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def train(
    name: str, module: Any, *callbacks: Any, weights_only: bool = False, **options: Any
) -> Any:
    folder = FOLDER / name
    saved = ModelCheckpoint(folder, filename="last", save_weights_only=weights_only)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saved, *callbacks],
        **options,
    )
    rows = [torch.tensor(row) for row in ROWS if len(row) > 1]
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=1))
    return module


def main() -> None:
    make_lm().save_pretrained(FOLDER / "base")
    save_tokenizer(FOLDER / "base")
    save_logits(FOLDER / "plain.npz", train("plain", Holder()).net)
    save_logits(FOLDER / "weights.npz", train("weights", Holder(), weights_only=True).net)
    ema = train("ema", Holder(), EMAWeightAveraging(decay=0.5))
    save_logits(FOLDER / "ema.npz", ema.net)  # after the fit, the module has the average
    for name, is_sharded in ("fsdp2", True), ("fsdp2-whole", False):
        strategy = ModelParallelStrategy(1, 1, is_sharded, process_group_backend="gloo")
        save_logits(FOLDER / f"{name}.npz", train(name, Sharded(), strategy=strategy).net)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
