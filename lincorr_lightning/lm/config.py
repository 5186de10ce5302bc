"""Configuration of a language model: where it is, its dtype, and how prompts are read."""

from dataclasses import dataclass
from typing import Literal, get_args

from lincorr_lightning.errors import LanguageModelError, require, require_one_of

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

TINY_WORLD = "tiny-world"
TINY_WORLD_EDITED = "tiny-world-edited"
"""Names of the LM that comes with the package, and of a peft adapter with edits of it."""


@dataclass(frozen=True)
class LMConfig:
    """Which language model to load, and how to read its logits.

    The default dtype is float32, whatever the checkpoint is stored in: bfloat16 has steps of 0.125
    at logits of 16 to 32, and its scores change with the batch size; ``lincorr compare`` shows how.
    """

    name_or_path: str = TINY_WORLD
    """Folder of a checkpoint or of a peft adapter, a .gguf file, a hub id such as
    openai-community/gpt2, or the packaged tiny-world and tiny-world-edited."""
    adapter: str | None = None
    """Folder or hub id of a peft adapter that is merged into the LM in memory; null for none, or if
    name_or_path is an adapter, which names its LM itself."""
    tokenizer: str | None = None
    """Folder or hub id of a tokenizer that replaces the checkpoint's own, such as that of a GGUF
    file without one or with a wrong one; null for the checkpoint's own."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; null for its main branch."""
    dtype: Dtype = "float32"
    """Dtype of weights and forward pass; auto takes the checkpoint's. Head rows are in float64."""
    attn_implementation: str | None = None
    """One of eager, sdpa and flash_attention_2; null lets transformers choose."""
    add_bos: bool | None = None
    """Whether prompts begin with the BOS token; null follows the tokenizer, or the template."""
    chat_template: bool = False
    """Whether a prompt is the beginning of the assistant's turn in the tokenizer's chat template,
    after a turn of the user with the study's prefix, or a request to complete the sentence."""
    tokens_per_forward: int | None = None
    """Maximum tokens of a forward pass, padding included; null halves it when memory runs out."""
    share_prefixes: bool | Literal["auto"] = "auto"
    """Whether the common prefix of a subject's prompts is computed once; auto where it saves time
    and gives the same logits, true to fail where the LM does not support it, false for never."""
    state_cache: str | None = None
    """Folder that keeps the states which the head of a frozen LM reads after prompts, so that later
    runs do not read these prompts again; null for none."""
    state_cache_gib: float = 20.0
    """Size of that folder in GiB, above which what was not used for longest is removed, but nothing
    that the run itself has used."""
    compile: bool = False
    """Whether to run torch.compile on the LM's layers; minutes at the start, faster on a GPU."""
    trust_remote_code: bool = False
    """Whether to run Python code that comes with the checkpoint."""
    cache_dir: str | None = None
    """Folder of hub downloads; null for Hugging Face's default."""
    local_files_only: bool = False
    """Whether a hub id is looked up among earlier downloads only."""

    def __post_init__(self) -> None:
        for name in ("name_or_path", "tokenizer", "adapter", "state_cache"):
            if not self.name_or_path or getattr(self, name) == "":
                raise LanguageModelError(f"lm.{name} is empty. Pass a folder, a file or a hub id.")
        if self.chat_template and self.add_bos is not None:
            raise LanguageModelError(
                f"lm.add_bos is {self.add_bos}, but with lm.chat_template the template decides "
                "whether there is a BOS token. Set lm.add_bos to null."
            )
        require_one_of("lm.dtype", self.dtype, get_args(Dtype))
        shared = str(self.share_prefixes).lower()
        require_one_of("lm.share_prefixes", shared, ("auto", "true", "false"))
        if self.tokens_per_forward is not None:
            require("lm.tokens_per_forward", self.tokens_per_forward, at_least=1)
        require("lm.state_cache_gib", self.state_cache_gib, above=0)
