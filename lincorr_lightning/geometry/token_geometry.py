"""How the cloud of a prompt's tokens changes from layer to layer, and with shuffling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lincorr_lightning.data.tokenized_texts import TokenBatch, TokenizedTextDataModule
from lincorr_lightning.distributed import gather
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.frozen_lm import FrozenLMModule
from lincorr_lightning.geometry.distances import nearest_tokens
from lincorr_lightning.geometry.intrinsic_dimension import intrinsic_dimension
from lincorr_lightning.geometry.observables import shuffle_blocks
from lincorr_lightning.geometry.results import Floats, GeometryReport
from lincorr_lightning.geometry.token_clouds import CloudSettings, PromptGeometry, observe_prompts
from lincorr_lightning.lm.config import LMConfig

# Corpora that a correlation over them needs.
_LEAST_CORPORA = 4


class _Observed(NamedTuple):
    """One prompt at one shuffling level."""

    prompt: int
    level: int
    found: PromptGeometry
    last: Tensor | None


class TokenGeometry(FrozenLMModule):
    """Intrinsic dimension, neighborhood overlap and cosines of the tokens of a prompt, by layer.

    ``lincorr test`` reads each prompt as it is written and with its blocks shuffled, observes the
    cloud of its tokens after each layer, and sets it beside the LM's loss and entropy (Viswanathan
    et al., 2025, arXiv 2501.10573). A layer's cloud are the hidden states of the text's tokens
    after it, those of the last layer after the final norm where the LM has one; BOS, if the
    tokenizer puts it in front of a text, is read and left out. Memory does not grow with the number
    of prompts, but for a few numbers of each, and for its last token's states where the texts come
    from four corpora or more.

    The table of Spearman's rho has two kinds of clouds (paper, table 1). *Tokens*: a cloud is the
    tokens of a prompt, and rho is taken over prompts, of a cloud's ID and the prompt's mean loss.
    *Prompts*: a cloud is the prompts of a corpus, each by its last token, and rho is taken over
    corpora, of a cloud's ID and the corpus' mean loss.

    Args:
        lm: The LM that is asked.
        shuffles: Levels S: the prompt is cut into ``4^S`` equal blocks, which change places; 0
            leaves it as it is.
        range_scalings: The n2's of the intrinsic dimension; null takes 2, 4, 8, ... up to a quarter
            of the tokens, 256 at most.
        ks: Sizes of the neighborhoods whose overlap is taken; null takes 1 to 31.
        embedding_layer: Whether the token embedding is looked at too, as layer 0; the paper leaves
            it out.
        seed: Of the shuffles.

    Raises:
        ConfigError: Shuffling levels that cannot be.
        LanguageModelError: The LM cannot be read.
    """

    def __init__(
        self,
        lm: LMConfig = LMConfig(),  # noqa: B008 (frozen)
        shuffles: list[int] = [0],  # noqa: B006 (never changed)
        range_scalings: list[int] | None = None,
        ks: list[int] | None = None,
        embedding_layer: bool = False,
        seed: int = 0,
    ) -> None:
        lm = LMConfig(**lm) if isinstance(lm, Mapping) else lm
        if not shuffles or len(set(shuffles)) < len(shuffles) or min(shuffles) < 0:
            raise ConfigError(
                f"model.shuffles is {list(shuffles)}; it must hold levels from 0 on, each once."
            )
        if seed < 0:
            raise ConfigError(f"model.seed is {seed}; it must not be negative.")
        super().__init__(lm)
        self.save_hyperparameters(
            {
                "lm": asdict(lm), "shuffles": list(shuffles), "range_scalings": range_scalings,
                "ks": ks, "embedding_layer": embedding_layer, "seed": seed,
            },
            logger=False,
        )  # fmt: skip
        self.shuffles = tuple(sorted(shuffles))
        self.report: GeometryReport | None = None
        self._observed: list[_Observed] = []

    def setup(self, stage: str) -> None:
        """Refuse settings that do not fit the prompts.

        Raises:
            ConfigError: The prompts come from elsewhere than `TokenizedTextDataModule`, cannot be cut into so
                many blocks, or are too short for a range scaling or k.
        """
        super().setup(stage)
        n_tokens = self._data.hparams["n_tokens"]
        for level in self.shuffles:
            if n_tokens % 4**level:
                raise ConfigError(
                    f"model.shuffles has level {level}, which cuts a prompt into {4**level} equal "
                    f"blocks; data.n_tokens, {n_tokens}, cannot be cut so. Leave the level out, or "
                    f"make data.n_tokens a multiple of {4**level}."
                )
        self.settings = CloudSettings.of(
            n_tokens, self.hparams["range_scalings"], self.hparams["ks"],
            self.hparams["embedding_layer"], "model",
        )  # fmt: skip

    @property
    def _data(self) -> TokenizedTextDataModule:
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, TokenizedTextDataModule):
            raise ConfigError(
                f"TokenGeometry reads TokenizedTextDataModule; data is {type(data).__name__}. "
                "Pass --data TokenizedTextDataModule."
            )
        return data

    # -- reading -----------------------------------------------------------------------------

    def on_test_start(self) -> None:
        """Begin anew."""
        self._observed = []
        self._by_corpus = len({text.corpus for text in self._data.prompts}) >= _LEAST_CORPORA

    @torch.no_grad()
    def test_step(self, batch: TokenBatch, batch_idx: int) -> None:
        """Observe some prompts at all shuffling levels.

        Raises:
            NonFiniteError: A layer has NaN or infinite hidden states.
            SubjectsError: A layer has too few distinct tokens.
        """
        del batch_idx
        numbers = range(batch.first, batch.first + len(batch.tokens))
        for level in self.shuffles:
            tokens = torch.stack(
                [self.shuffled(row, level, n) for row, n in zip(batch.tokens, numbers, strict=True)]
            )
            names = [f"{n} ({self._data.prompts[n].where})" for n in numbers]
            names = [f"{name}, shuffled at level {level}" if level else name for name in names]
            found = observe_prompts(self.lm, tokens, names, self.settings)
            if not batch.is_padding:
                self._observed += [
                    _Observed(n, level, one, one.last if self._by_corpus and not level else None)
                    for n, one in zip(numbers, found, strict=True)
                ]

    def shuffled(self, tokens: Tensor, level: int, number: int) -> Tensor:
        """A prompt with its blocks in another order, the same on every process.

        Args:
            tokens: ``(n_tokens,)``.
            level: S.
            number: Of the prompt.
        """
        order = shuffle_blocks(len(tokens), level, [self.hparams["seed"], number, level])
        return tokens[order.to(tokens.device)]

    # -- the end -----------------------------------------------------------------------------

    def on_test_epoch_end(self) -> None:
        """Bring together what all processes observed."""
        observed = [one for part in gather(self._observed) for one in part]
        observed.sort(key=lambda one: one[:2])
        numbers = sorted({one.prompt for one in observed})
        clouds = [one.found.clouds for one in observed]
        shape = (len(numbers), len(self.shuffles))

        def stacked(parts: list[Tensor]) -> Floats:
            stack: Floats = torch.stack(parts).double().numpy()
            return stack.reshape(*shape, *stack.shape[1:])

        texts = [self._data.prompts[n] for n in numbers]
        loss = np.array([one.found.loss for one in observed]).reshape(shape)
        names = ("cosine_mean", "cosine_std", "angle_mean", "angle_std")
        corpora = [text.corpus for text in texts]
        corpus_dimension, corpus_loss = self._corpora(observed, corpora, loss)
        self.report = GeometryReport(
            lm=self.lm.config.name_or_path,
            n_tokens=self._data.hparams["n_tokens"],
            n_skipped=self._data.n_skipped,
            prompts=[text.where for text in texts],
            corpora=corpora,
            shuffles=self.shuffles,
            layers=self.settings.layers(clouds[0].cosine_mean.shape[0]),
            range_scalings=self.settings.range_scalings,
            ks=self.settings.ks,
            dimension=stacked([part.dimension for part in clouds]),
            overlap=stacked([part.overlap for part in clouds]),
            profiles={name: stacked([getattr(part, name) for part in clouds]) for name in names},
            logits_dimension=stacked([one.found.logits_dimension for one in observed]),
            loss=loss,
            entropy=np.array([one.found.entropy for one in observed]).reshape(shape),
            corpus_dimension=corpus_dimension,
            corpus_loss=corpus_loss,
        )
        self.log("loss", float(loss[:, 0].mean()), rank_zero_only=True, batch_size=1)

    def _corpora(
        self, observed: list[_Observed], corpora: list[str], loss: Floats
    ) -> tuple[Floats, Floats]:
        """ID of each corpus' prompts, and its loss; none where there are too few corpora."""
        last = [one.last for one in observed if one.last is not None]
        n_layers = observed[0].found.clouds.cosine_mean.shape[0]
        names = sorted(set(corpora)) if len(last) == len(corpora) else []
        scalings = self.settings.range_scalings
        dimension = np.full((len(names), n_layers, len(scalings)), np.nan)
        for i, name in enumerate(names):
            cloud = torch.stack([s for s, c in zip(last, corpora, strict=True) if c == name], 1)
            possible = [n for n in scalings if n < cloud.shape[1]]
            if not possible:
                continue
            nearest = nearest_tokens(cloud.to(self.device), max(possible), k=1)
            enough = int(nearest.distinct.sum(-1).min())
            possible = [n for n in possible if n < enough]
            if possible:
                found = intrinsic_dimension(nearest, possible).dimension
                dimension[i, :, : len(possible)] = found.cpu().numpy()
        first = [loss[[c == name for c in corpora], 0].mean() for name in names]
        return dimension, np.array(first)

    def on_test_end(self) -> None:
        """Write the numbers, tables and figures."""
        self.write_study(self.report)
