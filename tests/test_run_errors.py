"""Errors of a run that no study foresees; those of checkpoints are in test_checkpoints."""

from pathlib import Path

import pytest
import torch

from lincorr_lightning.cli import main
from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.finetune.module import SourceFinetune
from lincorr_lightning.lm.batching import oom_reason


@pytest.mark.parametrize("protocol", ["joint", "independent"])
def test_out_of_memory_in_training(
    protocol: str, small_lm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **more: object) -> None:
        raise torch.OutOfMemoryError("no room. Tried to allocate 2 GiB")

    monkeypatch.setattr(SourceFinetune, "backward", fail)
    message = (
        r"a step of the run does not fit the memory: no room\. Lower model\.edits_per_step "
        r"\(it is 5\)"
    )
    with pytest.raises(LanguageModelError, match=message):
        main(
            [
                "fit",
                "--config",
                "source_finetune.yaml",
                f"--model.lm.name_or_path={small_lm}",
                f"--model.protocol={protocol}",
                "--data.n_edits=7",
                "--model.edits_per_step=5",
                f"--trainer.default_root_dir={tmp_path}",
                "--trainer.enable_progress_bar=false",
            ]
        )
    assert not list(tmp_path.rglob("results.json"))


def test_allocators_without_an_exception_of_their_own() -> None:
    cpu = "[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory"
    cublas = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    assert oom_reason(RuntimeError(cpu)) == oom_reason(RuntimeError(cublas))
    assert oom_reason(RuntimeError(cpu))
    assert oom_reason(RuntimeError("shapes differ")) is None
