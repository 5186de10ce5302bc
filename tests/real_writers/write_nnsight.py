"""Write next-token logits and logit lenses that nnsight reads.

python write_nnsight.py FOLDER
"""

import sys
from pathlib import Path

import numpy as np
import peer_lms
import torch
from nnsight import TransformersModel

# Blocks and final norm by type.
PARTS = {"gpt2": ("transformer.h", "transformer.ln_f")}


def part_of(lm, path: str):
    for name in path.split("."):
        lm = getattr(lm, name)
    return lm


def read(lm, name: str, prompts) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and lens at the last position of a batch, which is padded on the left."""
    layers, norm = (part_of(lm, p) for p in PARTS.get(name, ("model.layers", "model.norm")))
    lens = []
    with lm.trace(prompts):
        for layer in layers:
            states = layer.output
            states = states[0] if isinstance(states, tuple) else states
            lens.append(lm.lm_head(norm(states))[:, -1].save())
        logits = lm.output.logits[:, -1].save()
    return logits, torch.stack(lens, 1)


@torch.no_grad()
def main(folder: Path) -> None:
    arrays = {}
    for name in peer_lms.LMS:
        peer_lms.save(name, folder / name)
        lm = TransformersModel(str(folder / name), task="text-generation", dispatch=True)
        alone = [read(lm, name, prompt) for prompt in peer_lms.PROMPTS]
        read_as = {"alone": [torch.cat(parts) for parts in zip(*alone, strict=True)]}
        read_as["batch"] = read(lm, name, list(peer_lms.PROMPTS))
        for how, (logits, lens) in read_as.items():
            arrays |= {f"{name}, {how}: logits": logits, f"{name}, {how}: lens": lens}
    np.savez(folder / "computed.npz", **{key: x.numpy() for key, x in arrays.items()})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
