"""Domain logits of many subjects, read from an LM once and kept in files for several analyses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from lincorr_lightning import Catalogue, LanguageModel
from lincorr_lightning.io import atomic_write
from lincorr_lightning.knowledge import Domain, build_domain
from lincorr_lightning.lm.vocabulary import sample_subjects

_PART = 500


@dataclass(frozen=True)
class DomainLogits:
    """Logits of some subjects.

    Attributes:
        tokenizer: The LM's tokenizer.
        lm: Fingerprint of the LM that they were read from.
        domains: Domains by name.
        logits: Logits after each prompt at its own domain's tokens, ``(n_subjects, n_labels)``.
    """

    tokenizer: PreTrainedTokenizerBase
    lm: Mapping[str, str]
    domains: Mapping[str, Domain]
    logits: Mapping[str, Tensor]


def read_domain_logits(
    lm: str, names: Sequence[str], n_subjects: int, folder: Path, seed: int = 0
) -> DomainLogits:
    """Read domain logits, or what is missing of them in the folder's files.

    Args:
        lm: A folder, a .gguf file, a hub id or tiny-world; read in float32.
        names: Kinds of knowledge; those with fewer than three labels are left out.
        n_subjects: Number of subjects.
        folder: Folder of the files, one for each 500 subjects.
        seed: Seed of the sample of subjects.
    """
    model = LanguageModel.from_pretrained(lm, dtype="float32")
    catalogue = Catalogue.load()
    built = {name: build_domain(catalogue[name], model.tokenizer) for name in names}
    domains = {name: domain for name, domain in built.items() if len(domain.token_ids) >= 3}
    subjects = sample_subjects(model.tokenizer, n_subjects, seed=seed)
    tokens = [domain.token_ids for domain in domains.values()]
    key = {
        "fingerprint": model.fingerprint, "seed": seed, "n_subjects": n_subjects, "tokens": tokens,
        "templates": [domain.knowledge.template for domain in domains.values()],
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    made_for = folder / "made_for.json"
    if made_for.exists() and json.loads(made_for.read_text(encoding="utf-8")) != key:
        raise SystemExit(f"{folder} holds logits of another LM or of other prompts: delete it.")
    with atomic_write(made_for) as path:
        path.write_text(json.dumps(key), encoding="utf-8")
    parts = []
    for start in tqdm(range(0, n_subjects, _PART), desc=f"reading {Path(lm).name}"):
        file = folder / f"{start:05d}.safetensors"
        if not file.exists():
            chosen = subjects[start : start + _PART]
            prompts = [[t.replace("{}", s, 1) for s in chosen] for t in key["templates"]]
            rows = torch.cat(
                [
                    model.joint_logits([p[i : i + 64] for p in prompts], tokens).float()
                    for i in range(0, len(chosen), 64)
                ]
            )
            with atomic_write(file) as path:
                save_file({"rows": rows}, path)
        parts.append(load_file(file)["rows"])
    split = torch.cat(parts).split([len(ids) for ids in tokens], dim=1)
    return DomainLogits(
        tokenizer=model.tokenizer,
        lm=model.fingerprint,
        domains=domains,
        logits=dict(zip(domains, split, strict=True)),
    )
