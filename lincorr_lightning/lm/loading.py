"""Loading of tokenizer, configuration and weights by name, with errors that a user can act on."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.lm.config import TINY_WORLD, LMConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
_TOKENIZER_FILES = ("tokenizer*", "tokenization_*", "vocab*", "merges*", "*.model", "*.tiktoken")
_HUB_TIMEOUT_S = 10
_MANY = 5
_MAX_LAYERS = 10_000  # building 10^9 layers would take hours
# Parts that a checkpoint may have besides the LM.
_OTHER_PARTS = re.compile(
    r"vision|visual|image|img|audio|speech|multi_?modal|mm_|mtp|rotary|inv_freq"
)
_MIN_USED_FRACTION = 0.9  # embeddings are padded by a few percent
_MIN_SHARED_FRACTION = 0.99  # releases of a tokenizer differ in a few special tokens


@dataclass(frozen=True)
class Checkpoint:
    """Location of a checkpoint."""

    config: LMConfig
    location: str
    is_folder: bool
    is_online: bool
    gguf_file: str | None = None
    """Name of the GGUF file in the folder; None for a Hugging Face checkpoint."""

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for ``from_pretrained``."""
        options: dict[str, Any] = {"trust_remote_code": self.config.trust_remote_code}
        if self.gguf_file is not None:
            options["gguf_file"] = self.gguf_file
        if self.is_folder:
            # Files that a folder lacks are not downloaded.
            return options | {"local_files_only": True}
        return options | {
            "revision": self.config.revision,
            "cache_dir": self.config.cache_dir,
            "local_files_only": not self.is_online,
        }

    def __str__(self) -> str:
        if self.gguf_file is not None:
            return f"the GGUF file {Path(self.location) / self.gguf_file}"
        return f"the folder {self.location}" if self.is_folder else f"the hub id {self.location}"


def find_checkpoint(config: LMConfig) -> Checkpoint:
    """Resolve a name to a folder, a GGUF file or a hub id.

    An existing folder takes precedence. A name that ends in ``.gguf`` is a file. A name that cannot
    be a hub id, or looks like a path, is a missing folder.

    Raises:
        LanguageModelError: The folder or file is missing or holds no checkpoint, GGUF files cannot
            be read because a package is not installed, or `config` has a revision and the name is
            a path.
    """
    name = config.name_or_path
    path = Path(str(files(__package__) / "tiny_world")) if name == TINY_WORLD else Path(name)
    path = path.expanduser()
    if path.is_dir():
        _check_folder(path)
        _check_no_revision(config, path, "folder")
        return Checkpoint(config, str(path), is_folder=True, is_online=False)
    if path.suffix.lower() == ".gguf":
        _check_gguf(path)
        _check_no_revision(config, path, "file")
        return Checkpoint(
            config, str(path.parent), is_folder=True, is_online=False, gguf_file=path.name
        )
    way_out = (
        "Pass the folder with the checkpoint's config.json, a .gguf file, a hub id such as "
        f"openai-community/gpt2, or {TINY_WORLD}."
    )
    if path.exists():
        raise LanguageModelError(f"the LM {name} is a file, not a folder. {way_out}")
    if name == TINY_WORLD:
        raise LanguageModelError(
            f"the packaged LM is missing: there is no folder {path}. Reinstall the package."
        )
    if not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise LanguageModelError(f"the LM's folder {name} does not exist. {way_out}")
    return Checkpoint(config, name, is_folder=False, is_online=_can_ask_hub(config))


def _check_no_revision(config: LMConfig, path: Path, kind: str) -> None:
    if config.revision is not None:
        raise LanguageModelError(
            f"lm.revision is {config.revision!r}, but {path} is a {kind}, which has no revisions. "
            "Set lm.revision to null, or pass a hub id."
        )


def _check_gguf(path: Path) -> None:
    if not path.is_file():
        raise LanguageModelError(
            f"the LM's file {path} does not exist. Pass an existing .gguf file."
        )
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise LanguageModelError(
                f"{path} is not a GGUF file: it does not begin with the bytes GGUF. Download it "
                "again, or pass a checkpoint's folder."
            )
    if find_spec("gguf") is None:
        raise LanguageModelError(
            f"the LM {path} is a GGUF file, and reading it needs the package gguf. Run "
            "`pip install 'lincorr-lightning[gguf]'`, or pass a Hugging Face checkpoint's folder."
        )


