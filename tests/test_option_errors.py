"""Unknown options and old names: one line that names the right one."""

from pathlib import Path

import pytest

from lincorr_lightning.cli import main
from lincorr_lightning.option_errors import RENAMED_CLASSES, RENAMED_OPTIONS, explain

PROBE = ["fit", "--config", "linear_probe.yaml"]


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The line that the program writes."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("lincorr: error: ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([*PROBE, "--model.rigde", "1"],
         "there is no option model.rigde; did you mean model.ridge?"),
        ([*PROBE, "--model.lm.dtpe=float32"],
         "there is no option model.lm.dtpe; did you mean model.lm.dtype?"),
        ([*PROBE, "--modle.ridge=1"], "there is no option modle.ridge; did you mean model.ridge?"),
        ([*PROBE, "--trainer.max_epohcs=1"],
         "there is no option trainer.max_epohcs; did you mean trainer.max_epochs?"),
        ([*PROBE, "--model.zzzz=1"],
         "there is no option model.zzzz; `--model.help LinearProbe` lists them."),
        ([*PROBE, "--data.n_inputs=3"], "data.n_inputs is now data.n_subjects."),
        ([*PROBE, "--data.words_per_input=2"],
         "data.words_per_input is now data.words_per_subject."),
        (["fit", "--model", "LinearPrope"],
         "model: there is no class LinearPrope; did you mean LinearProbe?"),
        (["fit", "--data", "PromptInputs"], "PromptInputs is now SubjectsDataModule."),
        (["test", "--model", "FeatureFlowStudy"], "FeatureFlowStudy is now FeatureFlow."),
    ],
)  # fmt: skip
def test_on_the_command_line(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error_of(arguments, capsys) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: {init_args: {rigde: 1}}",
         "there is no option model.rigde (in {}); did you mean model.ridge?"),
        ("model: {init_args: {lm: {dtpe: float32}}}",
         "there is no option model.lm.dtpe (in {}); did you mean model.lm.dtype?"),
        ("trainer: {max_epoch: 3}",
         "there is no option trainer.max_epoch (in {}); did you mean trainer.max_epochs?"),
        ("data: {init_args: {n_inputs: 3}}", "data.n_inputs is now data.n_subjects (in {})."),
        ("data: {class_path: PromptInputs}", "PromptInputs is now SubjectsDataModule (in {})."),
        ("data: {class_path: lincorr_lightning.data.TextPrompts}",
         "TextPrompts is now TokenizedTextDataModule (in {})."),
        ("trainer: {strategy: {class_path: lincorr_lightning.lm.InPiecesStrategy}}",
         "InPiecesStrategy is now ShardedStrategy (in {})."),
        ("trainer: {callbacks: [{class_path: lincorr_lightning.callbacks.Generalization, "
         "init_args: {relatoin: x}}]}",
         "there is no option trainer.callbacks.relatoin (in {}); did you mean "
         "trainer.callbacks.relation?"),
    ],
)  # fmt: skip
def test_in_a_config(
    text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert error_of([*PROBE, "--config", str(path)], capsys) == expected.format(path)


def problem(key: str, class_path: str, detail: str) -> str:
    """A message of jsonargparse."""
    return f"Parser key \"{key}\":\n  - Problem with given class_path '{class_path}':\n    {detail}"


def test_the_callback_and_the_study_of_one_name_are_told_apart() -> None:
    detail = "Not a valid subclass of Callback\n  Given value: TokenGeometry"
    assert explain(problem("trainer.callbacks", "TokenGeometry", detail), []) == (
        "TokenGeometry is now TokenGeometryMonitor."
    )
    assert "is now" not in explain(problem("model", "TokenGeometry", detail), [])


def test_an_old_name_is_not_sent_to_an_option_that_the_class_lacks() -> None:
    """`precision` is `require_reference` in the probe alone."""
    message = problem("data", "lincorr_lightning.data.SubjectsDataModule",
                      "Option 'precision' is not accepted")  # fmt: skip
    assert "is now" not in explain(message, [])


def test_every_new_name_exists() -> None:
    import lincorr_lightning.callbacks
    from lincorr_lightning import (
        ablation,
        data,
        finetune,
        flow,
        geometry,
        lm,
        pretraining,
        probe,
        sae,
    )
    from lincorr_lightning.option_errors import _parameters

    places = [
        lincorr_lightning.callbacks, ablation, data, finetune, flow, geometry, pretraining, probe,
        sae,
    ]  # fmt: skip
    classes = [
        value for place in places for value in vars(place).values() if isinstance(value, type)
    ]
    names = {kind.__name__ for kind in classes} | {"ShardedStrategy"} | set(vars(lm))
    assert set(RENAMED_CLASSES.values()) <= names
    options = {
        name.rpartition(".")[2]
        for kind in classes
        for name in _parameters(f"{kind.__module__}.{kind.__qualname__}")
    }
    assert set(RENAMED_OPTIONS.values()) <= options


def test_a_value_of_a_wrong_type(capsys: pytest.CaptureFixture[str]) -> None:
    error = error_of([*PROBE, "--model.ridge=abc"], capsys)
    assert error == "model.ridge is abc; it must be a number or auto."
