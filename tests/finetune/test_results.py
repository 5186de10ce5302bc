"""What edits did, against the same worked out one by one."""

import csv
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from scipy.stats import mannwhitneyu
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from lincorr_lightning.errors import OutputError
from lincorr_lightning.finetune.results import EditReport
from lincorr_lightning.finetune.tensorboard import add_scalar_layout, log_cases
from lincorr_lightning.functional.outcomes import Outcome
from lincorr_lightning.knowledge import Completeness

COLUMNS = (
    "subject,source_answer,reference,answer_before,answer_after,outcome,source_learned,"
    "weight_reference,weight_answer,weight_max,prior_reference,prior_winner,"
    "probability_reference_before,probability_reference_after,cause,completeness"
).split(",")
CITIES = ["Paris", "Zürich", "$x_1$"]
COUNTRIES = ["France", "Switzerland", "法国", "a|b *c*"]
G, H, U = Outcome


def relation(sources: list[str], targets: list[str], name: str = "city->country") -> Any:
    # In turn whole, of a phrase, and subwords.
    kinds = [list(Completeness)[i % 3] for i in range(len(targets))]
    return SimpleNamespace(
        name=name,
        source=SimpleNamespace(texts=sources),
        target=SimpleNamespace(texts=targets, completeness=kinds),
    )


def worked_example(**changes: Any) -> EditReport:
    """Five edits whose numbers can be read off."""
    values: dict[str, Any] = {
        "asked": relation(CITIES, COUNTRIES),
        "subjects": ["Ann", "Bob", "Cy", "Di", "$Ed$"],
        "answers": ["Paris", "Zürich HB", "Paris", "$x_1$", "Paris"],
        "labels": [0, 1, 0, 2, 0],
        "right": np.array(
            [[1, 0, 1, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1], [1, 0, 1, 0]], dtype=bool
        ),
        "target_before": np.array(
            [[0, 3, 1, 2], [4, -1, 0, 0], [0, 9, -5, 2], [1, 2, 3, 0.5], [0, 0, 0, 9.0]]
        ),
        "target_after": np.array(
            [[0, 3, 7, 2], [4, 3, 5, 0], [0, 9, 2, 2], [5, 2, 3, 0.5], [0, 8, 0, 7.0]]
        ),
        "outcomes": [G, H, U, H, H],
        "learned": [True, True, False, True, True],
        #                    Paris Zürich $x_1$
        "weight": np.array([[0.1, 0.2, 0.3], [0.4, 0.3, 0.1], [0.7, 0.5, 0.0], [0.0, 0.0, 0.25]]),
    }
    return EditReport.of(**values | changes)


def test_outcomes_are_told_apart_by_completeness() -> None:
    report = worked_example()
    # France is whole, Switzerland of a phrase, 法国 a subword, the fourth whole again.
    assert [case.completeness for case in report.cases] == [
        "whole", "phrase", "whole", "whole", "whole",
    ]  # fmt: skip
    assert report.numbers["completeness"] == {
        "whole": {"n": 4, "generalized": 1 / 4, "hallucinated": 2 / 4, "unchanged": 1 / 4},
        "phrase": {"n": 1, "generalized": 0.0, "hallucinated": 1.0, "unchanged": 0.0},
    }


def random_report(n: int = 60) -> tuple[EditReport, dict[str, Any]]:
    rng = np.random.default_rng(3)
    sources, targets = [f"city{i}" for i in range(9)], [f"land{i}" for i in range(5)]
    right = rng.random((n, 5)) < 0.3
    right[:, 4] = False
    right[:, 0] |= ~right.any(1)
    before, after = rng.normal(0, 3, (2, n, 5))
    labels = rng.integers(0, 9, n).tolist()
    after[np.arange(n) % 3 == 0] = before[np.arange(n) % 3 == 0]
    outcomes = []
    for i in range(n):
        given = max(range(5), key=lambda t, i=i: after[i, t])
        was = max(range(5), key=lambda t, i=i: before[i, t])
        outcomes.append(G if right[i, given] else U if given == was else H)
    given = {
        "right": right, "target_before": before, "target_after": after, "labels": labels,
        "outcomes": outcomes, "weight": rng.normal(0, 1, (5, 9)),
    }  # fmt: skip
    report = EditReport.of(
        relation(sources, targets), [f"x{i}" for i in range(n)], None, learned=[True] * n, **given
    )
    return report, given


