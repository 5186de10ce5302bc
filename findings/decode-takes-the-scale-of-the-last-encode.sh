#!/usr/bin/env bash
# `decode` of a sae-lens SAE with `normalize_activations="layer_norm"` scales by the mean and deviation of whatever was
# encoded last, so that features of one prompt, decoded after another prompt was encoded, come out with that one's
# scale.
#
# Versions: torch 2.13.0, sae-lens 6.54.12.
# One would guess: `decode` is a function of the features and the weights.
# Seen:
#     normalize_activations='none': late reconstruction / direct one, norms: 1.0
#     normalize_activations='layer_norm': late reconstruction / direct one, norms: 7.7
#     normalize_activations='constant_norm_rescale': late reconstruction / direct one, norms: 7.2
# `encode` leaves the statistics on the SAE, `decode` uses and deletes them ("constant_norm_rescale" too). Without
# normalization the order does not matter.
# Who meets it: whoever encodes two prompts, patches or ablates features of the first, and decodes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 sae-lens==6.54.12
HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
import torch
from sae_lens.saes.standard_sae import StandardSAE, StandardSAEConfig

gaps = {}
for normalize in ("none", "layer_norm", "constant_norm_rescale"):
    torch.manual_seed(0)
    sae = StandardSAE(StandardSAEConfig(d_in=16, d_sae=64, normalize_activations=normalize))
    first, second = torch.randn(1, 5, 16), 10 * torch.randn(1, 5, 16)
    with torch.no_grad():
        right = sae.decode(sae.encode(first))
        features = sae.encode(first)
        sae.encode(second)
        late = sae.decode(features)
    gaps[normalize] = (late.norm() / right.norm()).item()
    print(
        f"normalize_activations={normalize!r}: late reconstruction / direct one, norms: {gaps[normalize]:.1f}"
    )
assert abs(gaps["none"] - 1) < 1e-6, "decoding depends on the last encoding without normalization too"
assert gaps["layer_norm"] > 2 and gaps["constant_norm_rescale"] > 2, "decode is a function of the features now"
PYTHON
