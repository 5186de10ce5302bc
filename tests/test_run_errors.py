"""Errors of a run that no study foresees; those of checkpoints are in test_checkpoints."""

from pathlib import Path

import pytest
import torch

from lincorr_lightning.cli import main
from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.finetune.module import SourceFinetune
from lincorr_lightning.lm.batching import oom_reason
from lincorr_lightning.pretraining.module import Pretraining

QUIET = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
WORLD = [
    "--data.world.n_people=31", "--data.world.nicknames=false", "--data.world.letters=false",
    "--data.world.numbered=false", "--data.knowledge=[city,country]", "--data.repeats={}",
    "--data.batch_size=30", "--model.size.hidden_size=32", "--model.size.intermediate_size=48",
    "--model.size.n_heads=2", "--trainer.max_epochs=1", "--model.mixing_epochs=0",
]  # fmt: skip


@pytest.mark.parametrize(
    ("study", "arguments", "message"),
    [
        (
            SourceFinetune,
            ["--config", "source_finetune.yaml", "--model.protocol=joint", "--data.n_edits=7",
             "--model.forecast=false", "--model.edits_per_step=5"],
            r"batch size 5 and sequence length \d+ does not fit .*: no room\. Lower "
            r"model\.edits_per_step \(it is 5\)",
        ),
        (
            Pretraining,
            ["--config", "pretraining.yaml", *WORLD],
            r"batch size \d+ and sequence length \d+ .*: no room\. .*data\.batch_size \(it is 30\)",
        ),
    ],
)  # fmt: skip
def test_out_of_memory_in_training(
    study: type, arguments: list[str], message: str, small_lm: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def fail(*args: object, **more: object) -> None:
        raise torch.OutOfMemoryError("no room. Tried to allocate 2 GiB")

    monkeypatch.setattr(study, "backward", fail)
    lm = [] if study is Pretraining else [f"--model.lm.name_or_path={small_lm}"]
    with pytest.raises(LanguageModelError, match=message):
        main(["fit", *arguments, *lm, f"--trainer.default_root_dir={tmp_path}", *QUIET])
    assert not list(tmp_path.rglob("results.json"))


def test_allocators_without_an_exception_of_their_own() -> None:
    cpu = "[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory"
    cublas = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    assert oom_reason(RuntimeError(cpu)) == oom_reason(RuntimeError(cublas))
    assert oom_reason(RuntimeError(cpu))
    assert oom_reason(RuntimeError("shapes differ")) is None
