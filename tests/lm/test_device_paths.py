"""Code that differs by device (docs/many_gpus.md has the list), as far as a CPU can run it."""

from collections.abc import Callable
from types import SimpleNamespace

import lightning as L
import pytest
import torch

from lincorr_lightning.ablation import VocabularyAblation
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.finetune.adapters import AdapterSettings
from lincorr_lightning.finetune.module import SourceFinetune
from lincorr_lightning.lm.batching import MicroBatches
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.shared_prefixes import grow_trees, pack_trees
from lincorr_lightning.pretraining.datamodule import CorpusDataModule
from lincorr_lightning.pretraining.module import Pretraining
from lincorr_lightning.probe.module import LinearProbe
from lincorr_lightning.sae.module import SparseAutoencoders
from tests.lm.test_batching import Memory, run


@pytest.mark.parametrize(("device", "most"), [("cpu", 4096), ("cuda", 32768), ("xpu", 32768)])
def test_an_accelerator_gets_large_batches(device: str, most: int) -> None:
    sizes: list[int] = []
    MicroBatches(width=64).run([8] * 10_000, device, lambda rows: sizes.append(len(rows)))
    assert sum(sizes) == 10_000
    assert max(sizes) * 8 == most


def test_memory_that_ran_out_on_a_gpu_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    run(MicroBatches(), Memory([8] * 300, limit=800), "cuda")
    assert emptied


@pytest.mark.parametrize(("device", "length"), [("cpu", 5), ("meta", 8)])
def test_masks_on_an_accelerator_are_aligned(device: str, length: int) -> None:
    trees = list(grow_trees({0: [1, 2, 3], 1: [1, 2, 4, 5]}))
    batch = pack_trees(trees, torch.float32, torch.device(device))
    assert batch["attention_mask"].shape == (1, 1, length, length)
    assert batch["input_ids"].device.type == device


def test_a_device_without_float64_is_refused(small_lm: str) -> None:
    probe = LinearProbe({"name_or_path": small_lm}, ["city", "color"])  # type: ignore[arg-type]
    strategy = SimpleNamespace(root_device=torch.device("mps"))
    probe._trainer = SimpleNamespace(precision="32-true", strategy=strategy)  # type: ignore
    with pytest.raises(ConfigError, match="mps has no float64"):
        probe.setup("fit")


@pytest.mark.parametrize("kind", ["edits", "joint", "SAEs", "ablation", "pretraining"])
def test_what_is_trained_starts_alike_on_any_device(kind: str, small_lm: str) -> None:
    lm = LMConfig(small_lm)
    makers: dict[str, Callable[[], L.LightningModule]] = {
        "edits": lambda: SourceFinetune(lm, method="lora", adapter=AdapterSettings(seed=3)),
        "joint": lambda: SourceFinetune(
            lm, method="lora", adapter=AdapterSettings(seed=3), protocol="joint"
        ),
        "SAEs": lambda: SparseAutoencoders(lm),
        "ablation": lambda: VocabularyAblation(lm),
        "pretraining": Pretraining,
    }
    parameters = []
    # Lightning calls it within the context of the Trainer's device; here, of one without values.
    for device in ("cpu", "meta"):
        module = makers[kind]()
        if isinstance(module, Pretraining):
            data = CorpusDataModule(20, ["city", "pet"])
            data.setup()
            module.corpus = data.corpus
        elif not isinstance(module, VocabularyAblation):
            module.lm.load()  # type: ignore[operator, union-attr]
        torch.manual_seed(0)
        with torch.device(device):
            module.configure_model()
        parameters.append(dict(module.named_parameters()))
    expected, found = parameters
    assert expected
    assert {key: x.device.type for key, x in found.items()} == dict.fromkeys(expected, "cpu")
    assert all(torch.equal(found[key], x) for key, x in expected.items())
