"""Train sparse coders of sparsify on a tiny LM, and write what it computes with each.

``python write_sparsify.py FOLDER`` writes runs as the trainer does, with ``expected.npz`` in the
folder of each sparse coder.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from sparsify import SaeConfig, SparseCoder, TrainConfig, Trainer

FOLDER = Path(sys.argv[1])
WIDTH = 16
RANDOM = torch.Generator().manual_seed(0)
torch.manual_seed(0)
LM = transformers.LlamaModel(
    transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
)
TEXTS = [{"input_ids": torch.randint(64, (32,), generator=RANDOM)} for _ in range(160)]


@torch.no_grad()
def expect(run: Path) -> None:
    """Write inputs, features and outputs of a run's sparse coders."""
    for file in sorted(run.rglob("sae.safetensors")):
        coder = SparseCoder.load_from_disk(file.parent).float()
        x = torch.randn(128, WIDTH, generator=RANDOM) + coder.b_dec
        values, chosen, pre_activations = coder.encode(x)
        features = torch.zeros_like(pre_activations).scatter(1, chosen, values)
        output = coder.decode(values, chosen)
        if coder.W_skip is not None:
            output += x @ coder.W_skip.mT
        np.savez(file.parent / "expected.npz", x=x, features=features, output=output)


def train(run: str, layers: bool = True, more: dict | None = None, **settings: object) -> None:
    """Train on layers or modules; `more` are settings of the training."""
    modules = ["layers.1.mlp", "layers.1.self_attn.o_proj"]
    where = {"layers": [0, 1]} if layers else {"hookpoints": modules}
    cfg = TrainConfig(
        SaeConfig(expansion_factor=4, **{"k": 8} | settings),
        batch_size=4,
        lr=1e-2,
        save_dir=str(FOLDER),
        run_name=run,
        log_to_wandb=False,
        **where,
        **more or {},
    )
    Trainer(cfg, TEXTS, LM).fit()
    expect(FOLDER / run)


train("topk")
train("modules", layers=False)
train("multi_topk", multi_topk=True)
train("groupmax", activation="groupmax")
train("skip_connection", skip_connection=True)
train("transcode", layers=False, transcode=True)
train("transcode with skip_connection", layers=False, transcode=True, skip_connection=True)
train("not normalized", normalize_decoder=False, num_latents=48)
train("seeds", more={"init_seeds": [1, 2]})
train("best", more={"save_best": True, "save_every": 10, "optimizer": "adam", "auxk_alpha": 0.1})
train("k decay", more={"k_decay_steps": 1000})

for dtype in (torch.float32, torch.bfloat16):
    coder = SparseCoder(WIDTH, SaeConfig(expansion_factor=4, k=40), dtype=dtype)
    for parameter in coder.parameters():
        drawn = torch.randn(parameter.shape, generator=RANDOM)
        scales = torch.randn(len(drawn), generator=RANDOM).exp() / 4  # a norm for each latent
        parameter.data = torch.einsum("i...,i->i...", drawn, scales).to(dtype)
    run = FOLDER / str(dtype).removeprefix("torch.")
    coder.save_to_disk(run / "layers.1")
    expect(run)
