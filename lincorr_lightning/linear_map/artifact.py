"""The artifact of fitted maps: one folder, readable without the LM."""

import hashlib
import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lincorr_lightning.errors import LinearMapError, listed
from lincorr_lightning.io import atomic_folder, atomic_write, regular_file, write_json
from lincorr_lightning.knowledge import Domain
from lincorr_lightning.knowledge.answer_tokens import TokenReader
from lincorr_lightning.linear_map import solver
from lincorr_lightning.linear_map import weights as stored
from lincorr_lightning.linear_map.layout import stem, wordings_of
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.version import __version__

if TYPE_CHECKING:
    from pandas import DataFrame

T = TypeVar("T")

_CONFIG, _TENSORS, _WAY_OUT = stored.CONFIG_FILE, stored.TENSORS_FILE, stored.WAY_OUT
_CHECKSUM = "sha256"  # of the safetensors file
# What reading a file or a mapping raises that is not as `LinearMap.save` wrote it.
_READING = (LinearMapError, SafetensorError, OSError, LookupError, TypeError, ValueError)


class LinearMap:
    """``F_target(X) = W F_source(X) + b`` for some pairs, with the labels of both sides.

    Args:
        weights: W of each pair, as ``city->country``: ``(n_target_labels, n_source_labels)``.
        biases: b of each pair, ``(n_target_labels,)``.
        token_ids: Tokens of the labels of each kind of knowledge, ordered as rows and columns of W.
        labels: Texts of these labels, in the same order.
        templates: Prompt of each kind of knowledge, with ``{}`` for the subject, after its lead-in.
        ridge: Ridge strength that each pair was fitted with.
        lm: Name or path of the LM it was fitted on.
        fingerprint: Hashes of that LM's tokenizer, config, dtype and weights.
        answers: Answers that each label stands for, by kind of knowledge, where known.
        references: Places of the right target labels of each source label, by pair, where known.
    """

    def __init__(
        self,
        *,
        weights: Mapping[str, Tensor],
        biases: Mapping[str, Tensor],
        token_ids: Mapping[str, Sequence[int]],
        labels: Mapping[str, Sequence[str]],
        templates: Mapping[str, str],
        ridge: Mapping[str, float],
        lm: str,
        fingerprint: Mapping[str, str],
        answers: Mapping[str, Sequence[Sequence[str]]] = MappingProxyType({}),
        references: Mapping[str, Sequence[Sequence[int]]] = MappingProxyType({}),
    ) -> None:
        # Copied: a map that is still being trained must not change this one.
        self._weights = {pair: _float64(weight) for pair, weight in weights.items()}
        self._biases = {pair: _float64(bias) for pair, bias in biases.items()}
        self._token_ids = {name: tuple(map(int, ids)) for name, ids in token_ids.items()}
        self._labels = {name: tuple(texts) for name, texts in labels.items()}
        self.templates = dict(templates)
        self.ridge = {pair: float(strength) for pair, strength in ridge.items()}
        self.lm = lm
        self.fingerprint = dict(fingerprint)
        self._answers, self._references = dict(answers), dict(references)
        self._check()

    @classmethod
    def of(cls, fitted: solver.FittedMaps, lm: LanguageModel) -> "LinearMap":
        """Return fitted maps, those of the first wording of each prompt, as an artifact."""
        layout, weights = fitted.layout, fitted.weights()
        biases = {
            (source, target): bias
            for source, solution in fitted.maps["y"].items()
            for target, bias in solver.split_targets(layout, source, solution.bias)
        }
        pairs = {pair: "->".join(pair) for pair in wordings_of(weights)}
        domains = {name: domain for name, domain in layout.domains.items() if name == stem(name)}
        return cls(
            weights={name: weights[pair] for pair, name in pairs.items()},
            biases={name: biases[pair] for pair, name in pairs.items()},
            token_ids={name: domain.token_ids for name, domain in domains.items()},
            labels={name: domain.texts for name, domain in domains.items()},
            templates={n: lm.lead_in + domain.knowledge.template for n, domain in domains.items()},
            ridge={name: fitted.ridges[pair] for pair, name in pairs.items()},
            lm=lm.config.name_or_path,
            fingerprint=lm.fingerprint,
            answers={name: domain.answer_texts for name, domain in domains.items()},
            references={
                name: [column.nonzero()[0].tolist() for column in mask.T]
                for pair, name in pairs.items()
                if (mask := layout.references.get(pair)) is not None
            },
        )

    def __repr__(self) -> str:
        return f"LinearMap({', '.join(self.pairs)}; fitted on {self.lm})"

    def _check(self) -> None:
        shapes: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
        for pair, weight in self._weights.items():
            source, _, target = pair.partition("->")
            n_source, n_target = len(self._labels[source]), len(self._labels[target])
            shapes[f"{pair}/weight"] = weight, (n_target, n_source)
            shapes[f"{pair}/bias"] = self._biases[pair], (n_target,)
        for name, texts in self._labels.items():
            shapes[f"{name}/token_ids"] = torch.tensor(self._token_ids[name]), (len(texts),)
        for key, (tensor, shape) in shapes.items():
            if tuple(tensor.shape) != shape:
                raise LinearMapError(
                    f"{key} has the shape {tuple(tensor.shape)}; the labels need {shape}."
                )
            if not tensor.isfinite().all():
                raise LinearMapError(f"{key} holds NaN or infinite numbers.")

    @property
    def pairs(self) -> list[str]:
        """Names of the pairs, as ``city->country``."""
        return list(self._weights)

    @property
    def knowledge(self) -> list[str]:
        """Names of the kinds of knowledge that some pair uses."""
        return list(self._labels)

    # Each raises LinearMapError for a name that the map does not have.

    def weight(self, pair: str) -> Tensor:
        """Return W of a pair, ``(n_target_labels, n_source_labels)``, float64."""
        return _get(self._weights, pair, "pair")

    def bias(self, pair: str) -> Tensor:
        """Return b of a pair, ``(n_target_labels,)``, float64."""
        return _get(self._biases, pair, "pair")

    def labels(self, knowledge: str) -> list[str]:
        """Return the texts of the labels of a kind of knowledge."""
        return list(_get(self._labels, knowledge, "knowledge"))

    def token_ids(self, knowledge: str) -> list[int]:
        """Return the tokens of the labels of a kind of knowledge."""
        return list(_get(self._token_ids, knowledge, "knowledge"))

    def top(self, pair: str, label: str, n: int = 10) -> "DataFrame":
        """Return the n target labels with the highest weights of a source label, a row each.

        The columns are those of `weights.LabelWeight`. A label is named by its text or by an answer
        that it stands for; LinearMapError if there is none.
        """
        from pandas import DataFrame

        return DataFrame(self._weights_of(pair, label)).nsmallest(n, "rank").reset_index(drop=True)

    def rank(self, pair: str, label: str, target: str) -> int:
        """Return the rank of a target label among the weights of a source label; 1 is the best."""
        return self._weights_of(pair, label)[self._side(pair.partition("->")[2]).place(target)].rank

    def _side(self, name: str) -> stored.Labels:
        return stored.Labels(name, self.labels(name), self._answers.get(name, ()))

    def _weights_of(self, pair: str, label: str) -> list[stored.LabelWeight]:
        weight, (source, target) = self.weight(pair).numpy(), map(self._side, pair.split("->"))
        return stored.weights_of(weight, source, target, label, self._references.get(pair, ()))

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
        for knowledge, texts in self._labels.items():
            wrong = []
            for text, token in zip(texts, self._token_ids[knowledge], strict=True):
                is_known = token < len(tokenizer)
                there = reader.piece(token) if is_known else "no token"
                # A domain writes a token alone, or with its spelling if two read alike.
                if text != there and not (is_known and text == reader.spelling(token)):
                    wrong.append(f"{text!r} is {there!r} there")
            if wrong:
                name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
                raise LinearMapError(
                    f"this linear map was fitted on {self.lm} and does not fit the tokenizer "
                    f"{name}: {len(wrong)} of {len(texts)} labels of {knowledge} are other tokens "
                    f"({listed(wrong)}). Take an LM with the same tokenizer, "
                    "or fit a map on this LM with `lincorr fit`."
                )

    def check_domains(
        self, domains: Iterable[Domain], lm: LanguageModel, same_tokens: bool = True
    ) -> None:
        """Refuse to map between other prompts, or other labels, than the map was fitted with.

        Without `same_tokens` the labels are left to the caller, as between two tokenizers.
        """
        for domain in domains:
            name, prompt = domain.knowledge.name, lm.lead_in + domain.knowledge.template
            fitted = _get(self.templates, name, "knowledge")
            if fitted != prompt:
                raise LinearMapError(
                    f"the linear map was fitted with the {name} prompt {fitted!r}, this run has "
                    f"{prompt!r}. Take the same knowledge files, prefix and chat template, or fit "
                    "a map with these."
                )
            if same_tokens and self.token_ids(name) != list(domain.token_ids):
                raise LinearMapError(
                    f"the linear map has other labels of {name} than this run: "
                    f"{len(self.token_ids(name))} against {len(domain.token_ids)}. Fit it with the "
                    "same knowledge files, or leave linear_map null."
                )

    def save(self, folder: str | Path) -> None:
        """Write the artifact: ``config.json`` and ``linear_map.safetensors``.

        The folder is new, or holds a linear map, which stays until the new one is complete.
        """
        tensors = {f"{pair}/weight": weight for pair, weight in self._weights.items()}
        tensors |= {f"{pair}/bias": bias for pair, bias in self._biases.items()}
        for name, ids in self._token_ids.items():
            tensors[f"{name}/token_ids"] = torch.tensor(ids, dtype=torch.int64)
        versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        config = {
            "format_version": stored.FORMAT_VERSION,
            "lm": {"name_or_path": self.lm, "fingerprint": self.fingerprint},
            "pairs": {
                pair: {"ridge": self.ridge[pair], "reference": self._references.get(pair, ())}
                for pair in self.pairs
            },
            "knowledge": {
                name: {
                    "template": self.templates[name],
                    "labels": texts,
                    "token_ids": self._token_ids[name],
                    "answers": self._answers.get(name, ()),
                }
                for name, texts in self._labels.items()
            },
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
        try:
            tensors = load_file(regular_file(folder / _TENSORS))
            kinds, pairs = config["knowledge"], config["pairs"]
            for entry in kinds.values():
                "".join([*entry["labels"], entry["template"]])  # a TypeError if one is no text
            linear_map = cls(
                weights={pair: tensors[f"{pair}/weight"] for pair in pairs},
                biases={pair: tensors[f"{pair}/bias"] for pair in pairs},
                token_ids={name: tensors[f"{name}/token_ids"].tolist() for name in kinds},
                labels={name: entry["labels"] for name, entry in kinds.items()},
                templates={name: entry["template"] for name, entry in kinds.items()},
                ridge={pair: entry["ridge"] for pair, entry in pairs.items()},
                lm=config["lm"]["name_or_path"],
                fingerprint=config["lm"]["fingerprint"],
                answers={name: entry.get("answers", ()) for name, entry in kinds.items()},
                references={pair: entry.get("reference", ()) for pair, entry in pairs.items()},
            )
            if config[_CHECKSUM] != _checksum(folder / _TENSORS):
                raise LinearMapError(f"the SHA-256 of {_TENSORS} is not that of {_CONFIG}.")
        except _READING as error:
            reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
            raise LinearMapError(
                f"cannot read {folder}: {_TENSORS} or {_CONFIG} is damaged or missing ({reason}). "
                f"{_WAY_OUT}"
            ) from error
        if language_model is not None:
            linear_map.check_labels(language_model.tokenizer)
        return linear_map


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