def test_a_case_is_what_can_be_read_off() -> None:
    ann, bob, cy, di, ed = worked_example().cases
    assert (ann.reference, ann.answer_before, ann.answer_after) == (
        "France|法国", "Switzerland", "法国",
    )  # fmt: skip
    assert (ann.weight_reference, ann.weight_answer, ann.weight_max) == (0.7, 0.7, 0.7)
    assert (ann.prior_reference, ann.prior_winner) == (1.0, 1.0)
    assert (ann.outcome, ann.cause, ann.source_learned) == ("generalized", "", True)
    assert bob.source_answer == "Zürich HB", "the whole answer, not its label"
    assert (bob.weight_reference, bob.weight_answer, bob.weight_max) == (0.3, 0.5, 0.5)
    assert (bob.prior_reference, bob.prior_winner) == (-1.0, 0.0)
    assert bob.cause == "imprecise W", "another label has more weight"
    assert (cy.outcome, cy.cause, cy.source_learned) == ("unchanged", "", False)
    assert di.cause == "imprecise W"
    assert (ed.weight_reference, ed.weight_answer, ed.prior_winner) == (0.7, 0.4, 0.0)
    assert ed.cause == "low prior", "the reference has the highest weight, and yet lost"


def test_w_does_not_answer_for_what_was_not_learned() -> None:
    report = worked_example(learned=[True, False, False, True, False])
    assert [case.cause for case in report.cases] == [
        "", "source not learned", "", "imprecise W", "source not learned",
    ]  # fmt: skip
    assert report.numbers["causes"] == {
        "imprecise W": 1, "low prior": 0, "source not learned": 2
    }  # fmt: skip
    assert report.numbers["weight_reference"]["hallucinated"]["n"] == 1
    assert report.numbers["given_learned"] == {
        "n": 2, "generalized": 0.5, "hallucinated": 0.5, "unchanged": 0.0
    }  # fmt: skip
    assert report.pictures["outcomes"].png


def test_numbers_against_one_by_one() -> None:
    report, given = random_report()
    weight, weights = given["weight"], {G: [], H: []}
    causes = {"imprecise W": 0, "low prior": 0, "source not learned": 0}
    for i, case in enumerate(report.cases):
        rights = [t for t in range(5) if given["right"][i, t]]
        column = [float(weight[t, given["labels"][i]]) for t in range(5)]
        best = max(column[t] for t in rights)
        assert case.source_answer == f"city{given['labels'][i]}", "without edits: the label"
        assert case.weight_reference == best
        assert case.weight_max == max(column)
        assert case.prior_reference == max(given["target_before"][i, t] for t in rights)
        for logits, found in (
            (given["target_before"][i], case.probability_reference_before),
            (given["target_after"][i], case.probability_reference_after),
        ):
            share = sum(math.exp(logits[t]) for t in rights) / sum(map(math.exp, logits))
            assert found == pytest.approx(share, abs=1e-12)
        if given["outcomes"][i] in weights:
            weights[given["outcomes"][i]].append(best)
        if given["outcomes"][i] is H:
            causes["imprecise W" if max(column) > best else "low prior"] += 1
    found = report.numbers["weight_reference"]
    assert min(causes["imprecise W"], causes["low prior"]) > 0
    assert report.numbers["causes"] == causes
    for outcome, values in weights.items():
        assert found[outcome.value] == {"n": len(values), "median": sorted_median(values)}
    p = mannwhitneyu(weights[G], weights[H], alternative="two-sided").pvalue
    assert found["rank_test_p"] == pytest.approx(p)
    assert report.random == pytest.approx(
        sum(sum(row) / 5 for row in given["right"].tolist()) / len(report.cases)
    )


def sorted_median(values: list[float]) -> float:
    values, middle = sorted(values), len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2


