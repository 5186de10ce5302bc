"""Loading of tokenizer, configuration and weights by name, with errors that a user can act on."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lincorr_lightning.errors import LanguageModelError, listed
from lincorr_lightning.io import read_json
from lincorr_lightning.lm.config import TINY_WORLD, TINY_WORLD_EDITED, LMConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = "adapter_model.safetensors", "adapter_model.bin"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
_HUB_TIMEOUT_S = 10
_TOKENIZER = "tokenizer_config.json"
_NO_ERRORS = "missing_entries", "connection_errors", "gated_repo"
_NOT_OF_FILES = "trust_remote_code", "gguf_file"
_MAX_LAYERS = 1_000  # more would take minutes to hours, and all memory
_MAX_LOOPS = 16  # of layers that an LM runs several times
_DEPTHS = re.compile(r'"(\w*(?:layers|n_layer|depth|blocks|stages))": (\d+)')
_MAX_REASON = 400  # characters of a library's message
# Dtypes of weights that are not quantized, as safetensors and torch name them.
_STORED_DTYPES = "F64", "F32", "F16", "BF16"
_TORCH_DTYPES = "torch.float64", "torch.float32", "torch.float16", "torch.bfloat16"
_GENERIC_CLASSES = "TokenizersBackend", "PreTrainedTokenizerFast"
_GENERIC_TYPES = "gpt2", "gpt_neox", "llama"  # whose tokenizers AutoTokenizer leaves generic
_MIN_USED_FRACTION = 0.9  # embeddings are padded by a few percent
_MIN_SHARED_FRACTION = 0.99  # releases of a tokenizer differ in a few special tokens


@dataclass(frozen=True)
class Checkpoint:
    """Location of a checkpoint."""

    config: LMConfig
    location: str
    is_folder: bool = True
    is_online: bool = False
    gguf_file: str | None = None  #: Name of the GGUF file in the folder, if it is one.
    adapter: Checkpoint | None = None  #: The peft adapter that is merged into the LM, its base.

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

    @property
    def merged(self) -> dict[str, str]:
        """Where an adapter and its base are; empty without an adapter."""
        return {"adapter": self.adapter.location, "base": self.location} if self.adapter else {}

    def __str__(self) -> str:
        if self.gguf_file is not None:
            return f"the GGUF file {Path(self.location) / self.gguf_file}"
        return f"the folder {self.location}" if self.is_folder else f"the hub id {self.location}"


def find_checkpoint(config: LMConfig, what: str = "the LM") -> Checkpoint:
    """Resolve the name of an LM, or of a tokenizer; an existing folder comes before a hub id.

    The checkpoint of a peft adapter is that of its base.
    """
    if config.adapter is not None:
        alone = replace(config, name_or_path=config.adapter, adapter=None, revision=None)
        found, adapter = _find(config, "the base LM"), _find(alone, "the adapter")
        path = file_of(adapter, ADAPTER_CONFIG, is_needed=not file_of(adapter, "config.json"))
        if path is None:
            raise LanguageModelError(
                f"{adapter} is an LM: it has no {ADAPTER_CONFIG}. Pass an adapter as lm.adapter."
            )
        _adapter_settings(path)
        return replace(found, adapter=adapter)
    found = _find(config, what)
    path = None if found.gguf_file is not None else file_of(found, ADAPTER_CONFIG)
    if path is None or (what != "the LM" and file_of(found, _TOKENIZER)):
        return found
    settings = _adapter_settings(path)
    if not (name := str(settings.get("base_model_name_or_path") or "")):
        raise LanguageModelError(
            f"{path} names no LM. Pass it as lm.name_or_path, and the adapter as lm.adapter."
        )
    if not Path(name).expanduser().exists() and (path.parent / name).exists():
        name = str(path.parent / name)
    is_path = name == TINY_WORLD or Path(name).expanduser().exists()
    revision = None if is_path else settings.get("revision")
    base = replace(config, name_or_path=name, revision=revision, adapter=found.location)
    return replace(_find(base, f"the base LM (named in {path})"), adapter=found)


def file_of(checkpoint: Checkpoint, name: str, is_needed: bool = False) -> Path | None:
    """Return a file of a checkpoint, downloaded if necessary; None if there is no such file."""
    from transformers.utils.hub import cached_file

    options = {k: v for k, v in checkpoint.options.items() if k not in _NOT_OF_FILES}
    options |= {f"_raise_exceptions_for_{kind}": is_needed for kind in _NO_ERRORS}
    with explained(checkpoint, name, "Is the name right?"):
        path = cached_file(checkpoint.location, name, **options)
    return None if path is None else Path(path)


def _adapter_settings(path: Path) -> dict[str, Any]:
    """Return an ``adapter_config.json``; refuse an adapter that cannot be merged by its kind."""
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    settings = read_json(path, LanguageModelError, "Copy the adapter again.")
    is_alora = bool(settings.get("alora_invocation_tokens"))
    kind: Any = "LORA with alora_invocation_tokens" if is_alora else str(settings.get("peft_type"))
    if not hasattr(PEFT_TYPE_TO_TUNER_MAPPING.get(kind), "merge_and_unload"):
        raise LanguageModelError(
            f"{path} has the peft_type {kind}, which the installed peft cannot merge into an LM's "
            "weights. Pass an adapter of another type, such as LORA."
        )
    settings.pop("runtime_config", None)
    # Frozen weights would look like missing ones; a library named here would be imported.
    return settings | {"inference_mode": False, "megatron_config": None}


def _find(config: LMConfig, what: str) -> Checkpoint:
    name = config.name_or_path
    own = files(__package__) / name.replace("-", "_")
    path = Path(str(own) if name in (TINY_WORLD, TINY_WORLD_EDITED) else name).expanduser()
    is_gguf = path.suffix.lower() == ".gguf"
    if path.is_dir() or (is_gguf and path.is_file()):
        if config.revision is not None:
            raise LanguageModelError(
                f"lm.revision is {config.revision!r}, but {path} is a path and has no revisions. "
                "Set lm.revision to null, or pass a hub id."
            )
        if path.is_dir():
            _check_folder(path, what)
            return Checkpoint(config, str(path))
        if find_spec("gguf") is None:
            raise LanguageModelError(
                f"{path} is a GGUF file, and reading it needs the package gguf. Run `pip install "
                "'lincorr-lightning[gguf]'`, or pass a Hugging Face checkpoint's folder."
            )
        return Checkpoint(config, str(path.parent), gguf_file=path.name)
    if path.exists() or is_gguf or not _HUB_ID.fullmatch(name) or name.startswith("."):
        why = "is not a folder" if path.exists() else "does not exist"
        kinds = f"a checkpoint's config.json and tokenizer, a .gguf file, {TINY_WORLD}"
        as_what = " as lm.name_or_path, and the adapter as lm.adapter" if "base" in what else ""
        raise LanguageModelError(
            f"{what} {name} {why}. Pass {'its folder, or ' if path.is_file() else ''}a folder with "
            f"{ADAPTER_CONFIG if what == 'the adapter' else kinds}, or a hub id such as "
            f"openai-community/gpt2{as_what}."
        )
    return Checkpoint(config, name, is_folder=False, is_online=_can_ask_hub(config))


def _check_folder(folder: Path, what: str) -> None:
    needed = {"the tokenizer": (), "the adapter": (ADAPTER_CONFIG,)}.get(what, ("config.json",))
    names = sorted(child.name for child in folder.iterdir())
    is_adapter = ADAPTER_CONFIG in names
    if is_adapter and any(re.fullmatch(r"(pytorch_)?model.*\.(bin|safetensors)", n) for n in names):
        raise LanguageModelError(
            f"the folder {folder} holds an LM and a peft adapter ({ADAPTER_CONFIG}). Move the "
            "adapter's files to another folder, which lm.adapter or lm.name_or_path may name."
        )
    if not (set(needed) <= set(names) or (is_adapter and what == "the LM")):
        gguf_files = [name for name in names if name.endswith(".gguf")]
        kinds = needed[0], ADAPTER_CONFIG
        inner = sorted({child.parent.name for n in kinds for child in folder.glob(f"*/{n}")})
        hint = "Pass the folder that holds config.json, the tokenizer's files and the weights."
        if is_adapter:
            hint = "An adapter is not merged into another one: pass an LM, and one as lm.adapter."
        elif inner or (gguf_files and what != "the adapter"):
            hint = f"Did you mean {listed(inner or gguf_files)} in it?"
        elif what == "the adapter":
            hint = "Pass the LM as lm.name_or_path, and the folder of a peft adapter as lm.adapter."
        raise LanguageModelError(
            f"the folder {folder} of {what} has no {needed[0]} (it holds {listed(names)}). {hint}"
        )
    for path in sorted(folder.rglob("*")):
        if path.exists() and not (path.is_file() or path.is_dir()):  # it could block a reader
            raise LanguageModelError(f"{path} is a FIFO, a device or a socket, not a file.")


def _can_ask_hub(config: LMConfig) -> bool:
    """Check once whether the hub can be reached: each download would retry for twenty seconds."""
    from huggingface_hub import HfApi, constants, errors

    if config.local_files_only or constants.HF_HUB_OFFLINE:
        return False
    try:
        HfApi().model_info(config.name_or_path, revision=config.revision, timeout=_HUB_TIMEOUT_S)
    except errors.HfHubHTTPError:
        pass  # the hub answered; the download reports what is wrong with the name
    except Exception as error:  # depends on the HTTP library
        message = "The Hugging Face hub cannot be reached (%s); looking for %s among downloads."
        _log.warning(message, error, config.name_or_path)
        return False
    return True


def first_line(error: BaseException) -> str:
    """Return a reader's error in one line without a final period."""
    if isinstance(error, (ArithmeticError, LookupError, TypeError, AttributeError)):
        return "it has a value that is impossible or missing"
    if "instantiate the backend tokenizer" in str(error):  # and from what it tried to, as a list
        return "its files are missing or damaged"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].endswith(":"):
        lines[0] = " ".join(lines[:2])
    return (lines[0] if lines else type(error).__name__)[:_MAX_REASON].rstrip(".")


