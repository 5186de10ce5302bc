# ruff: noqa: E402 (a package is replaced before it is imported)
"""Train dictionaries with every trainer of dictionary_learning, and write what it computes.

``python write_dictionary_learning.py FOLDER`` writes folders as the library's training loop does,
each named by its trainer, with ``expected.npz`` beside ``ae.pt`` and ``config.json``.
"""

import importlib
import inspect
import pkgutil
import sys
from pathlib import Path
from types import SimpleNamespace

# It only reads LMs, and needs a torchvision that PyPI has for CUDA alone.
sys.modules["nnsight"] = SimpleNamespace(LanguageModel=None)

import numpy as np
import torch
from dictionary_learning import trainers
from dictionary_learning.buffer import ActivationBuffer
from dictionary_learning.dictionary import AutoEncoder, AutoEncoderNew
from dictionary_learning.trainers.standard import StandardTrainerAprilUpdate
from dictionary_learning.trainers.trainer import SAETrainer
from dictionary_learning.training import trainSAE
from dictionary_learning.utils import load_dictionary

FOLDER = Path(sys.argv[1])
WIDTH, N, STEPS = 16, 64, 40
RANDOM = torch.Generator().manual_seed(0)
MIXING = torch.randn(WIDTH, WIDTH, generator=RANDOM)
SETTINGS = {  # where a trainer has them
    "k": 5,
    "lr": 1e-2,
    "steps": STEPS,
    "warmup_steps": 5,
    "sparsity_warmup_steps": 5,
    "threshold_start_step": 10,
    "threshold_beta": 0.9,
    "anneal_start": 10,
    "n_sparsity_updates": 5,
    "p_end": 0.2,
    "group_fractions": [0.25, 0.75],
    "l1_penalty": 0.02,
    "initial_sparsity_penalty": 0.02,
    "bandwidth": 0.1,
    "target_l0": 5,
    "seed": 0,
    "device": "cpu",
    "submodule_name": "resid_post_layer_1",
}
for module in pkgutil.iter_modules(trainers.__path__):
    importlib.import_module(f"{trainers.__name__}.{module.name}")
TRAINERS = sorted(SAETrainer.__subclasses__(), key=lambda trainer: trainer.__name__)


class Batches(list):
    """Activations, with the settings that an activation buffer has."""

    def __init__(self, io: str) -> None:
        draws = (torch.randn(256, WIDTH, generator=RANDOM) for _ in range(STEPS + 1))
        super().__init__(x @ MIXING + 1 for x in draws)
        sizes = {"n_ctxs": 100, "ctx_len": 128, "refresh_batch_size": 64, "out_batch_size": 256}
        buffer = SimpleNamespace(d_submodule=WIDTH, io=io, device="cpu", **sizes)
        self.config = ActivationBuffer.config.fget(buffer)


def train(run: str, io: str = "out", new: bool = False, **options: object) -> None:
    """Train one dictionary with each trainer; `new`: on a class that only the caller names."""
    configs = []
    for trainer in TRAINERS:
        names = inspect.signature(trainer.__init__).parameters
        settings = {name: value for name, value in SETTINGS.items() if name in names}
        if new and trainer is StandardTrainerAprilUpdate:
            settings["dict_class"] = AutoEncoderNew
        sizes = {"activation_dim": WIDTH, "dict_size": N}
        configs.append({"trainer": trainer, "layer": 1, "lm_name": "gpt2", **sizes, **settings})
    folder = FOLDER / run / "resid_post_layer_1"
    trainSAE(Batches(io), configs, STEPS, save_dir=str(folder), device="cpu", **options)
    x = Batches(io)[0]
    for i, trainer in enumerate(TRAINERS):
        saved = (folder / f"trainer_{i}").rename(folder / trainer.__name__)
        expected = {"x": x}
        with torch.no_grad():
            if trainer is StandardTrainerAprilUpdate and new:
                dictionary = AutoEncoderNew.from_pretrained(saved / "ae.pt")
            else:
                dictionary, _ = load_dictionary(str(saved), "cpu")
            if trainer is StandardTrainerAprilUpdate and not new:  # loaded with decoder norms of 1
                expected["folded_features"] = dictionary.encode(x)
                dictionary = AutoEncoder.from_pretrained(saved / "ae.pt", normalize_decoder=False)
            expected |= {"features": dictionary.encode(x), "output": dictionary(x)}
        np.savez(saved / "expected.npz", **expected)


train("plain", new=True)
train("normalized", normalize_activations=True)
train("of inputs", io="in")
