from importlib.resources import files
from pathlib import Path

import lightning as L
import pytest
import yaml
from jsonargparse import ArgumentParser

from lincorr_lightning.lm.config import LMConfig

CONFIGS = Path(str(files("lincorr_lightning.configs") / "lm"))
SHIPPED = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


class Study(L.LightningModule):
    """Takes an LM as every study does.

    Args:
        lm: The LM.
        ridge: Something else.
    """

    def __init__(self, lm: LMConfig = LMConfig(), ridge: float = 0.0) -> None:  # noqa: B008
        super().__init__()
        self.lm = lm
        self.ridge = ridge


def parser() -> ArgumentParser:
    made = ArgumentParser()
    made.add_argument("--config", action="config")
    made.add_subclass_arguments(L.LightningModule, "model", fail_untyped=False)
    return made


@pytest.mark.parametrize("name", SHIPPED)
def test_laid_over_a_study(name: str, tmp_path: Path) -> None:
    study = tmp_path / "study.yaml"
    path = f"{Study.__module__}.{Study.__qualname__}"
    lm = {"name_or_path": "tiny-world", "dtype": "float32", "add_bos": True}
    init_args = {"ridge": 2.0, "lm": lm}
    study.write_text(yaml.safe_dump({"model": {"class_path": path, "init_args": init_args}}))
    made = parser()
    config = made.parse_args([f"--config={study}", f"--config={CONFIGS / name}.yaml"])
    model = made.instantiate(config).model
    options = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["model"]["init_args"]["lm"]
    assert options["name_or_path"] != "tiny-world"
    assert model.ridge == 2.0
    # What the overlay does not mention stays the study's.
    assert model.lm == LMConfig(**(lm | options))