@contextmanager
def explained(checkpoint: Checkpoint, what: str, hint: str) -> Iterator[None]:
    """Turn any reader's error into a `LanguageModelError` that says what to do."""
    try:
        yield
    except LanguageModelError:
        raise
    except Exception as error:  # transformers' readers raise errors of many types
        message = f"{what} of {checkpoint} cannot be read: {first_line(error)}. {hint}"
        if not checkpoint.is_folder and not checkpoint.is_online:
            name, adapter = checkpoint.location, checkpoint.adapter
            whose = f", the base of {adapter.location}," if adapter else ""
            message = (
                f"{name}{whose} is not a folder, and as a hub id it is not among earlier downloads "
                "and the Hugging Face hub cannot be reached (no network, or offline mode). Pass "
                "the folder of a checkpoint as lm.name_or_path (with an adapter as lm.adapter), or "
                f"run `hf download {name}` on a machine with network access."
            )
        raise LanguageModelError(message) from error


def read_config(checkpoint: Checkpoint, must_be_causal: bool = True) -> PreTrainedConfig:
    """Read config.json, or the metadata of a GGUF file."""
    from transformers import AutoConfig

    location, options = checkpoint.location, checkpoint.options
    what = "config.json" if checkpoint.gguf_file is None else "the metadata"
    hint = (
        "Is it complete, and its architecture known to this transformers version? Copy or download "
        "it again; if it comes with Python code that you trust, set lm.trust_remote_code."
    )
    with explained(checkpoint, what, hint):
        config: PreTrainedConfig = AutoConfig.from_pretrained(location, **options)
        for name, number in _DEPTHS.findall(config.to_json_string(use_diff=False)):
            if int(number) > _MAX_LAYERS:
                raise LanguageModelError(
                    f"{what} of {checkpoint} has {name} {number}; it must be at most "
                    f"{_MAX_LAYERS:,}. Correct it, or copy the checkpoint again."
                )
    wanted = checkpoint.config.attn_implementation or config._attn_implementation
    if "/" in str(wanted) and not checkpoint.config.trust_remote_code:
        raise LanguageModelError(
            f"{wanted} is code from the hub, which computes the attention of {checkpoint}. Set "
            "lm.attn_implementation to sdpa, or lm.trust_remote_code if you trust it."
        )
    if must_be_causal:
        _check_causal(checkpoint, config)
    return config