def test_numbers_are_json_without_nan_when_a_side_is_empty() -> None:
    for report in (
        worked_example(outcomes=[U] * 5),
        worked_example(outcomes=[G] * 5),
        worked_example(right=np.zeros((5, 4), dtype=bool)),
        worked_example(target_after=np.full((5, 4), np.nan)),
    ):
        json.dumps(report.numbers, allow_nan=False)
        found = report.numbers["weight_reference"]
        if 0 in (found["generalized"]["n"], found["hallucinated"]["n"]):
            assert found["rank_test_p"] is None
    nobody = worked_example(right=np.zeros((5, 4), dtype=bool))
    assert nobody.numbers["weight_reference"]["hallucinated"] == {"n": 0, "median": None}
    assert nobody.cases[0].weight_reference is None
    assert nobody.cases[0].reference == ""


def test_files(tmp_path: Path) -> None:
    report = worked_example()
    report.write(tmp_path)
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.*")) == [
        "figures/outcomes.png", "figures/reference_weights.png", "tables/cases.csv",
    ]  # fmt: skip
    with (tmp_path / "tables" / "cases.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == COLUMNS
    assert [row["subject"] for row in rows] == ["Ann", "Bob", "Cy", "Di", "$Ed$"]
    assert rows[0]["reference"] == "France|法国"
    assert rows[3]["answer_before"] == "法国"
    assert float(rows[1]["weight_answer"]) == 0.5
    assert rows[0]["cause"] == ""
    for name in ("outcomes", "reference_weights"):
        picture = Image.open(tmp_path / "figures" / f"{name}.png").convert("RGB")
        assert min(picture.size) > 200
        assert len(picture.getcolors(1 << 24)) > 20


def test_a_failing_disk_leaves_the_old_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worked_example().write(tmp_path)
    old = (tmp_path / "tables" / "cases.csv").read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OutputError, match="disk is full"):
        random_report()[0].write(tmp_path)
    assert (tmp_path / "tables" / "cases.csv").read_bytes() == old


@pytest.mark.parametrize("n", [0, 1, 700])
def test_any_number_of_cases_can_be_drawn(n: int) -> None:
    if n:
        report = random_report(n)[0]
    else:
        empty = np.zeros((0, 4))
        report = worked_example(
            subjects=[], answers=[], labels=[], right=empty.astype(bool), target_before=empty,
            target_after=empty, outcomes=[], learned=[],
        )  # fmt: skip
    assert set(report.pictures) == {"reference_weights", "outcomes"}


def test_markdown_shows_hallucinations_first_and_ticks_right_ones() -> None:
    lines = worked_example().markdown().splitlines()
    assert [re.split(r" \| ", line)[0][2:] for line in lines[2:]] == [
        "Bob", "Di", r"\$Ed\$", "Ann", "Cy",
    ]  # fmt: skip
    assert "| 法国 ✓ |" in lines[5]
    assert "✓" not in "".join(lines[2:5] + lines[6:])
    assert r"a\|b \*c\*" in lines[3], "Markdown takes labels as they are"
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1


def test_markdown_is_cut_fairly() -> None:
    report, _ = random_report(60)
    text = report.markdown(limit=9)
    assert "9 of 60 cases" in text
    lines = text.splitlines()[2:11]
    assert sum("✓" in line for line in lines) == 3
    assert sum("✗" in line for line in lines) == 3
    assert all("✗" in line for line in lines[:3])


# -- TensorBoard -------------------------------------------------------------------------------


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"images": 0, "tensors": 0})
    events.Reload()
    return events


def patterns(events: EventAccumulator) -> dict[str, dict[str, list[str]]]:
    """Charts of the layout that TensorBoard shows, the last one."""
    content = events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0]
    return {
        category.title: {chart.title: list(chart.multiline.tag) for chart in category.chart}
        for category in Layout.FromString(content).category
    }