def _check_regular(folder: Path) -> None:
    """Refuse a folder with a FIFO or device, which could block the reader or never end."""
    for path in sorted(folder.rglob("*")):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise LanguageModelError(
                f"{path} is a FIFO, a device or a socket, not a file. Remove it, or pass another "
                "folder."
            )


def _check_folder(path: Path) -> None:
    inside = sorted(child.name for child in path.iterdir())
    if not inside:
        raise LanguageModelError(
            f"the LM's folder {path} is empty. Pass the folder that holds config.json, the "
            "tokenizer's files and the weights."
        )
    if "config.json" not in inside:
        shown = ", ".join(inside[:_MANY]) + (", ..." if len(inside) > _MANY else "")
        deeper = [child.parent.name for child in sorted(path.glob("*/config.json"))][:_MANY]
        hint = f" Did you mean one of its folders {', '.join(deeper)}?" if deeper else ""
        files_here = [name for name in inside if name.endswith(".gguf")]
        if files_here:
            hint = f" Did you mean the file {path / files_here[0]}?"
        adapter = " It is a peft adapter: merge it into its LM and save the merged LM."
        raise LanguageModelError(
            f"the LM's folder {path} has no config.json (it holds {shown}), so it is not a Hugging "
            f"Face checkpoint.{adapter if 'adapter_config.json' in inside else hint}"
        )
    _check_regular(path)


def _can_ask_hub(config: LMConfig) -> bool:
    """Check once whether the hub can be reached: each download would retry for twenty seconds."""
    import huggingface_hub
    from huggingface_hub import constants, errors

    if config.local_files_only or constants.HF_HUB_OFFLINE:
        return False
    try:
        huggingface_hub.HfApi().model_info(
            config.name_or_path, revision=config.revision, timeout=_HUB_TIMEOUT_S
        )
    except errors.HfHubHTTPError:
        return True  # the hub answered; the download reports what is wrong with the name
    except Exception as error:  # depends on the HTTP library
        _log.warning(
            "The Hugging Face hub cannot be reached (%s); looking for %s among earlier downloads.",
            error,
            config.name_or_path,
        )
        return False
    return True


def _first_line(error: BaseException) -> str:
    if isinstance(error, (ArithmeticError, LookupError, TypeError, AttributeError)):
        return "it has a value that is impossible or missing"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].endswith(":"):
        lines[0] = " ".join(lines[:2])
    return (lines[0] if lines else type(error).__name__).rstrip(".")


@contextmanager
def _explained(checkpoint: Checkpoint, what: str, hint: Callable[[], str]) -> Iterator[None]:
    """Turn any reader's error into a `LanguageModelError` that says what to do."""
    try:
        yield
    except LanguageModelError:
        raise
    except Exception as error:  # transformers' readers raise errors of many types
        if not checkpoint.is_folder and not checkpoint.is_online:
            name = checkpoint.location
            raise LanguageModelError(
                f"{name} is not a folder, and as a hub id it is not among earlier downloads and "
                "the Hugging Face hub cannot be reached (no network, or offline mode). Pass the "
                f"folder of a checkpoint as lm.name_or_path, or run `hf download {name}` on a "
                "machine with network access."
            ) from error
        raise LanguageModelError(
            f"{what} of {checkpoint} cannot be read: {_first_line(error)}. {hint()}"
        ) from error


def _has_own_code(checkpoint: Checkpoint) -> bool:
    """Return whether the folder of a checkpoint names Python code that comes with it."""
    path = Path(checkpoint.location) / "config.json"
    return checkpoint.is_folder and b'"auto_map"' in path.read_bytes()


def read_config(checkpoint: Checkpoint, must_be_causal: bool = True) -> PreTrainedConfig:
    """Read config.json.

    Raises:
        LanguageModelError: The configuration cannot be read, has an impossible number of layers, or
            is not that of a causal LM.
    """
    from transformers import AutoConfig

    hint = "Is the checkpoint complete, and its architecture known to this transformers version?"
    if checkpoint.gguf_file is not None:
        hint = (
            "If the file was cut short, download it again; if it is complete, this transformers "
            "version may not know its architecture."
        )
    elif not checkpoint.config.trust_remote_code and _has_own_code(checkpoint):
        hint += " It comes with Python code; if you trust that, set lm.trust_remote_code."
    what = "config.json" if checkpoint.gguf_file is None else "the metadata"
    with _explained(checkpoint, what, lambda: hint):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            checkpoint.location, **checkpoint.options
        )
    for part in (config, getattr(config, "text_config", None)):
        n_layers = getattr(part, "num_hidden_layers", None)
        if isinstance(n_layers, int) and not 0 <= n_layers <= _MAX_LAYERS:
            raise LanguageModelError(
                f"{what} of {checkpoint} has num_hidden_layers {n_layers}; it must be between 0 "
                f"and {_MAX_LAYERS:,}. Correct it, or copy the checkpoint again."
            )
    if must_be_causal:
        _check_causal(checkpoint, config)
    return config