def _check_causal(checkpoint: Checkpoint, config: PreTrainedConfig) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    if getattr(config, "is_encoder_decoder", False):
        kind = "an encoder-decoder"
    elif type(config) in MODEL_FOR_MASKED_LM_MAPPING and not (
        getattr(config, "is_decoder", False) or getattr(config, "causal", False)  # of XLM
    ):
        kind = "an encoder"
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not hasattr(config, "auto_map"):
        kind = "a model that transformers does not load as a causal LM"
    else:
        return
    name = (config.architectures or [type(config).__name__])[0]
    raise LanguageModelError(
        f"{checkpoint} holds {kind} ({name}), and not an LM that predicts the next token of a "
        "prompt. Pass a decoder such as Llama, GPT-2 or Qwen."
    )


def read_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """Read the tokenizer: that of ``lm.tokenizer``, the adapter's, or the checkpoint's own."""
    name, adapter = checkpoint.config.tokenizer, checkpoint.adapter
    if name is None:
        return _read_tokenizer(adapter if adapter and file_of(adapter, _TOKENIZER) else checkpoint)
    alone: Any = dict.fromkeys(("tokenizer", "revision", "adapter"))
    config = replace(checkpoint.config, name_or_path=name, **alone)
    tokenizer = _read_tokenizer(find_checkpoint(config, "the tokenizer"))
    vocabulary = tokenizer.get_vocab()
    size, largest = len(vocabulary), max(vocabulary.values())
    vocab_size = int(read_config(checkpoint, must_be_causal=False).get_text_config().vocab_size)
    why = f"it has {size:,} tokens with ids up to {largest}, and the LM has {vocab_size:,} tokens"
    fits = largest < vocab_size and size >= _MIN_USED_FRACTION * vocab_size
    if fits:
        try:
            own = _read_tokenizer(checkpoint).get_vocab()
        except LanguageModelError:
            return tokenizer  # the checkpoint has no tokenizer to compare with
        if len(own) < size / 2:  # where files are missing, some have a few special tokens
            return tokenizer
        n_equal = sum(own.get(token) == token_id for token, token_id in vocabulary.items())
        why = f"only {n_equal:,} of its {size:,} tokens have the ids of the LM's own tokenizer"
        fits = n_equal >= _MIN_SHARED_FRACTION * size
    if not fits:
        raise LanguageModelError(
            f"the tokenizer {name} does not fit {checkpoint}: {why}. Pass the tokenizer that the "
            "LM was trained with as lm.tokenizer, or null for its own."
        )
    return tokenizer


