"""The artifact of fitted maps: one folder, readable without the LM."""

import hashlib
import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lincorr_lightning.errors import LinearMapError, listed
from lincorr_lightning.io import atomic_folder, atomic_write, regular_file, write_json
from lincorr_lightning.knowledge import Domain
from lincorr_lightning.knowledge.answer_tokens import TokenReader
from lincorr_lightning.linear_map import solver
from lincorr_lightning.linear_map import weights as stored
from lincorr_lightning.linear_map.layout import Pair, stem, wordings_of
from lincorr_lightning.linear_map.weights import LabelSet, LabelWeight, PairWeights
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.version import __version__

if TYPE_CHECKING:
    from pandas import DataFrame

T = TypeVar("T")

_CONFIG, _TENSORS = stored.CONFIG_FILE, stored.TENSORS_FILE
_CHECKSUM = "sha256"  # of the safetensors file


@dataclass(frozen=True)
class PairMap:
    """The map of one pair.

    Attributes:
        weight: W, ``(n_target_labels, n_source_labels)``.
        bias: b, ``(n_target_labels,)``.
        ridge: Ridge strength that it was fitted with.
        reference: Places of the right target labels of each source label, where known.
        nearest: How near the labels are in the LM's head, weights like W, where known.
    """

    weight: Tensor
    bias: Tensor
    ridge: float
    reference: Sequence[Sequence[int]] = ()
    nearest: Tensor | None = None