def _check_causal(checkpoint: Checkpoint, config: PreTrainedConfig) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    kind = None
    if getattr(config, "is_encoder_decoder", False):
        kind = "an encoder-decoder"
    elif type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        kind = "an encoder"
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not hasattr(config, "auto_map"):
        kind = "a model without a language-modeling head"
    if kind is not None:
        name = (config.architectures or [type(config).__name__])[0]
        raise LanguageModelError(
            f"{checkpoint} holds {kind} ({name}), not a causal LM: it does not predict the next "
            "token of a prompt. Pass a decoder such as Llama, GPT-2 or Qwen."
        )


def read_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """Read the tokenizer: that of ``lm.tokenizer``, or the checkpoint's own.

    Raises:
        LanguageModelError: The tokenizer is missing, cannot be read, or has an empty vocabulary; or
            that of ``lm.tokenizer`` has other tokens than the LM.
    """
    if checkpoint.config.tokenizer is None:
        return _read_tokenizer(checkpoint)
    other = _read_tokenizer(_tokenizer_checkpoint(checkpoint.config))
    name = f"the tokenizer {checkpoint.config.tokenizer} does not fit {checkpoint}"
    vocabulary = other.get_vocab()
    vocab_size = int(read_config(checkpoint, must_be_causal=False).get_text_config().vocab_size)
    largest = max(vocabulary.values())
    if largest >= vocab_size:
        raise LanguageModelError(
            f"{name}: its largest token id is {largest}, and the LM has {vocab_size} tokens. Pass "
            "the tokenizer that the LM was trained with as lm.tokenizer."
        )
    if len(vocabulary) < _MIN_USED_FRACTION * vocab_size:
        raise LanguageModelError(
            f"{name}: it has {len(vocabulary):,} tokens, and the LM has {vocab_size:,}. Pass the "
            "tokenizer that the LM was trained with as lm.tokenizer."
        )
    try:
        own = _read_tokenizer(checkpoint).get_vocab()
    except LanguageModelError:
        return other  # the checkpoint has no tokenizer to compare with
    n_equal = sum(own.get(token) == token_id for token, token_id in vocabulary.items())
    if n_equal < _MIN_SHARED_FRACTION * len(vocabulary):
        raise LanguageModelError(
            f"{name}: only {n_equal:,} of its {len(vocabulary):,} tokens have the ids of the LM's "
            "own tokenizer. Pass the tokenizer that the LM was trained with as lm.tokenizer, or "
            "null for its own."
        )
    return other


def _tokenizer_checkpoint(config: LMConfig) -> Checkpoint:
    name = str(config.tokenizer)
    folder = Path(name).expanduser()
    if not folder.is_dir() and (folder.exists() or not _HUB_ID.fullmatch(name)):
        raise LanguageModelError(
            f"lm.tokenizer is {name}, which is not a folder. Pass a folder with the files of a "
            "tokenizer (tokenizer.json, ...), or a hub id."
        )
    config = replace(config, name_or_path=name, tokenizer=None, revision=None)
    if folder.is_dir():
        _check_regular(folder)
        return Checkpoint(config, str(folder), is_folder=True, is_online=False)
    return Checkpoint(config, name, is_folder=False, is_online=_can_ask_hub(config))


def _read_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    if checkpoint.gguf_file is not None:
        way_out = "Pass the folder or hub id of the LM's tokenizer as lm.tokenizer."
    else:
        way_out = (
            "Copy the tokenizer files (tokenizer.json, tokenizer_config.json, ...) of the base LM "
            "into it, or pass their folder as lm.tokenizer."
        )
        folder = Path(checkpoint.location)
        if checkpoint.is_folder and not any(
            next(folder.glob(pattern), None) for pattern in _TOKENIZER_FILES
        ):
            raise LanguageModelError(f"{checkpoint} has no tokenizer. {way_out}")
    with _explained(checkpoint, "the tokenizer", lambda: way_out):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            checkpoint.location, **checkpoint.options
        )
    # For many architectures transformers creates an empty tokenizer where files are missing.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise LanguageModelError(
            f"the tokenizer of {checkpoint} has {len(tokenizer)} special tokens and no others: its "
            f"vocabulary is missing. {way_out}"
        )
    return tokenizer


