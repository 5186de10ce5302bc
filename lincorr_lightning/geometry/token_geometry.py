"""Token geometry: the cloud of a prompt's tokens by layer, as written and shuffled."""

from lincorr_lightning.data.texts import TokenBatch
from lincorr_lightning.distributed import gather
from lincorr_lightning.errors import ConfigError, require
from lincorr_lightning.geometry.token_clouds import (
    CloudSettings,
    PromptGeometry,
    TokenProfiles,
    observe_prompts,
)
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.results.results import Results
from lincorr_lightning.study import LMStudy, without_chat


class TokenGeometry(LMStudy):
    """Intrinsic dimension, neighborhood overlap and cosines of the tokens of a prompt, by layer.

    ``lincorr test`` reads each prompt unshuffled and with its blocks shuffled, observes the cloud
    of its tokens in each layer, and compares it with the LM's loss and entropy (Viswanathan et al.,
    2025, arXiv 2501.10573). The cloud of a layer is the hidden states of the text's tokens after
    it; of the last layer, after the final norm if the LM has one. BOS is read if the tokenizer puts
    it before a text, and left out of the cloud.

    Reads any DataLoader of `TokenBatch`; keeps the numbers of each prompt.

    Args:
        lm: The LM.
        shuffles: Levels S: a prompt is cut into ``4^S`` equal blocks, whose order is shuffled.
        range_scalings: Range scalings n2 of the intrinsic dimension; None takes 2, 4, 8, ... up to
            a quarter of the tokens, at most 256.
        ks: Sizes of the neighborhoods whose overlap is taken; None takes 1 to 31.
        seed: Seed of the shuffles.

    After a test, `profiles` is what was observed.
    """

    study = "token_geometry"
    batch_type = TokenBatch
    shards_lm = True

    def __init__(
        self,
        lm: LMConfig = LMConfig(),
        shuffles: list[int] = [0],  # noqa: B006
        range_scalings: list[int] | None = None,
        ks: list[int] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(without_chat(lm))
        if not shuffles or len(set(shuffles)) < len(shuffles) or min(shuffles) < 0:
            raise ConfigError(f"model.shuffles is {shuffles}; it must hold levels from 0, once.")
        require("model.seed", seed, at_least=0)
        self.save_hyperparameters(logger=False)
        self.shuffles = tuple(sorted(shuffles))
        self.range_scalings = range_scalings
        self.ks = ks
        self.seed = seed
        self.profiles: TokenProfiles | None = None
        self._observed: list[PromptGeometry] = []

    def on_test_start(self) -> None:
        self.profiles = None
        self._observed = []

    def test_step(self, batch: TokenBatch, batch_idx: int) -> None:
        n_tokens = batch.tokens.shape[1]
        for level in self.shuffles:
            if n_tokens % 4**level:
                raise ConfigError(
                    f"model.shuffles has level {level}, which cuts a prompt into {4**level} equal "
                    f"blocks; data.n_tokens, {n_tokens}, cannot be cut so. Leave the level "
                    f"out, or make data.n_tokens a multiple of {4**level}."
                )
        self._n_skipped = batch.n_skipped
        self._settings = CloudSettings(n_tokens, self.range_scalings, self.ks)
        for level in self.shuffles:
            observed = observe_prompts(self.lm, batch, self._settings, level, self.seed)
            if not batch.is_padding:
                self._observed += observed

    def on_test_epoch_end(self) -> None:
        observed = [prompt for part in gather(self._observed) for prompt in part]
        self._observed = []
        self.profiles = TokenProfiles.of(observed, self._settings, self._n_skipped)
        prompts = self.profiles.prompts
        loss = float(prompts["loss"][prompts["shuffle"] == self.shuffles[0]].mean())
        # The loggers get it with the other results.
        self.log("test/loss", loss, logger=False, sync_dist=True, batch_size=1)

    def build_results(self) -> Results | None:
        if self.profiles is None:
            return None
        from lincorr_lightning.geometry.results import token_geometry_results

        return token_geometry_results(self.profiles, self.lm.config.name_or_path)
