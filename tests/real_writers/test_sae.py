"""SAEs in the files of the libraries that train them, against what these libraries compute."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lincorr_lightning.errors import SparseAutoencoderError
from lincorr_lightning.sae import HookPoint, load_sae, load_saes
from tests.real_writers.conftest import Write

pytestmark = pytest.mark.nightly

# Of each library: all folders that it writes, and the hook point of the SAE that is read, or what
# the refusal says.
Cases = dict[str, HookPoint | str]
LAYERS = [HookPoint(layer, "residual") for layer in range(2)]


def _saelens() -> Cases:
    trained = "standard gated jumprelu topk abstopk matching_pursuit".split()
    others = "temporal transcoder skip_transcoder jumprelu_transcoder jumprelu_skip_transcoder"
    released_as_jumprelu = ["batchtopk", "matryoshka_batchtopk"]
    cases: Cases = {}
    for names, variants in (
        ([*trained, *others.split()], ["", ", bfloat16"]),
        ([*trained, *released_as_jumprelu], ["", ", bfloat16, bias not subtracted"]),
        (["topk", "abstopk", *released_as_jumprelu], [", not rescaled"]),
    ):
        stages = [""] if ", bfloat16" in variants else [", in training", ", released"]
        for name in names:
            is_read = name in trained[:4] or name in released_as_jumprelu
            # A batchtopk SAE is a jumprelu one when it is released; abstopk and others stay.
            result = LAYERS[1] if is_read else f"its architecture is '{name}'"
            cases |= {f"{name}{stage}{variant}": result for stage in stages for variant in variants}
    cases |= {"topk, rescaled": LAYERS[1], "normalized, none": LAYERS[1]}
    for norm in ("layer_norm", "covariance_whitening", "constant_norm_rescale"):
        cases[f"normalized, {norm}"] = f"its normalize_activations is '{norm}'"
    cases["normalized, expected_average_only_in"] = "does not hold the factor"
    for norm in ("none", "expected_average_only_in", "covariance_whitening"):
        for folder in ("checkpoints/1344", "checkpoints/final_2560", "output"):
            cases[f"trained, {norm}/{folder}"] = LAYERS[1]
    whitened = "its normalize_activations is 'covariance_whitening'"  # in the weights at the end
    cases["trained, covariance_whitening/checkpoints/1344"] = whitened
    return cases | {"heads": "it reads the attention's concatenated heads"}


def _dictionary_learning() -> Cases:
    trainers = (
        "BatchTopK GatedAnneal GatedSAE JumpRelu MatryoshkaBatchTopK PAnneal Standard "
        "StandardTrainerAprilUpdate TopK"
    )
    names = [name if "Trainer" in name else f"{name}Trainer" for name in trainers.split()]
    runs = {"plain": LAYERS[1], "normalized": LAYERS[1], "of inputs": "its buffer.io is 'in'"}
    return {
        f"{run}/resid_post_layer_1/{name}": result for run, result in runs.items() for name in names
    }


def _sparsify() -> Cases:
    cases: Cases = {f"{dtype}/layers.1": LAYERS[1] for dtype in ("float32", "bfloat16")}
    for i, layer in enumerate(LAYERS):
        for run in ("topk", "multi_topk", "not normalized", "best", "k decay"):
            cases[f"{run}/layers.{i}"] = layer
        cases |= {f"seeds/layers.{i}/seed{seed}": layer for seed in (1, 2)}
        cases[f"best/best/layers.{i}/layers.{i}"] = layer
        cases[f"groupmax/layers.{i}"] = "its activation is 'groupmax'"
        cases[f"skip_connection/layers.{i}"] = "its tensor W_skip is (16, 16), skip_connection"
    modules: Cases = {"mlp": HookPoint(1, "mlp_out"), "self_attn.o_proj": "none of residual"}
    for module, result in modules.items():
        cases[f"modules/layers.1.{module}"] = result
        for run in ("transcode", "transcode with skip_connection"):
            cases[f"{run}/layers.1.{module}"] = "its transcode is True"
    return cases


def _circuit_tracer() -> Cases:
    names = ["relu", "jump_relu", "topk"]
    names += [*(f"{name}, skip" for name in names), "cross-layer relu", "cross-layer jump_relu"]
    return dict.fromkeys(names, "holds an SAE in no known format, or none: inside is ")


CASES = {
    "sae_lens": _saelens(),
    "dictionary_learning": _dictionary_learning(),
    "sparsify": _sparsify(),
    "circuit_tracer": _circuit_tracer(),
}
WEIGHTS = ("sae_weights", "sae", "ae", "layer_0", "W_enc_0")  # by stem; one of them in each folder


@pytest.mark.parametrize("library", CASES)
def test_files_of(library: str, write: Write, subtests: pytest.Subtests) -> None:
    cases = CASES[library]
    root = write(library)
    folders = {path.parent for path in root.rglob("*") if path.stem in WEIGHTS}
    assert {folder.relative_to(root).as_posix() for folder in folders} == set(cases)
    for name, result in cases.items():
        with subtests.test(name):
            if isinstance(result, str):
                with pytest.raises(SparseAutoencoderError, match=re.escape(result)):
                    load_sae(root / name)
            else:
                _check(root / name, result)
    if library == "sparsify":  # a run's folder holds its settings and optimizers, too
        assert list(load_saes(root / "topk")) == LAYERS


def _check(folder: Path, hook_point: HookPoint) -> None:
    """Compare features and outputs, in float32, to rounding: those of the SAE and of its folded."""
    sae = load_sae(folder)
    assert sae.hook_point == hook_point
    with np.load(folder / "expected.npz") as file:
        expected = {name: torch.from_numpy(file[name]) for name in file.files}
    features = expected["features"]
    assert 0.02 < (features > 0).double().mean() < 0.9
    # Lengths of what is added. The decoder is checked by the outputs.
    lengths = features * sae.decoder.detach().norm(dim=1) / sae.input_scale
    folded = expected.get("folded_features", lengths)
    for read, values in ((sae, features), (sae.folded(), folded)):
        _assert_equal(read.encode(expected["x"]), values)
        _assert_equal(read(expected["x"]), expected["output"])


def _assert_equal(actual: Tensor, expected: Tensor) -> None:
    """To 2e-6 of the largest number: sums of 64 numbers in float32, in another order."""
    atol = 2e-6 * float(expected.abs().max())
    torch.testing.assert_close(actual.detach(), expected, rtol=0, atol=atol)