def read_model(checkpoint: Checkpoint, config: PreTrainedConfig) -> PreTrainedModel:
    """Read the weights, on the CPU; those of a GGUF file are dequantized to ``lm.dtype``.

    Raises:
        LanguageModelError: A file is missing or damaged, lacks some weights, or has more layers
            than the configuration.
    """
    from transformers import AutoModelForCausalLM, GgufConfig

    options = checkpoint.options | {"dtype": checkpoint.config.dtype}
    if checkpoint.config.attn_implementation is not None:
        options["attn_implementation"] = checkpoint.config.attn_implementation
    if checkpoint.gguf_file is not None:
        options["quantization_config"] = GgufConfig(dequantize=True)
    with _explained(checkpoint, "the weights", lambda: _weights_hint(checkpoint)):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint.location, config=config, output_loading_info=True, **options
        )
    model, info = cast(tuple["PreTrainedModel", dict[str, Any]], loaded)
    missing = sorted(info["missing_keys"])
    if missing:
        shown = ", ".join(missing[:_MANY])
        more = f" and {len(missing) - _MANY} more" if len(missing) > _MANY else ""
        hint = (
            f"Its config.json is for {type(model).__name__}: save the checkpoint again with that "
            "class, or correct the config (tie_word_embeddings, if the head is missing)."
        )
        if checkpoint.gguf_file is not None:
            hint = "Is it one part of a split file? Merge the parts with llama.cpp's gguf-split."
        raise LanguageModelError(
            f"the weights of {checkpoint} lack {shown}{more}, which would be initialized at "
            f"random. {hint}"
        )
    _check_surplus(checkpoint, model, info["unexpected_keys"])
    if checkpoint.gguf_file is not None:
        # The weights are plain now. With these attributes, peft and save_pretrained refuse them.
        plain: Any = model
        plain.hf_quantizer = None
        plain.is_quantized = False
        model.config.__dict__.pop("quantization_config", None)
    return model


def _check_surplus(checkpoint: Checkpoint, model: PreTrainedModel, keys: Iterable[str]) -> None:
    """Refuse layers that the config omits, and warn of other weights that the LM does not have."""
    from torch import nn

    unused = sorted(key for key in keys if not _OTHER_PARTS.search(key))
    # Layers for multi-token prediction follow the LM's own under the same name.
    n_further = getattr(model.config.get_text_config(), "num_nextn_predict_layers", 0) or 0
    stacks = {n: len(part) for n, part in model.named_modules() if isinstance(part, nn.ModuleList)}
    for key in unused:
        stack, _, rest = re.sub(r"\.(\d+)\.", r" \1 ", key, count=1).partition(" ")
        number = rest.partition(" ")[0]
        sizes = [size for name, size in stacks.items() if f".{name}".endswith(f".{stack}")]
        if number and sizes and int(number) >= sizes[0] + n_further:
            raise LanguageModelError(
                f"the weights of {checkpoint} have {key}, but its config.json has {sizes[0]} "
                "layers (num_hidden_layers). Correct it, or copy the checkpoint again."
            )
    if unused:
        shown = ", ".join(unused[:_MANY])
        more = f" and {len(unused) - _MANY} more" if len(unused) > _MANY else ""
        _log.warning(
            "%s has weights that its LM does not use: %s%s. If they belong to it, its config.json "
            "is wrong.",
            checkpoint, shown, more,
        )  # fmt: skip


def _weights_hint(checkpoint: Checkpoint) -> str:
    """Return a hint that names the damaged file, if there is one."""
    from safetensors import SafetensorError, safe_open

    if checkpoint.gguf_file is not None:
        return "The file may be cut short: compare its size, or download it again."
    if checkpoint.is_folder:
        for path in sorted(Path(checkpoint.location).glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt"):
                    pass
            except (SafetensorError, OSError):
                return f"The file {path.name} is damaged or cut short; copy or download it again."
    return "Is the checkpoint complete, and does this machine have what its config.json asks for?"