def _tokenizer_class(checkpoint: Checkpoint) -> Any:
    """Return the class that reads the tokenizer: TokenizersBackend where AutoTokenizer chooses it.

    `AutoTokenizer` imports torch; it reports what cannot be read of a folder's files.
    """
    import transformers

    paths = [Path(checkpoint.location) / name for name in ("config.json", _TOKENIZER)]
    with suppress(AttributeError, OSError, RecursionError, ValueError):
        model, tokenizer = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
        is_own = tokenizer.get("tokenizer_class") not in _GENERIC_CLASSES or "auto_map" in tokenizer
        if not is_own and model["model_type"] in _GENERIC_TYPES and not checkpoint.gguf_file:
            return transformers.TokenizersBackend
    return transformers.AutoTokenizer


def _read_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    way_out = (
        "Copy the tokenizer files (config.json, tokenizer.json, tokenizer_config.json, ...) of the "
        "base LM into it, or pass their folder as lm.tokenizer (`audit`: as --lm)."
    )
    if checkpoint.gguf_file is not None:
        way_out = "Pass the folder or hub id of its tokenizer as lm.tokenizer (`audit`: as --lm)."
    _, kept = _kept.get() or ({}, {})
    if checkpoint in kept:
        return kept[checkpoint]
    with explained(checkpoint, "the tokenizer", way_out):
        tokenizer: PreTrainedTokenizerBase = _tokenizer_class(checkpoint).from_pretrained(
            checkpoint.location, **checkpoint.options
        )
        tokenizer("a text of 9 " * 9, verbose=False)  # some settings are used only now
    # For many architectures transformers creates an empty tokenizer where files are missing.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise LanguageModelError(f"{checkpoint} has no vocabulary of a tokenizer. {way_out}")
    kept[checkpoint] = tokenizer
    return tokenizer


