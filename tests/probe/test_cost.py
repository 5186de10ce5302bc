"""`model.dry_run`: what a probe will take, before anything is read, against what it takes."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lincorr_lightning import LanguageModel
from lincorr_lightning.cli import main
from lincorr_lightning.data.subjects import SubjectsDataModule
from lincorr_lightning.errors import ConfigError, LanguageModelError
from lincorr_lightning.lm import LMConfig
from lincorr_lightning.probe import cost
from lincorr_lightning.probe.module import LinearProbe
from tests.lm.small_lms import ARCHITECTURES, config_of, save_lm
from tests.toys import quiet_trainer

CPU = torch.device("cpu")
TEMPLATES = ("{} lives in the city of", "{} lives in the country of", "the {} saw a")
SUBJECTS = ["Paris", "Oslo Lima", "a"]
PROBE = ("--config", "linear_probe.yaml", "--model.knowledge=[city, color]")


def numbers(text: str) -> dict[str, list[float]]:
    """Numbers of each line, by its first word."""
    lines = (line.partition(": ") for line in text.splitlines())
    found = {name: re.findall(r"\d[\d,]*", rest) for name, _, rest in lines}
    return {name: [float(n.replace(",", "")) for n in each] for name, each in found.items()}


def test_a_dry_run_reads_nothing_and_leaves_no_folder(
    tmp_path: Path,
    small_lm: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "lm"
    without_weights(Path(small_lm), folder)
    monkeypatch.chdir(tmp_path)
    options = "--model.control=null", "--model.random_labels=0", "--model.require_reference=[]"
    data = "--data.n_subjects=100", "--data.batch_size=20", "--data.words_per_subject=2"
    lm = f"--model.lm.name_or_path={folder}", "--model.lm.state_cache=states"
    main(["fit", *PROBE, *options, *data, *lm, "--model.dry_run=true", "--model.layers=[0]"])
    found = numbers(capsys.readouterr().out)
    assert [path.name for path in tmp_path.iterdir()] == ["lm"]
    assert found["prompts"][:2] == [2 * 100 * 2, 2]  # kinds, subjects, views
    whole = LanguageModel.from_pretrained(small_lm)
    assert found["LM"][-1] == whole.model.num_parameters()
    assert 2 * 100 * 2 * 3 < found["tokens"][0] < 2 * 100 * 2 * 20
    total, *parts = found["time"]
    assert total == pytest.approx(sum(parts), abs=3)
    assert found["memory"][0] == pytest.approx(sum(found["memory"][1:]), abs=3)


def test_a_dry_run_is_refused_where_it_would_not_end_the_run(tmp_path: Path, small_lm: str) -> None:
    probe = LinearProbe({"name_or_path": small_lm}, ["city", "color"], dry_run=True)  # type: ignore
    data = SubjectsDataModule(probe.lm, n_subjects=100)
    with pytest.raises(ConfigError, match=r"model\.dry_run is an option of `lincorr fit` alone"):
        quiet_trainer(tmp_path).fit(probe, datamodule=data)
    assert not probe.lm.is_loaded


def read(lm: LanguageModel, subjects: Any) -> torch.Tensor:
    prompts = [[template.replace("{}", x) for x in subjects] for template in TEMPLATES]
    return lm.joint_logits(prompts, [[5, 6, 7]] * len(TEMPLATES))


def without_weights(folder: Path, copy: Path) -> str:
    ignored = shutil.ignore_patterns("*.safetensors")
    return str(shutil.copytree(folder, copy, ignore=ignored))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_size_and_tokens_are_those_of_the_lm(architecture: str, tmp_path: Path) -> None:
    """Also those of LMs with layers of several types; the folder has no weights."""
    stored = save_lm(tmp_path / "stored", config_of(architecture))
    whole = LanguageModel.from_pretrained(str(stored))
    folder = without_weights(stored, tmp_path / "lm")
    lm = LanguageModel(LMConfig(folder, share_prefixes=False, tokens_per_forward=1))
    found = cost.estimate_reading(lm, read, SUBJECTS, CPU)
    assert not lm.is_loaded
    assert found.n_parameters == whole.model.num_parameters()
    assert found.mib * 2**20 == sum(p.numel() * p.element_size() for p in whole.model.parameters())
    rows = [whole.rows([t.replace("{}", x) for x in SUBJECTS]) for t in TEMPLATES]
    # Where a function follows the head, a forward pass of one token applies it.
    follows = architecture in ("gemma2", "cohere", "granite", "mamba")
    n_tokens = sum(len(row) for each in rows for row in each) + follows
    assert found.n_tokens * len(SUBJECTS) == n_tokens
    assert found.how == "one by one" and found.seconds > 0


def test_shared_beginnings_are_read_once(tmp_path: Path) -> None:
    lm = LanguageModel(LMConfig(str(save_lm(tmp_path, config_of("llama"))), share_prefixes=True))
    found = cost.estimate_reading(lm, read, SUBJECTS[:1], CPU)
    rows = [lm.rows([t.replace("{}", SUBJECTS[0])])[0] for t in TEMPLATES]
    beginnings = {tuple(row[: i + 1]) for row in rows for i in range(len(row))}
    assert found.n_tokens == len(beginnings) < sum(map(len, rows))


def test_each_further_layer_takes_what_the_second_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.thread_time", lambda: clock[0])

    def takes_time(lm: LanguageModel, subjects: Any) -> None:
        read(lm, subjects)
        clock[0] += {1: 3.0, 2: 3.5}[lm.n_layers or 0]

    lm = LanguageModel(LMConfig(str(save_lm(tmp_path, config_of("llama")))))
    lm._model_config.num_hidden_layers = 9
    found = cost.estimate_reading(lm, takes_time, SUBJECTS, CPU)
    assert found.seconds * len(SUBJECTS) == pytest.approx(3.0 + 8 * 0.5)


def test_an_lm_whose_layers_are_not_counted_is_refused(tmp_path: Path) -> None:
    lm = LanguageModel(LMConfig(str(save_lm(tmp_path, config_of("llama")))))
    lm._model_config = SimpleNamespace(get_text_config=lambda: SimpleNamespace())  # type: ignore
    with pytest.raises(LanguageModelError, match="no num_hidden_layers"):
        cost.estimate_reading(lm, read, SUBJECTS, CPU)
