"""Which LM is asked, and how it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lincorr_lightning.errors import LanguageModelError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

TINY_WORLD = "tiny-world"
"""Name of the LM that comes with the package."""


@dataclass(frozen=True)
class LMConfig:
    """Which LM is asked, and how it is read.

    The default precision is float32, whatever the checkpoint is stored in: bfloat16 has steps of
    0.125 at logits of 16 to 32, and its scores change with the batch size. On the tiny world it
    moves r by 2e-4 and W by one part in a hundred; ``benchmarks/half_precision.py`` tells it of
    any LM.

    Raises:
        LanguageModelError: A setting has no meaning.
    """

    name_or_path: str = TINY_WORLD
    """A checkpoint's folder, a hub id such as openai-community/gpt2, or tiny-world (packaged)."""

    revision: str | None = None
    """Branch, tag or commit of a hub id; null takes its main branch."""

    dtype: Dtype = "float32"
    """Precision of weights and forward; auto takes the checkpoint's. Head rows are in float64."""

    attn_implementation: str | None = None
    """Attention kernel, such as eager, sdpa or flash_attention_2; null lets transformers choose."""

    add_bos: bool | None = None
    """Whether prompts begin with the BOS token; null does as the tokenizer itself does."""

    tokens_per_forward: int | None = None
    """Most tokens, with padding, of one forward; null starts high and halves if memory runs out."""

    share_prefixes: bool | Literal["auto"] = "auto"
    """Whether what the prompts of one X begin with is read once: auto where it saves and is the
    same (float32: to rounding), true: an LM that cannot is an error, false: never."""

    compile: bool = False
    """Whether torch.compile fuses the LM's layers: minutes at the start, faster on a GPU."""

    trust_remote_code: bool = False
    """Whether to run Python code that the checkpoint brings along."""

    cache_dir: str | None = None
    """Folder in which hub downloads are kept; null takes the one of Hugging Face."""

    local_files_only: bool = False
    """Whether to look for a hub id among earlier downloads only."""

    def __post_init__(self) -> None:
        if not self.name_or_path:
            raise LanguageModelError(
                "lm.name_or_path is empty. Pass a checkpoint's folder, a hub id, or tiny-world."
            )
        if self.dtype not in get_args(Dtype):
            raise LanguageModelError(
                f"lm.dtype is {self.dtype!r}; it must be one of {', '.join(get_args(Dtype))}."
            )
        if self.share_prefixes not in ("auto", True, False):
            raise LanguageModelError(
                f"lm.share_prefixes is {self.share_prefixes!r}; it must be auto, true or false."
            )
        if self.tokens_per_forward is not None and self.tokens_per_forward < 1:
            raise LanguageModelError(
                f"lm.tokens_per_forward is {self.tokens_per_forward}; it must be at least 1, or "
                "null to let it adapt."
            )
