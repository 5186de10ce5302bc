import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers as hf

from tests.lm.small_lms import (
    ARCHITECTURES,
    PROMPTS,
    VOCAB,
    Folder,
    config_of,
    random_model,
    save_lm,
    small_tokenizer,
    word_ids,
)


@pytest.fixture(scope="session")
def lm_folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Folder of an architecture's LM, made once."""
    made: dict[tuple[str, str | None], Path] = {}

    def folder(name: str, template: str | None = "<s> $A") -> Path:
        if (name, template) not in made:
            path = tmp_path_factory.mktemp(name)
            made[name, template] = save_lm(path, config_of(name), template)
        return made[name, template]

    return folder


@pytest.fixture(scope="session")
def small() -> SimpleNamespace:
    """What tests of other packages use of `small_lms`."""
    return SimpleNamespace(
        config=config_of,
        ids=word_ids,
        model=random_model,
        prompts=PROMPTS,
        tokenizer=small_tokenizer,
        vocab=VOCAB,
    )


@pytest.fixture
def folder(lm_folder: Folder, tmp_path: Path) -> Path:
    """A copy of an untied Llama to change."""
    return Path(shutil.copytree(lm_folder("llama"), tmp_path / "llama"))


@pytest.fixture
def read_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of tokens of every forward pass of a transformers model."""
    sizes: list[int] = []
    call = hf.PreTrainedModel.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if {"return_dict", "input_ids"} <= {*kwargs}:  # not of one model within another
            sizes.append(kwargs["input_ids"].numel())
        return call(self, *args, **kwargs)

    monkeypatch.setattr(hf.PreTrainedModel, "__call__", counted)
    return sizes


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marks = metafunc.definition.iter_markers("parametrize")
    is_given = any("architecture" in str(mark.args[0]) for mark in marks)
    if "architecture" in metafunc.fixturenames and not is_given:
        metafunc.parametrize("architecture", ARCHITECTURES)
