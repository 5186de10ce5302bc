"""Checks on a pretrained LM, named in the environment variable LINCORR_REAL_LM.

    export LINCORR_REAL_LM=$(python -m benchmarks.real_lms.fetch_lms ~/.cache/lincorr --gguf true)
    pytest -m nightly tests/real_lm

The bounds are those of SmolLM2-135M-Instruct (Q4_1, dequantized).
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lincorr_lightning import Catalogue, LanguageModel
from lincorr_lightning.callbacks import Intervention
from lincorr_lightning.cli import main as lincorr
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.knowledge import TokenizedRelation
from lincorr_lightning.linear_map import fit_linear_map
from lincorr_lightning.linear_map.layout import JointLayout, domain_rows
from lincorr_lightning.lm.vocabulary import sample_subjects

NAME = os.environ.get("LINCORR_REAL_LM", "")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not NAME, reason="LINCORR_REAL_LM names no LM (a folder or .gguf file)"),
]


def fit(folder: Path, config: str, *options: str, lm: str = NAME) -> Any:
    """Run a study on an LM and return its Trainer."""
    paths = f"--model.lm.name_or_path={lm}", f"--trainer.default_root_dir={folder}"
    quiet = "--trainer.enable_progress_bar=false"
    return lincorr(["fit", "--config", f"configs/{config}.yaml", *paths, quiet, *options]).trainer


def run(folder: Path, config: str, *options: str) -> dict[str, Any]:
    path = Path(fit(folder, config, *options).log_dir) / "results.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return LanguageModel.from_pretrained(NAME)


@pytest.fixture(scope="module")
def relation(lm: LanguageModel) -> TokenizedRelation:
    return TokenizedRelation.of("city->country", Catalogue.load(), lm.tokenizer)


def test_domain_logits_are_those_of_one_prompt_at_a_time(
    lm: LanguageModel, relation: TokenizedRelation
) -> None:
    subjects = sample_subjects(lm.tokenizer, 10)
    for domain in (relation.source, relation.target):
        prompts = [domain.knowledge.prompt(subject) for subject in subjects]
        expected = []
        for prompt in prompts:
            ids = torch.tensor(
                [[*lm.prefix, *lm.tokenizer(prompt, add_special_tokens=False).input_ids]]
            )
            with torch.no_grad():
                expected.append(lm.model(input_ids=ids).logits[0, -1, domain.token_ids].double())
        naive = torch.stack(expected)
        error = (lm.domain_logits(prompts, domain.token_ids) - naive).abs().max()
        assert error <= 1e-4 * naive.std()


def test_w_and_b_are_those_of_scikit_learn(lm: LanguageModel, relation: TokenizedRelation) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    subjects = sample_subjects(lm.tokenizer, 500)
    domains = {"city": relation.source, "country": relation.target}
    rows = domain_rows(lm, JointLayout(domains, (("city", "country"),)).reads, subjects).numpy()
    x, y = np.split(rows, [len(relation.source.token_ids)], axis=1)
    fitted = fit_linear_map(lm, relation, subjects, ridge=0.0)
    oracle = linear_model.LinearRegression().fit(x, y)
    weight = fitted.weight(relation.name).numpy()
    assert np.abs(weight - oracle.coef_).max() <= 1e-8 * np.abs(oracle.coef_).max()
    bias = fitted.bias(relation.name).numpy()
    assert np.abs(bias - oracle.intercept_).max() <= 1e-8 * np.abs(oracle.intercept_).max()


def test_auto_ridge_makes_w_readable_at_little_cost(tmp_path: Path) -> None:
    """At least three times the plain map's Hit@1, for at most .02 of its r."""
    options = "--model.knowledge=[city, country]", "--data.seed=3"
    found = {
        ridge: run(tmp_path, "linear_probe", f"--model.ridge={ridge}", *options)["pairs"][0]
        for ridge in ("0", "auto")
    }
    plain, auto = found["0"], found["auto"]
    hit = {name: pair["precision"]["influenced"]["1"] for name, pair in found.items()}
    assert hit["auto"] >= 3 * hit["0"]
    assert auto["label_mean"] >= plain["label_mean"] - 0.02


EDITS = ("--data.n_edits=24", "--model.edits_per_step=8")


@pytest.fixture(scope="module")
def lora_edits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("lora"), "source_finetune_lora", *EDITS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradient_correlation_in_half_precision(
    lora_edits: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    half = run(tmp_path, "source_finetune_lora", *EDITS, f"--model.lm.dtype={dtype}")
    for name in ("gradient_correlation", "logit_correlation"):
        assert half[name] == pytest.approx(lora_edits[name], abs=0.05)


def test_full_fine_tuning_in_half_precision_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="float32"):
        run(tmp_path, "source_finetune", *EDITS, "--model.lm.dtype=bfloat16")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_edits_generalize_as_in_the_paper(seed: int, tmp_path: Path) -> None:
    """The paper's city->country with a 3B LM: 53.7 % (table 5)."""
    seeds = f"--data.seed={seed}", f"--seed_everything={seed}"
    results = run(tmp_path, "source_finetune_lora", *seeds)
    assert results["source_learned"] >= 0.95
    assert results["generalized"] == pytest.approx(0.537, abs=0.1)
    assert results["random"] < 0.05


def test_a_swap_of_two_countries_rows_only_renames_them(
    relation: TokenizedRelation, tmp_path: Path
) -> None:
    """Whatever the LM knows: it checks the code, and is no evidence for W."""
    names, texts = ["France", "Italy"], relation.target.texts
    labels = [texts.index(name) for name in names]
    order = list(range(len(texts)))
    order[labels[0]], order[labels[1]] = labels[1], labels[0]
    swapped = LanguageModel.from_pretrained(NAME)
    parts = (swapped.model.get_input_embeddings(), swapped.model.get_output_embeddings())
    tokens = [relation.target.token_ids[label] for label in labels]
    for weight in {part.weight for part in parts}:  # tied ones once
        weight.data[tokens] = weight.data[tokens[::-1]]
    swapped.model.save_pretrained(tmp_path / "lm")
    swapped.tokenizer.save_pretrained(tmp_path / "lm")
    answers = ["Paris", "Rome", "Milan", "Berlin", "Madrid", "Cairo"]
    edits = [{"subject": f"John {x}", "answer": x} for x in answers]
    (tmp_path / "edits.json").write_text(json.dumps(edits))
    callback = "--trainer.callbacks=Intervention", "--trainer.callbacks.n_subjects=300"
    options = f"--data.edits_file={tmp_path}/edits.json", *callback
    found = []
    for name in (NAME, str(tmp_path / "lm")):
        trainer = fit(tmp_path, "causal", *options, lm=name)
        (watch,) = [one for one in trainer.callbacks if isinstance(one, Intervention)]
        found.append((watch.edits, watch.maps["auto"][0]))
    (plain, w), (other, of_swapped) = found
    change = (plain.after - plain.before)[:, labels].abs().max()
    error = (other.after[:, order] - plain.after).abs().max()
    assert (other.after - plain.after).abs().max() > 100 * error
    assert error < 0.01 * change
    assert (of_swapped[order] - w).abs().max() < 0.01 * w.abs().max()
