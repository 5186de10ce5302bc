"""Write next-token logits and logit lenses of TransformerLens' bridge.

python write_transformer_lens.py FOLDER
"""

import sys
from pathlib import Path

import numpy as np
import peer_lms
import torch
from transformer_lens.model_bridge import TransformerBridge


def lens_of(bridge, cache, at: int) -> torch.Tensor:
    """The recipe of `accumulated_resid`, ``(n_layers + 1, n_vocabulary)``: from the embeddings."""
    stream = cache.accumulated_resid(apply_ln=True, pos_slice=at)
    return bridge.unembed(stream[:, 0])


def read(bridge, **options) -> dict[str, list]:
    """Logits and lens after each prompt alone."""
    found = {"logits": [], "lens": []}
    for prompt in peer_lms.PROMPTS:
        logits, cache = bridge.run_with_cache(bridge.to_tokens(prompt, **options))
        found["logits"].append(logits[0, -1])
        found["lens"].append(lens_of(bridge, cache, -1))
    return found


@torch.no_grad()
def main(folder: Path) -> None:
    cases = {}
    for name in peer_lms.LMS:
        peer_lms.save(name, folder / name)
        bridge = TransformerBridge.boot_transformers(str(folder / name), device="cpu")
        cases[f"{name}, by default"] = read(bridge)
        cases[f"{name}, without BOS"] = read(bridge, prepend_bos=False)
        for side in ("left", "right"):
            texts = list(peer_lms.PROMPTS)
            tokens = bridge.to_tokens(texts, padding_side=side)
            ends = torch.arange(len(texts)), (tokens != 0).cumsum(1).argmax(1)
            by_texts, by_tokens = bridge(texts, padding_side=side), bridge(tokens)
            cases[f"{name}, texts, {side}"] = {"logits": by_texts[ends]}
            cases[f"{name}, tokens, {side}"] = {"logits": by_tokens[ends]}
        bridge.enable_compatibility_mode()
        cases[f"{name}, folded"] = read(bridge)
    arrays = {
        f"{case}: {key}": torch.stack([*values]).numpy()
        for case, found in cases.items()
        for key, values in found.items()
    }
    np.savez(folder / "computed.npz", **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