def trainer_with(loggers: Any) -> L.Trainer:
    return L.Trainer(
        logger=loggers, accelerator="cpu", enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def test_generalized_and_hallucinated_lie_in_one_chart_of_every_log(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    loggers = [TensorBoardLogger(folder, name="", version="") for folder in folders]
    trainer = trainer_with([*loggers, CSVLogger(tmp_path / "c")])
    add_scalar_layout(trainer, "city->country", ["color", "X*2"])
    add_scalar_layout(trainer, "X+1->X*2", [])
    for logger, folder in zip(loggers, folders, strict=True):
        logger.experiment.flush()
        layout = patterns(read(folder))
        assert set(layout) == {"city->country", "X+1->X*2"}
        charts = layout["city->country"].values()
        both = {"generalization/generalized", "generalization/hallucinated"}
        assert any(set(tags) == both for tags in charts)

        def shown(relation: str, tag: str, layout: Any = layout) -> int:
            # As TensorBoard's own plugin does it.
            return sum(
                any(re.compile(pattern).match(tag) for pattern in chart)
                for chart in layout[relation].values()
            )

        for tag in (
            "generalization/unchanged", "generalization/source_learned", "probability/reference",
            "probability/old_answer", "control_unchanged/color", "control_unchanged/X*2",
            "gradient_correlation/city->country", "permuted_gradient_correlation/city->country",
            "logit_correlation/city->country",
        ):  # fmt: skip
            assert shown("city->country", tag) >= 1, tag
        assert shown("X+1->X*2", "gradient_correlation/X+1->X*2") == 1
        assert shown("city->country", "gradient_correlation/city->country_zh") == 0
        assert shown("city->country", "control_unchanged/color_zh") == 0
        # A chart of tags that nobody writes would stay empty.
        assert shown("city->country", "edit_step/generalized") == 0

    add_scalar_layout(trainer, "city->country", ["color"], "", steps_of_edits=True)
    loggers[0].experiment.flush()
    charts = patterns(read(folders[0]))["city->country"].values()
    assert ["edit_step/generalized", "edit_step/hallucinated"] in [list(tags) for tags in charts]
    every = [pattern for chart in charts for pattern in chart]
    assert all(pattern.startswith("edit_step/") for pattern in every)
    for tag in (
        "probability/old_answer",
        "control_unchanged/color",
        "logit_correlation/city->country",
    ):
        assert any(re.compile(pattern).match(f"edit_step/{tag}") for pattern in every)


def test_cases_and_pictures_are_told(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="")
    trainer = trainer_with(logger)
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
    progress.optimizer.step.total.completed = 7
    report = worked_example()
    step = trainer.global_step
    assert step == 7
    log_cases(trainer, report)
    logger.experiment.flush()
    events = read(tmp_path)
    (text,) = events.Tensors("cases/city-country/text_summary")
    assert text.step == step
    assert text.tensor_proto.string_val[0].decode() == report.markdown()
    assert set(events.Tags()["images"]) == {
        "figures/reference_weights/city-country", "figures/outcomes/city-country",
    }  # fmt: skip
    for tag in events.Tags()["images"]:
        (event,) = events.Images(tag)
        image = Image.open(io.BytesIO(event.encoded_image_string))
        assert image.size == (event.width, event.height)
        assert event.step == step


def test_only_the_first_process_and_only_tensorboard(tmp_path: Path) -> None:
    class Untouchable(TensorBoardLogger):
        @property
        def experiment(self) -> Any:
            raise AssertionError("another process wrote")

    other = SimpleNamespace(is_global_zero=False, loggers=[Untouchable(tmp_path / "log")])
    add_scalar_layout(other, "city->country", [])  # type: ignore[arg-type]
    log_cases(other, worked_example())  # type: ignore[arg-type]
    silent = trainer_with(False)
    add_scalar_layout(silent, "city->country", ["color"])
    log_cases(silent, worked_example())
    assert not list(tmp_path.rglob("*events*"))


def test_nothing_is_drawn_where_only_numbers_are_wanted() -> None:
    code = (
        "import sys, lincorr_lightning.finetune.results, "
        "lincorr_lightning.finetune.forecast_results; "
        "assert 'matplotlib.figure' not in sys.modules and 'scipy.stats' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