# LMs with their state, and tokenizers; nothing is kept outside of `weights_read_once`.
_Kept = tuple[dict[LMConfig, Any], dict[Checkpoint, Any]]
_kept: ContextVar[_Kept | None] = ContextVar("kept", default=None)


@contextmanager
def weights_read_once() -> Iterator[None]:
    """Keep the last LM in memory inside a ``with`` block, for `load_model`, until it is changed.

    Tokenizers are kept, too, and with them what is known of their vocabulary.
    """
    token = _kept.set(({}, {}))
    try:
        yield
    finally:
        _kept.reset(token)


def load_model(checkpoint: Checkpoint, config: PreTrainedConfig) -> PreTrainedModel:
    """Read the weights, or return the unchanged LM that `weights_read_once` keeps."""
    kept, _ = _kept.get() or ({}, {})
    model, state = kept.pop(checkpoint.config, (None, None))
    if model is None or state != _state(model):
        del model  # before another one needs memory
        kept.clear()
        model = read_model(checkpoint, config)
    kept[checkpoint.config] = model, _state(model)
    return cast("PreTrainedModel", model)


def _state(model: PreTrainedModel) -> object:
    """Return what changes when weights are trained, or layers are added, hooked or sharded."""
    weights = [(n, p.shape, p.dtype, p._version) for n, p in model.named_parameters()]
    return weights, sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def read_model(checkpoint: Checkpoint, config: PreTrainedConfig) -> PreTrainedModel:
    """Read the weights, on the CPU; those of a GGUF file are dequantized to ``lm.dtype``.

    An adapter is merged into them.
    """
    from transformers import AutoModelForCausalLM, GgufConfig

    from lincorr_lightning.lm.adapter import merge_adapter

    if (adapter := checkpoint.adapter) is not None:
        base = replace(checkpoint, adapter=None)
        if checkpoint.gguf_file is None and hasattr(config, "quantization_config"):
            raise LanguageModelError(
                f"the weights of {base} are quantized, so that no adapter can be merged into them. "
                "Pass the LM from before the quantization as lm.name_or_path."
            )
        model = read_model(base, config)
        found = (file_of(adapter, name) for name in (ADAPTER_CONFIG, *_ADAPTER_WEIGHTS))
        files = [path for path in found if path is not None]
        if len(files) < 2:
            raise LanguageModelError(
                f"{adapter} lacks {_ADAPTER_WEIGHTS[0]}. Copy or download it again."
            )
        hint = (
            "Is it complete, and is the LM the one that it was trained on? Copy it again, or pass "
            "that LM as lm.name_or_path and the adapter as lm.adapter."
        )
        with explained(adapter, "the adapter", hint):
            return merge_adapter(model, _adapter_settings(files[0]), files[1])
    options = checkpoint.options | {"dtype": checkpoint.config.dtype}
    if attention := checkpoint.config.attn_implementation:
        options["attn_implementation"] = attention
    hint = "Is it complete, and does this machine have what its config.json asks for?"
    if checkpoint.gguf_file is not None:
        hint = "The file may be cut short: compare its size, or download it again."
        options["quantization_config"] = GgufConfig(dequantize=True)
    with explained(checkpoint, "the weights", hint):
        _check_depth(checkpoint, config)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint.location, config=config, output_loading_info=True, **options
        )
    model = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    _check_quantization(checkpoint, loaded, getattr(config, "quantization_config", None))
    if missing:
        hint = (
            f"Its config.json is for {type(model).__name__}: save the checkpoint again with that "
            "class, or correct the config (tie_word_embeddings, if the head is missing)."
        )
        if checkpoint.gguf_file is not None:
            hint = "Is it one part of a split file? Merge the parts with llama.cpp's gguf-split."
        raise LanguageModelError(
            f"the weights of {checkpoint} lack {listed(missing)}, which would be "
            f"initialized at random. {hint}"
        )
    _check_layers(checkpoint, model, loaded[1]["unexpected_keys"])
    if checkpoint.gguf_file is not None:
        # The weights are plain now. With these attributes, peft and save_pretrained refuse them.
        loaded[0].hf_quantizer, loaded[0].is_quantized = None, False
        model.config.__dict__.pop("quantization_config", None)
    return model


