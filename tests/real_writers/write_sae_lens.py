"""Write SAEs of every architecture that SAELens registers, and what it computes with each.

``python write_sae_lens.py FOLDER`` writes a folder per SAE: its files, and ``expected.npz``.
"""

import contextlib
import sys
import tempfile
import typing
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from sae_lens import (
    SAE,
    LanguageModelSAERunnerConfig,
    LanguageModelSAETrainingRunner,
    LoggingConfig,
    TrainingSAE,
)
from sae_lens.registry import SAE_CLASS_REGISTRY, SAE_TRAINING_CLASS_REGISTRY
from sae_lens.saes.sae import SAEConfig, SAEMetadata
from sae_lens.training.activation_scaler import ActivationScaler
from transformer_lens import HookedTransformer, HookedTransformerConfig

FOLDER = Path(sys.argv[1])
WIDTH, N = 16, 64
RANDOM = torch.Generator().manual_seed(0)
MIXING = torch.randn(WIDTH, WIDTH, generator=RANDOM) / 3
X = torch.randn(128, WIDTH, generator=RANDOM) @ MIXING + 0.3
TEXTS = torch.randint(64, (200, 32), generator=RANDOM)
LM = HookedTransformer(
    HookedTransformerConfig(
        n_layers=2,
        d_model=WIDTH,
        n_ctx=32,
        d_head=8,
        n_heads=2,
        d_vocab=64,
        act_fn="gelu",
        seed=0,
    )
)
NORMS = typing.get_args(typing.get_type_hints(SAEConfig)["normalize_activations"])
SETTINGS = {  # where a class has them; others keep their defaults
    "k": 5,
    "matryoshka_widths": [16, N],
    "d_out": WIDTH,
    "n_heads": 2,
    "bottleneck_factor": 4,
    "kval_topk": 5,
    "l0_warm_up_steps": 5,
    "l1_warm_up_steps": 5,
    "pre_act_loss_coefficient": 3e-6,
    "jumprelu_ste_to_input": True,
    "target_l0": 5.0,
    "use_matryoshka_aux_loss": True,
}


def config(config_class: type[SAEConfig], **changes: object) -> SAEConfig:
    fields = config_class.__dataclass_fields__
    settings = {key: value for key, value in SETTINGS.items() if key in fields} | changes
    settings.setdefault("apply_b_dec_to_input", "d_out" not in fields)  # as transcoders require
    hook = "attn.hook_z" if "reshape_activations" in changes else "hook_resid_post"
    about = SAEMetadata(model_name="gpt2", hook_name=f"blocks.1.{hook}")
    return config_class(d_in=WIDTH, d_sae=N, metadata=about, **settings)


@torch.no_grad()
def new(classes: tuple, **changes: object) -> SAE:
    """Return an SAE in which no bias is 0, and each decoder row has another norm."""
    sae = classes[0](config(classes[1], **changes))
    for name, tensor in sae.state_dict().items():
        drawn = torch.randn(tensor.shape, generator=RANDOM)
        if "threshold" in name:
            drawn = drawn.exp() / 3
        elif name == "W_dec":
            drawn *= torch.randn(N, 1, generator=RANDOM).exp() / N**0.5
        else:
            drawn /= 2 if tensor.dim() < 2 else tensor.shape[0] ** 0.5
        tensor.copy_(drawn)
    return sae


def finished(folder: Path) -> SAE:
    """Return the SAE of a folder in float32; of one in training, that which would be released."""
    with contextlib.suppress(KeyError):  # an architecture of training alone
        return SAE.load_from_disk(folder, dtype="float32")
    with tempfile.TemporaryDirectory() as temporary:
        TrainingSAE.load_from_disk(folder, dtype="float32").save_inference_model(temporary)
        return SAE.load_from_disk(temporary, dtype="float32")


@torch.no_grad()
def expect(folder: Path, scaler: ActivationScaler | None = None) -> None:
    """Write inputs, features and outputs of a folder's SAE."""
    sae = finished(folder)
    x = X if scaler is None else scaler.scale(X)
    x = x[None] if sae.cfg.architecture() == "temporal" else x  # a sequence
    output = sae(x) if scaler is None else scaler.unscale(sae(x))
    np.savez(folder / "expected.npz", x=X, features=sae.encode(x), output=output)


def write(name: str, sae: SAE, save: str = "save_model") -> None:
    getattr(sae, save)(FOLDER / name)
    expect(FOLDER / name)


def train(name: str, **changes: object) -> None:
    """Train on a tiny LM; write the checkpoints, and the SAE that is released."""
    folder = FOLDER / name
    settings = LanguageModelSAERunnerConfig(
        sae=config(SAE_TRAINING_CLASS_REGISTRY["batchtopk"][1], **changes),
        hook_name="blocks.1.hook_resid_post",
        context_size=TEXTS.shape[1],
        prepend_bos=False,
        training_tokens=64 * 40,
        train_batch_size_tokens=64,
        store_batch_size_prompts=4,
        n_batches_in_buffer=4,
        lr=1e-2,
        dead_feature_window=5,  # some are dead then, and their number is written
        n_batches_for_norm_estimate=20,
        n_checkpoints=1,
        save_final_checkpoint=True,
        checkpoint_path=str(folder),
        output_path=str(folder / "output"),
        logger=LoggingConfig(log_to_wandb=False, wandb_id="checkpoints"),
    )
    texts = Dataset.from_dict({"tokens": TEXTS.tolist()})
    LanguageModelSAETrainingRunner(settings, override_dataset=texts, override_model=LM).run()
    for file in sorted(folder.rglob("sae_weights.safetensors")):
        scaler = ActivationScaler()
        if (file.parent / "activation_scaler.json").exists():
            scaler.load(file.parent / "activation_scaler.json")
        expect(file.parent, scaler)


for architecture, classes in SAE_CLASS_REGISTRY.items():
    write(architecture, new(classes))
    write(f"{architecture}, bfloat16", new(classes, dtype="bfloat16"))
for architecture, classes in SAE_TRAINING_CLASS_REGISTRY.items():
    sae = new(classes)
    write(f"{architecture}, in training", sae)
    write(f"{architecture}, released", sae, "save_inference_model")
    sae = new(classes, apply_b_dec_to_input=False, dtype="bfloat16")
    write(f"{architecture}, in training, bfloat16, bias not subtracted", sae)
    write(f"{architecture}, released, bfloat16, bias not subtracted", sae, "save_inference_model")
    if "rescale_acts_by_decoder_norm" in classes[1].__dataclass_fields__:
        sae = new(classes, rescale_acts_by_decoder_norm=False)
        write(f"{architecture}, in training, not rescaled", sae)
        write(f"{architecture}, released, not rescaled", sae, "save_inference_model")
write("topk, rescaled", new(SAE_CLASS_REGISTRY["topk"], rescale_acts_by_decoder_norm=True))
for norm in (*NORMS, "constant_norm_rescale"):
    write(f"normalized, {norm}", new(SAE_CLASS_REGISTRY["standard"], normalize_activations=norm))
for norm in ("none", "expected_average_only_in", "covariance_whitening"):
    train(f"trained, {norm}", normalize_activations=norm)
heads = new(SAE_CLASS_REGISTRY["standard"], reshape_activations="hook_z")
heads.save_model(FOLDER / "heads")
