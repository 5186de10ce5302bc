#!/usr/bin/env bash
# On the CPU, the gradient of a bfloat16 `nn.Embedding` stops growing with the number of times a token is in the batch:
# a token that occurs 10,000 times gets the gradient of 256 occurrences.
#
# Versions: torch 2.13.0, numpy 2.4.6.
# One would guess: 10,000 up to one rounding, as sums, matrix products and `index_add_` in bfloat16 accumulate in
# float32.
# Seen:
#     100 times in the batch: gradient 100 in bfloat16, 100 in float32; in bfloat16 index_add_ gives 100, sum 100
#     1000 times in the batch: gradient 256 in bfloat16, 1000 in float32; in bfloat16 index_add_ gives 1000, sum 1000
#     10000 times in the batch: gradient 256 in bfloat16, 10000 in float32; in bfloat16 index_add_ gives 9984,
#       sum 9984
# The backward pass adds one row after another to a bfloat16 gradient, and 256 + 1 rounds to 256.
# Who meets it: whoever trains a language model with its embeddings in bfloat16 on a CPU: punctuation and end-of-text
# tokens learn as if they were rare.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6
venv/bin/python - <<'PYTHON'
import torch

token, seen = 3, {}
for times in (100, 1000, 10_000):
    ids = torch.full((times,), token)
    ones = torch.ones(times, 4, dtype=torch.bfloat16)
    gradient = {}
    for dtype in (torch.bfloat16, torch.float32):
        embedding = torch.nn.Embedding(8, 4, dtype=dtype)
        embedding(ids).sum().backward()
        gradient[dtype] = embedding.weight.grad[token, 0].item()
    added = torch.zeros(8, 4, dtype=torch.bfloat16).index_add_(0, ids, ones)[token, 0].item()
    seen[times] = gradient[torch.bfloat16], gradient[torch.float32], added, ones.sum(0)[0].item()
    print(
        f"{times} times in the batch: gradient {seen[times][0]:.0f} in bfloat16, {seen[times][1]:.0f} in float32;"
        f" in bfloat16 index_add_ gives {seen[times][2]:.0f}, sum {seen[times][3]:.0f}"
    )
for times, (stalled, exact, added, total) in seen.items():
    assert exact == times and abs(added / times - 1) < 0.01 and abs(total / times - 1) < 0.01, (
        "the other sums are off too"
    )
    assert stalled == min(times, 256), f"the gradient is now {stalled} for {times} occurrences"
PYTHON