def _check_quantization(checkpoint: Checkpoint, loaded: Any, method: Any) -> None:
    """Refuse plain weights that the config says are quantized: one of them is another LM's."""
    import torch

    if method is None or checkpoint.gguf_file is not None:
        return
    # Beside a GPU, plain weights become what the config says, and lack only what belongs to that.
    weights = (w for n, w in loaded[0].state_dict().items() if w.dim() > 1 and "position" not in n)
    if not loaded[1]["missing_keys"] and any(str(w.dtype) not in _TORCH_DTYPES for w in weights):
        return
    folder = Path(str(file_of(checkpoint, "config.json"))).parent
    if any(dtype not in _STORED_DTYPES for _, dtype in _stored(folder)):
        return
    for path in sorted(folder.glob("pytorch_model*.bin")):
        stored = torch.load(path, "cpu", weights_only=True, mmap=True)
        if any(str(weight.dtype) not in _TORCH_DTYPES for weight in stored.values()):
            return
    name = method.get("quant_method") if isinstance(method, dict) else method.quant_method
    raise LanguageModelError(
        f"the config.json of {checkpoint} names a quantization ({name}), but its weights are not "
        "quantized. Remove quantization_config from it, or copy the checkpoint again."
    )


def _stored(folder: Path) -> Iterator[tuple[str, str]]:
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                yield key, file.get_slice(key).get_dtype()


def _check_depth(checkpoint: Checkpoint, config: PreTrainedConfig) -> None:
    """Refuse many more layers than a folder's weights have, which would be built first."""
    numbers = [0]
    for key, _ in _stored(Path(checkpoint.location)) if checkpoint.is_folder else ():
        numbers += map(int, re.findall(r"\.(\d+)\.", key))
    n_layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if numbers[1:] and isinstance(n_layers, int) and n_layers > _MAX_LOOPS * (max(numbers) + 1):
        raise LanguageModelError(
            f"config.json of {checkpoint} has {n_layers} layers (num_hidden_layers), but its "
            f"weights have {max(numbers) + 1}. Correct it, or copy the checkpoint again."
        )


def _check_layers(checkpoint: Checkpoint, model: PreTrainedModel, unused: Iterable[str]) -> None:
    """Refuse weights of layers that the config omits: the LM would be another one."""
    from torch import nn

    # Layers for multi-token prediction follow the LM's own under the same name.
    n_further = getattr(model.config.get_text_config(), "num_nextn_predict_layers", 0) or 0
    stacks = {n: len(part) for n, part in model.named_modules() if isinstance(part, nn.ModuleList)}
    for key in sorted(unused):
        stack, number, _ = [*re.split(r"\.(\d+)\.", key, maxsplit=1), "", ""][:3]
        sizes = [size for name, size in stacks.items() if f".{name}".endswith(f".{stack}")]
        if number and sizes and int(number) >= sizes[0] + n_further:
            raise LanguageModelError(
                f"the weights of {checkpoint} have {key}, but its config.json has {sizes[0]} "
                "layers (num_hidden_layers). Correct it, or copy the checkpoint again."
            )
