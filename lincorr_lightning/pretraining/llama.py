"""A tiny Llama: its size, its initial weights, and the folder that Hugging Face loads."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lincorr_lightning.data.tiny_world.world import WORLD_FILE
from lincorr_lightning.errors import ConfigError, require
from lincorr_lightning.io import atomic_folder
from lincorr_lightning.pretraining.corpus import Corpus

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

DTYPES = ("float32", "bfloat16", "float16")
_FILES = (
    "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", WORLD_FILE,
)  # fmt: skip


@dataclass(frozen=True)
class LlamaSize:
    """Size and initialization of a Llama.

    Attributes:
        hidden_size: Width. People's facts are stored in their embeddings: it should exceed the
            number of answers of all independent attributes together, or unrelated kinds of
            knowledge interfere and correlate.
        intermediate_size: Width of the feed-forward networks.
        n_layers: Number of layers. One is enough for facts of one step, and learns fastest.
        n_heads: Attention heads of each layer.
        init_std: Standard deviation of the initial weights.
        logit_gain: Initial gain of the last norm. At 1, the first steps only make logits large and
            move all subjects' embeddings in the same direction.
        context: Longest text in tokens.

    Raises:
        ConfigError: A size is not above 0, or the width is not divisible by the number of heads.
    """

    hidden_size: int = 256
    intermediate_size: int = 768
    n_layers: int = 1
    n_heads: int = 4
    init_std: float = 0.02
    logit_gain: float = 5.0
    context: int = 64

    def __post_init__(self) -> None:
        """Check the sizes, and that the width is divisible by the number of heads."""
        for name, value in asdict(self).items():
            # With a standard deviation of 0, all weights are equal and stay so.
            require(f"model.size.{name}", value, above=0)
        if self.hidden_size % self.n_heads:
            raise ConfigError(
                f"model.size.hidden_size is {self.hidden_size}, which model.size.n_heads "
                f"({self.n_heads}) does not divide."
            )


def build_llama(size: LlamaSize, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """Build a Llama with random weights and a tied head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    lm = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=size.hidden_size,
            intermediate_size=size.intermediate_size,
            num_hidden_layers=size.n_layers,
            num_attention_heads=size.n_heads,
            num_key_value_heads=size.n_heads,
            max_position_embeddings=size.context,
            initializer_range=size.init_std,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            # Fused attention takes twice as long at medium precision on a CPU.
            attn_implementation="eager",  # type: ignore[call-arg]
        )
    )
    with torch.no_grad():
        lm.model.norm.weight.fill_(size.logit_gain)
    return lm


def save_llama(lm: LlamaForCausalLM, corpus: Corpus, dtype: str, folder: Path) -> None:
    """Write an LM with its tokenizer and its world, whole or not at all."""
    stored = getattr(torch, dtype)
    weights = {name: value.to(stored) for name, value in lm.state_dict().items()}
    if lm.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    with atomic_folder(folder, _FILES) as new:
        lm.config.dtype = stored
        lm.save_pretrained(new, state_dict=weights)
        corpus.tokenizer.save_pretrained(new)
        corpus.world.save(new / WORLD_FILE)
