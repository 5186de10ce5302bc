"""The DataModule of pre-training: statements to learn, and prompts that measure recall."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from lincorr_lightning.data.loaders import ResumableLoader
from lincorr_lightning.data.tiny_world.world import WorldConfig
from lincorr_lightning.distributed import data_shard
from lincorr_lightning.errors import ConfigError, require
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.pretraining.batches import (
    PackedBatch,
    PackedStatements,
    RecallBatch,
    recall_prompts,
)
from lincorr_lightning.pretraining.corpus import Corpus, build_corpus
from lincorr_lightning.study import StudyData, as_settings


class CorpusDataModule(StudyData):
    """Text about a tiny world, to pre-train a tiny LM on.

    Training reads every stated fact once an epoch, in a different order each epoch; validation
    reads every prompt of these facts.

    Args:
        world: Size and seed of the world.
        knowledge: Kinds of knowledge or families that are stated; None takes attributes and math.
        batch_size: Statements per step.
        row_length: Tokens of a row that statements are packed into.
        full_loss_fraction: Share of the statements whose every token is learned; of the others
            only the answer is.
        repeats: Knowledge or family -> how often an epoch states each of its facts, once by
            default. What only one prompt states is learned later than what follows from a city,
            which many prompts state.
        second_home_repeats: How often an epoch states each second home. Use less than `repeats` has
            for city, so that the first home is the most likely answer.
        mixup_fraction: Share of the statements whose subject is mixed with another one; the answers
            are mixed in the same proportion. Mixing connects any two people by a path along which
            all related answers change together.
        pair: Two kinds of knowledge, as ``city->country``, that `cooccurrence` applies to.
        cooccurrence: Share of the people of whom both kinds of knowledge of `pair` are stated. Of
            each other person the text states one and never the other; half of them have the source
            stated.
        knowledge_files: YAML files with additional knowledge.
        seed: Seed of the order, of the mixing, and of the choice of people for `cooccurrence`.

    Raises:
        ConfigError: A setting is out of range.
    """

    batch_type = PackedBatch

    def __init__(
        self,
        world: WorldConfig | None = None,
        knowledge: list[str] | None = None,
        batch_size: int = 256,
        row_length: int = 64,
        full_loss_fraction: float = 0.1,
        repeats: dict[str, int] | None = None,
        second_home_repeats: int = 1,
        mixup_fraction: float = 0.5,
        pair: str | None = None,
        cooccurrence: float = 1.0,
        knowledge_files: list[str] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        shares = {
            "full_loss_fraction": full_loss_fraction,
            "mixup_fraction": mixup_fraction,
            "cooccurrence": cooccurrence,
        }
        for name, share in shares.items():
            require(f"data.{name}", share, at_least=0, at_most=1)
        require("data.batch_size", batch_size, at_least=1)
        require("data.second_home_repeats", second_home_repeats, at_least=1)
        for name, n in (repeats or {}).items():
            require(f"data.repeats.{name}", n, at_least=1)
        self.world_config = as_settings(WorldConfig, world or WorldConfig())
        self.save_hyperparameters()
        self.knowledge, self.repeats = knowledge or ["attribute", "math"], repeats or {}
        self.pair, self.cooccurrence, self.seed = pair, cooccurrence, seed
        self._packing: dict[str, Any] = {
            "batch_size": batch_size, "row_length": row_length, "seed": seed,
            "full_loss_fraction": full_loss_fraction, "mixup_fraction": mixup_fraction,
            "second_home_repeats": second_home_repeats,
        }  # fmt: skip
        self._catalogue = Catalogue.load(*(knowledge_files or ()))
        self.corpus: Corpus | None = None

    def setup(self, stage: str | None = None) -> None:
        """Generate the world and its statements, identical on all ranks.

        Raises:
            ConfigError: Settings do not fit each other.
        """
        del stage
        if self.corpus is not None:
            return
        corpus = build_corpus(
            self.world_config, self._catalogue, self.knowledge, self.pair, self.cooccurrence,
            self.seed,
        )  # fmt: skip
        longest = max(len(statement.tokens) for statement in corpus.encoded)
        require("data.row_length", self._packing["row_length"], at_least=longest)  # a statement
        self._repeats = _repeats(self.repeats, corpus.knowledge, self._catalogue)
        self.corpus = corpus

    def train_dataloader(self) -> ResumableLoader:
        """Return the packed statements of each epoch."""
        assert self.corpus is not None, "setup generates it"
        shard = data_shard(self.trainer)
        statements = PackedStatements(
            self.corpus, repeats=self._repeats, rank=shard.number, n_shards=shard.n, **self._packing
        )
        return ResumableLoader(statements, self.trainer)

    def val_dataloader(self) -> DataLoader[RecallBatch]:
        """Return the prompts, one kind of knowledge per batch."""
        assert self.corpus is not None, "setup generates it"
        return DataLoader(recall_prompts(self.corpus), batch_size=None)  # type: ignore[arg-type]


def _repeats(repeats: dict[str, int], stated: tuple[str, ...], catalogue: Catalogue) -> list[int]:
    """Return how often each stated kind of knowledge is repeated."""
    found = [1] * len(stated)
    for name, n in repeats.items():
        chosen = [k.name for k in catalogue.select([name]) if k.name in stated]
        if not chosen:
            raise ConfigError(
                f"data.repeats names {name!r}, which is not stated; add it to data.knowledge."
            )
        for knowledge in chosen:
            found[stated.index(knowledge)] = n
    return found