class LinearMap:
    """``F_target(X) = W F_source(X) + b`` for some pairs, with the labels of both sides.

    Args:
        maps: Map of each pair, as ``city->country``.
        knowledge: Labels of each kind of knowledge that some pair uses.
        lm: Name or path of the LM it was fitted on.
        fingerprint: Hashes of that LM's tokenizer, config, dtype and weights.

    Raises:
        LinearMapError: Maps and labels do not fit each other, or a number is not finite.
    """

    def __init__(
        self,
        maps: Mapping[str, PairMap],
        knowledge: Iterable[LabelSet],
        lm: str,
        fingerprint: Mapping[str, str],
    ) -> None:
        # Copied: a map that is still being fitted must not change this one.
        self._maps = {
            pair: replace(one, weight=_float64(one.weight), bias=_float64(one.bias))
            for pair, one in maps.items()
        }
        self._knowledge = {one.name: one for one in knowledge}
        self.lm = lm
        self.fingerprint = dict(fingerprint)
        self._check()

    @classmethod
    def of(
        cls,
        fitted: solver.FittedMaps,
        lm: LanguageModel,
        nearest: Mapping[Pair, Tensor | None] = MappingProxyType({}),
    ) -> "LinearMap":
        """Return fitted maps, those of the first wording of each prompt, as an artifact.

        `nearest` says how near the labels of some pairs are in the LM's head.
        """
        layout, weights, biases = fitted.layout, fitted.weights(), fitted.biases()
        maps = {}
        for pair in wordings_of(weights):
            mask = layout.reference(pair)
            reference = [right.nonzero()[0].tolist() for right in mask.T] if mask.any() else ()
            fit = weights[pair], biases[pair], float(fitted.ridges[pair])
            maps["->".join(pair)] = PairMap(*fit, reference, nearest.get(pair))
        knowledge = []
        for name, one in layout.domains.items():
            if name == stem(name):
                prompt = lm.lead_in + one.knowledge.template
                sets = one.texts, one.token_ids, one.answer_texts
                knowledge.append(LabelSet(name, prompt, *sets))
        return cls(maps, knowledge, lm.config.name_or_path, lm.fingerprint)

    def __repr__(self) -> str:
        return f"LinearMap({', '.join(self.pairs)}; fitted on {self.lm})"

    def _check(self) -> None:
        for pair, one in self._maps.items():
            source, target = map(self.label_set, pair.split("->"))
            stored.check_pair(pair, source, target, one.weight, one.nearest, one.bias)
        for name, labels in self._knowledge.items():
            if len(labels.token_ids) != len(labels.texts):
                raise LinearMapError(f"{name}/token_ids are not as many as its labels.")

    @property
    def pairs(self) -> list[str]:
        """Names of the pairs, as ``city->country``."""
        return list(self._maps)

    @property
    def knowledge(self) -> list[str]:
        """Names of the kinds of knowledge that some pair uses."""
        return list(self._knowledge)

    @property
    def ridge(self) -> dict[str, float]:
        """Ridge strength of each pair."""
        return {pair: one.ridge for pair, one in self._maps.items()}

    # Each raises LinearMapError for a name that the map does not have.

    def weight(self, pair: str) -> Tensor:
        """Return W of a pair, ``(n_target_labels, n_source_labels)``, float64."""
        return _get(self._maps, pair, "pair").weight

    def bias(self, pair: str) -> Tensor:
        """Return b of a pair, ``(n_target_labels,)``, float64."""
        return _get(self._maps, pair, "pair").bias

    def label_set(self, knowledge: str) -> LabelSet:
        """Return prompt, labels and their tokens of a kind of knowledge."""
        return _get(self._knowledge, knowledge, "knowledge")

    def labels(self, knowledge: str) -> list[str]:
        """Return the texts of the labels of a kind of knowledge."""
        return list(self.label_set(knowledge).texts)

    def token_ids(self, knowledge: str) -> list[int]:
        """Return the tokens of the labels of a kind of knowledge."""
        return list(self.label_set(knowledge).token_ids)

    def top(self, pair: str, label: str, n: int = 10) -> "DataFrame":
        """Return the n target labels with the highest weights of a source label, a row each.

        The columns are those of `weights.LabelWeight`. A label is named by its text or by an answer
        that it stands for; LinearMapError if there is none.
        """
        from pandas import DataFrame

        return DataFrame(self._weights_of(pair, label)).nsmallest(n, "rank").reset_index(drop=True)

    def rank(self, pair: str, label: str, target: str) -> int:
        """Return the rank of a target label among the weights of a source label; 1 is the best."""
        rows = self._weights_of(pair, label)
        return rows[self.label_set(pair.partition("->")[2]).place(target)].rank

    def _weights_of(self, pair: str, label: str) -> list[LabelWeight]:
        one = _get(self._maps, pair, "pair")
        source, target = map(self.label_set, pair.split("->"))
        nearest = None if one.nearest is None else one.nearest.numpy()
        return PairWeights(source, target, one.weight.numpy(), nearest, one.reference).of(label)

    def predict(self, pair: str, source_logits: Tensor) -> Tensor:
        """Predict the target logits of a pair, ``(n_subjects, n_target_labels)``, float64.

        They are on the device of the source's logits, ``(n_subjects, n_source_labels)``.
        """
        weight = self.weight(pair).to(source_logits.device)
        if source_logits.ndim != 2 or source_logits.shape[1] != weight.shape[1]:
            raise LinearMapError(
                f"{pair} takes source logits (n_subjects, {weight.shape[1]}), "
                f"not {tuple(source_logits.shape)}. "
                f"Pass the logits of token_ids({pair.partition('->')[0]!r})."
            )
        return source_logits.double() @ weight.T + self.bias(pair).to(source_logits.device)

    def check_labels(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuse a tokenizer whose tokens of the same ids are other labels.

        It may be that of another LM than the one the map was fitted on.
        """
        reader = TokenReader(tokenizer)
        for knowledge, labels in self._knowledge.items():
            wrong = []
            for text, token in zip(labels.texts, labels.token_ids, strict=True):
                is_known = token < len(tokenizer)
                there = reader.piece(token) if is_known else "no token"
                # A domain writes a token alone, or with its spelling if two read alike.
                if text != there and not (is_known and text == reader.spelling(token)):
                    wrong.append(f"{text!r} is {there!r} there")
            if wrong:
                raise LinearMapError(
                    f"this linear map was fitted on {self.lm}, and {len(wrong)} of "
                    f"{len(labels.texts)} labels of {knowledge} are other tokens of this LM "
                    f"({listed(wrong)}). Take an LM with the same tokenizer, or fit a map on this "
                    "LM with `lincorr fit`."
                )

    def check_domains(self, domains: Iterable[Domain], lm: LanguageModel) -> None:
        """Refuse to map between other prompts, or other labels, than the map was fitted with.

        The tokens of labels may differ, as between two tokenizers.
        """
        for domain in domains:
            name, prompt = domain.knowledge.name, lm.lead_in + domain.knowledge.template
            labels = self.label_set(name)
            if labels.template != prompt:
                raise LinearMapError(
                    f"the linear map was fitted with the {name} prompt {labels.template!r}, this "
                    f"run has {prompt!r}. Take the same knowledge files, prefix and chat template, "
                    "or fit a map with these."
                )
            require_same_labels(name, labels.texts, domain.texts, f"the map of {self.lm}")

    def save(self, folder: str | Path) -> None:
        """Write the artifact: ``config.json`` and ``linear_map.safetensors``.

        The folder is new, or holds a linear map, which stays until the new one is complete.
        """
        tensors, pairs = {}, {}
        for pair, one in self._maps.items():
            tensors[f"{pair}/weight"], tensors[f"{pair}/bias"] = one.weight, one.bias
            if one.nearest is not None:
                tensors[f"{pair}/nearest"] = one.nearest.float().contiguous()
            pairs[pair] = {"ridge": one.ridge, "reference": one.reference}
        for name, labels in self._knowledge.items():
            tensors[f"{name}/token_ids"] = torch.tensor(labels.token_ids, dtype=torch.int64)
        versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        config = {
            "format_version": stored.FORMAT_VERSION,
            "lm": {"name_or_path": self.lm, "fingerprint": self.fingerprint},
            "pairs": pairs,
            "knowledge": {name: labels.to_json() for name, labels in self._knowledge.items()},
            "versions": {"lincorr_lightning": __version__, **versions},
        }
        with atomic_folder(folder, {_CONFIG, _TENSORS}) as new:
            with atomic_write(new / _TENSORS) as part:
                save_file(tensors, part)
            write_json(new / _CONFIG, {**config, _CHECKSUM: _checksum(new / _TENSORS)})

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, language_model: LanguageModel | None = None
    ) -> "LinearMap":
        """Read an artifact that `save` wrote, such as ``linear_map/`` of a probe's run.

        A `LinearMapError` if a file is missing, damaged or of an unknown format, config and tensors
        disagree, or the labels are not those of the LM whose logits will be mapped.
        """
        folder = Path(folder)
        config = stored.read_config(folder)
        with stored.reading(folder):
            tensors = load_file(regular_file(folder / _TENSORS))
            maps = {
                pair: PairMap(
                    tensors[f"{pair}/weight"],
                    tensors[f"{pair}/bias"],
                    float(entry["ridge"]),
                    [list(right) for right in entry.get("reference", ())],
                    tensors.get(f"{pair}/nearest"),
                )
                for pair, entry in config["pairs"].items()
            }
            entries = config["knowledge"].items()
            knowledge = [LabelSet.from_json(name, entry) for name, entry in entries]
            lm = config["lm"]
            linear_map = cls(maps, knowledge, lm["name_or_path"], lm["fingerprint"])
            if config[_CHECKSUM] != _checksum(folder / _TENSORS):
                raise LinearMapError(f"the SHA-256 of {_TENSORS} is not that of {_CONFIG}.")
        if language_model is not None:
            linear_map.check_labels(language_model.tokenizer)
        return linear_map


def require_same_labels(name: str, labels: Sequence[str], here: Sequence[str], whose: str) -> None:
    """Refuse other labels of a kind of knowledge than a map has, or the LM that it is fitted on."""
    if list(labels) != list(here):
        only_there, only_here = (
            listed(sorted({*a} - {*b})) for a, b in ((labels, here), (here, labels))
        )
        raise LinearMapError(
            f"{name} has other labels in this LM than in {whose}, or in another order: only there "
            f"{only_there}; only here {only_here}. Maps are between the same labels: take an LM "
            f"whose tokenizer gives these and the same knowledge files, or leave {name} out."
        )


def _get(parts: Mapping[str, T], name: str, kind: str) -> T:
    if name not in parts:
        raise LinearMapError(
            f"this linear map has no {kind} {name!r}; it has {', '.join(parts)}. "
            "Fit one that has it with `lincorr fit`."
        )
    return parts[name]


def _float64(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64, copy=True).contiguous()


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
