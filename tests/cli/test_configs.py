"""Every shipped YAML parses; nightly, it runs as shipped. tests/readme runs small forms."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lincorr_lightning.cli import main
from lincorr_lightning.results.saved_run import config_verb
from tests.toys import assert_is_last

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
QUIET = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
# The numbers of this one are compared with the documents, and tests/reproduce runs the last one.
IN_DOCUMENTS = {"source_finetune.yaml"}
STUDIES = {path.name for path in CONFIGS.glob("*.yaml")} - IN_DOCUMENTS - {"reproduce.yaml"}
DOCUMENTS = [CONFIGS.parent / "README.md", *sorted((CONFIGS.parent / "docs").glob("*.md"))]
TEXT = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)


def test_a_config_from_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """Such as ``--config <(command)``; it can be read only once."""
    end, start = os.pipe()
    os.write(start, (CONFIGS / "linear_probe.yaml").read_bytes())
    os.close(start)
    with pytest.raises(SystemExit):
        main(["validate", f"--config=/dev/fd/{end}", "--print_config"])
    os.close(end)
    assert "LinearProbe" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(STUDIES))
def test_study_runs_as_shipped(name: str, tmp_path: Path) -> None:
    assert results_of(name, tmp_path)["settings"]


def results_of(name: str, folder: Path) -> dict[str, Any]:
    verb = config_verb((CONFIGS / name).read_text(encoding="utf-8"))
    cli = main(
        [verb, "--config", str(CONFIGS / name), f"--trainer.default_root_dir={folder}", *QUIET]
    )
    path = Path(cli.trainer.log_dir) / "results.json"
    assert_is_last(path)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def row_of(table: str) -> list[list[float]]:
    """Numbers in each cell of the documents' row on city→country."""
    rows = TEXT.split(f"<!-- {table}: begin -->")[1].split("<!-- ")[0].splitlines()
    (row,) = [row for row in rows if row.startswith("| city→country |")]
    return [[float(n) for n in re.findall(r"-?[\d.]+", cell)] for cell in row.split("|")[2:-1]]


@pytest.mark.nightly
def test_edits_match_the_readme(tmp_path: Path) -> None:
    """But for some of the 150 edits: other processors round otherwise."""
    found = results_of("source_finetune.yaml", tmp_path)
    color = found["controls"]["color"]
    shares = [
        found[name]
        for name in ("source_learned", "generalized", "random", "hallucinated", "unchanged")
    ] + [color["unchanged"]]
    shown = row_of("table5")
    for share, (percent,) in zip(shares, shown, strict=False):
        assert 100 * share == pytest.approx(percent, abs=6)
    assert found["gradient_correlation"] == pytest.approx(shown[6][0], abs=0.05)
    # Enough of either outcome to be studied.
    assert 0.4 <= found["generalized"] <= 0.7


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*/*.yaml")), ids=lambda p: p.stem)
def test_overlay_parses_over_a_study(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", "linear_probe.yaml", "--config", str(path), "--print_config"])
    assert stop.value.code in (0, None)
    merged = yaml.safe_load(capsys.readouterr().out)

    def assert_holds(found: Any, expected: Any) -> None:
        if isinstance(expected, dict):
            for key, value in expected.items():
                assert_holds(found[key], value)
        else:
            assert found == expected

    assert_holds(merged, yaml.safe_load(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda p: p.name)
def test_every_key_has_a_comment(path: Path) -> None:
    """A key that sets a value has a comment above it, or above the block it stands in."""
    above, n_open = "", 0
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        is_key = text and not text.startswith(("#", "-")) and ": " in text and not n_open
        if is_key and "class_path" not in text:
            assert above.startswith("#"), f"{path.name}: {text}"
        if not text.startswith("#"):  # a mapping in braces, over several lines
            n_open += text.count("{") - text.count("}")
        above = text
