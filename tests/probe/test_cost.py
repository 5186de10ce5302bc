"""`model.dry_run`: what a probe will take, shown before anything is read."""

import re
import shutil
from pathlib import Path

import pytest

from lincorr_lightning import LanguageModel
from lincorr_lightning.cli import main
from lincorr_lightning.data.subjects import SubjectsDataModule
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.probe.module import LinearProbe
from tests.toys import quiet_trainer

PROBE = ("--config", "linear_probe.yaml", "--model.knowledge=[city, color]")


def numbers(text: str) -> dict[str, list[float]]:
    """Numbers of each line, by its first word."""
    lines = (line.partition(": ") for line in text.splitlines())
    found = {name: re.findall(r"\d[\d,]*", rest) for name, _, rest in lines}
    return {name: [float(n.replace(",", "")) for n in each] for name, each in found.items()}


def test_a_dry_run_reads_nothing_and_leaves_no_folder(
    tmp_path: Path, small_lm: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = tmp_path / "lm"
    shutil.copytree(small_lm, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    monkeypatch.chdir(tmp_path)
    options = "--model.control=null", "--model.random_labels=0", "--model.require_reference=[]"
    data = "--data.n_subjects=100", "--data.batch_size=20", "--data.words_per_subject=2"
    main(["fit", *PROBE, *options, *data, f"--model.lm.name_or_path={folder}",
          "--model.dry_run=true", "--model.layers=[0]"])  # fmt: skip
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
