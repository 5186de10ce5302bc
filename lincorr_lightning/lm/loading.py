"""Loading of tokenizer, configuration and weights by name, with errors that a user can act on."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lincorr_lightning.errors import LanguageModelError, RoundedAdapterError, listed, one_line
from lincorr_lightning.io import read_json
from lincorr_lightning.lm.config import TINY_WORLD, TINY_WORLD_EDITED, LMConfig
from lincorr_lightning.lm.file_changes import Stamp, stamps
from lincorr_lightning.lm.gguf_file import check_tensors, complete_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = "adapter_model.safetensors", "adapter_model.bin"
_LOST_START = re.compile("pissa_niter_.*|corda|loftq|lora_ga")  # at random, or by data
_LM_WEIGHTS = re.compile(r"(pytorch_)?model(-[^/]*)?\.(bin|safetensors)")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
_READ_SUFFIXES = ".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".py"
# What lies in a folder that is no LM's, and the way out.
_SIGNS = {
    r"snapshots/[^/]+": "is a snapshot in the hub's cache: pass it",
    r"checkpoint-\d+": "is a checkpoint of a training: pass it, or another one",
    r"model_index\.json": "is of diffusers: pass a decoder such as Llama",
    r"(checkpoints/)?[^/]+\.ckpt": "is of Lightning: load it, and call save_pretrained of its LM",
    r"lit_model\.pth": "is of litgpt: run `litgpt convert_from_litgpt`",
    r"meta\.pt": "is of Lightning: load its folder by its strategy, and call save_pretrained",
    r"(.+/)?[^/]+\.distcp": "is a shard of FSDP: run `accelerate merge-weights`",
    r"zero_to_fp32\.py": "lies beside shards of DeepSpeed: run it, which makes them one file",
    r"(pytorch_)?model\.[^/]+\.(bin|safetensors)": (
        "is a variant: load it with transformers' `variant`, and save the LM by save_pretrained"
    ),
    r"[^/]+\.(pth|msgpack|h5|onnx)": "is not read: save the LM by save_pretrained",
}
_HEADS = {
    b"version https://git-lfs": "is a pointer of git-lfs: run `git lfs pull` in its folder",
    b"<": "is a web page: download it again",
    b"": "is empty: copy or download it again",
}
_READ_WHOLE = ".json", ".safetensors", ".bin", ".model", ".gguf"
_HUB_TIMEOUT_S = 10
_TOKENIZER = "tokenizer_config.json"
_PIECES = "tokenizer.model"
_NO_ERRORS = "missing_entries", "connection_errors", "gated_repo"
_NOT_OF_FILES = "trust_remote_code", "gguf_file"
_GENERIC_CLASSES = "TokenizersBackend", "PreTrainedTokenizerFast"
_GENERIC_TYPES = "gpt2", "gpt_neox", "llama"  # whose tokenizers AutoTokenizer leaves generic
_MIN_USED_FRACTION = 0.9  # embeddings are padded by a few percent
_MIN_SHARED_FRACTION = 0.99  # releases of a tokenizer differ in a few special tokens


@dataclass(frozen=True)
class Checkpoint:
    """Location of a checkpoint, as it was found for what a config requests."""

    request: LMConfig
    location: str
    is_folder: bool = True
    is_online: bool = False
    gguf_file: str | None = None  #: Name of the GGUF file in the folder, if it is one.
    adapter: Checkpoint | None = None  #: The peft adapter that is merged into the LM, its base.
    files: Mapping[str, Stamp] = field(default_factory=dict, compare=False)  # as it was found

    def require_unchanged(self) -> None:
        """Refuse a folder or file whose parts have been read while it was written to."""
        now = stamps(self.files)
        if changed := [path for path, before in self.files.items() if now[path] != before]:
            raise LanguageModelError(
                f"{changed[0]} has been written to while {self} is read, which may now be half of "
                "another LM. Run again once the checkpoint is complete."
            )
        if self.adapter is not None:
            self.adapter.require_unchanged()

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for ``from_pretrained``."""
        options: dict[str, Any] = {"trust_remote_code": self.request.trust_remote_code}
        if self.gguf_file is not None:
            options["gguf_file"] = self.gguf_file
        if self.is_folder:
            # Files that a folder lacks are not downloaded.
            return options | {"local_files_only": True}
        return options | {
            "revision": self.request.revision,
            "cache_dir": self.request.cache_dir,
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


def find_checkpoint(request: LMConfig, what: str = "the LM") -> Checkpoint:
    """Resolve the name of an LM, or of a tokenizer; an existing folder comes before a hub id.

    The checkpoint of a peft adapter is that of its base.
    """
    if request.adapter is not None:
        base = _locate(request, "the base LM")
        alone = replace(request, name_or_path=request.adapter, adapter=None, revision=None)
        adapter = _locate(alone, "the adapter")
        _adapter_settings(adapter)
        return replace(base, adapter=adapter)
    checkpoint = _locate(request, what)
    path = None if checkpoint.gguf_file is not None else file_of(checkpoint, ADAPTER_CONFIG)
    if path is None or (what != "the LM" and file_of(checkpoint, _TOKENIZER)):
        return checkpoint
    settings = _adapter_settings(checkpoint)
    name = str(settings.get("base_model_name_or_path") or "")
    if not name:
        raise LanguageModelError(
            f"{path} names no LM. Pass it as lm.name_or_path, and the adapter as lm.adapter."
        )
    if not Path(name).expanduser().exists() and (path.parent / name).exists():
        name = str(path.parent / name)
    is_path = name == TINY_WORLD or Path(name).expanduser().exists()
    revision = None if is_path else settings.get("revision")
    base_request = replace(
        request, name_or_path=name, revision=revision, adapter=checkpoint.location
    )
    return replace(_locate(base_request, f"the base LM (named in {path})"), adapter=checkpoint)


def file_of(checkpoint: Checkpoint, name: str, is_needed: bool = False) -> Path | None:
    """Return a file of a checkpoint, downloaded if necessary; None if there is no such file."""
    from transformers.utils.hub import cached_file

    options = {k: v for k, v in checkpoint.options.items() if k not in _NOT_OF_FILES}
    options |= {f"_raise_exceptions_for_{kind}": is_needed for kind in _NO_ERRORS}
    with explained(checkpoint, name, "Is the name right?"):
        path = cached_file(checkpoint.location, name, **options)
    return None if path is None else Path(path)


def _adapter_settings(adapter: Checkpoint) -> dict[str, Any]:
    """Return an ``adapter_config.json``; refuse an adapter that cannot be merged by its kind."""
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    path = file_of(adapter, ADAPTER_CONFIG, is_needed=True)
    settings = read_json(str(path), LanguageModelError, "Copy the adapter again.")
    kind: Any = str(settings.get("peft_type"))
    # These would read other adapters, which they mix by the input.
    mixes = kind == "XLORA" or settings.get("arrow_config")
    if mixes or not hasattr(PEFT_TYPE_TO_TUNER_MAPPING.get(kind), "merge_and_unload"):
        kind += " with arrow_config" if kind == "LORA" else ""
        raise LanguageModelError(
            f"{path} has the peft_type {kind}, which the installed peft cannot merge into an LM's "
            "weights. Pass an adapter of another type, such as plain LORA."
        )
    if start := _LOST_START.match(str(settings.get("init_lora_weights"))):
        raise LanguageModelError(
            f"{path} has init_lora_weights {start[0]}, which first changed the LM's own weights in "
            "a way that cannot be repeated. Convert the adapter: save it with peft's "
            "`path_initial_model_for_weight_conversion`, the folder of the adapter as it was "
            "before training; or pass the merged LM."
        )
    settings.pop("runtime_config", None)
    # Frozen weights would look like missing ones; a library named here would be imported.
    return settings | {"inference_mode": False, "megatron_config": None}


def _locate(request: LMConfig, what: str) -> Checkpoint:
    name = request.name_or_path
    packaged = files(__package__) / name.replace("-", "_")
    path = Path(str(packaged) if name in (TINY_WORLD, TINY_WORLD_EDITED) else name).expanduser()
    is_gguf = path.suffix.lower() == ".gguf"
    if path.is_dir() or (is_gguf and path.is_file()):
        if request.revision is not None:
            raise LanguageModelError(
                f"lm.revision is {request.revision!r}, but {path} is a path and has no revisions. "
                "Set lm.revision to null, or pass a hub id."
            )
        if path.is_dir():
            _check_folder(path, what)
            read = (file for file in path.iterdir() if file.suffix in _READ_SUFFIXES)
            return Checkpoint(request, str(path), files=stamps(read))
        if find_spec("gguf") is None:
            raise LanguageModelError(
                f"{path} is a GGUF file, and reading it needs the package gguf. Run `pip install "
                "'lincorr-lightning[gguf]'`, or pass a Hugging Face checkpoint's folder."
            )
        return Checkpoint(request, str(path.parent), gguf_file=path.name, files=stamps([path]))
    if path.exists() or is_gguf or not _HUB_ID.fullmatch(name) or name.startswith("."):
        why = "is not a folder" if path.exists() else "does not exist"
        why = next((hint for sign, hint in _SIGNS.items() if re.fullmatch(sign, path.name)), why)
        raise LanguageModelError(
            f"{what} {name} {why}. Pass a folder with config.json, tokenizer and weights, a .gguf "
            f"file, {TINY_WORLD}, or a hub id such as openai-community/gpt2; as lm.name_or_path an "
            "LM or a peft adapter that names its LM, as lm.adapter another adapter."
        )
    return Checkpoint(request, name, is_folder=False, is_online=_is_hub_online(request))


def _check_folder(folder: Path, what: str) -> None:
    names = sorted(child.name for child in folder.iterdir())
    is_adapter = ADAPTER_CONFIG in names
    if is_adapter and any(map(_LM_WEIGHTS.fullmatch, names)):
        raise LanguageModelError(
            f"the folder {folder} holds an LM and a peft adapter ({ADAPTER_CONFIG}). Move the "
            "adapter's files to another folder, which lm.adapter or lm.name_or_path may name."
        )
    needed = ADAPTER_CONFIG if what == "the adapter" else "config.json"
    if what == "the tokenizer" or needed in names or (is_adapter and what == "the LM"):
        return
    hint = (
        "Pass the folder that holds config.json, the tokenizer's files and the weights as "
        "lm.name_or_path, and that of a peft adapter as lm.adapter."
    )
    kinds = {needed, ADAPTER_CONFIG} if what == "the LM" else {needed}
    inside = {path.parent.name for kind in kinds for path in folder.glob(f"*/{kind}")}
    inside |= {name for name in names if name.endswith(".gguf")}
    if seen := _look_at(folder):
        hint = seen
    elif inside:
        hint = f"Did you mean {listed(sorted(inside))} in it?"
    raise LanguageModelError(
        f"the folder {folder} of {what} has no {needed} (it holds {listed(names)}). {hint}"
    )


def _look_at(path: Path) -> str:
    """Return what lies at a path in place of an LM or its files, and the way out; or nothing."""
    inside = [path] if path.is_file() else sorted([*path.glob("*"), *path.glob("*/*")])
    for file in inside:
        if file.suffix in _READ_WHOLE and file.is_file() and file.parent in (path, path.parent):
            with file.open("rb") as opened:
                start = opened.read(64)
            for head, why in _HEADS.items():
                if start.startswith(head) if head else not start:
                    return f"{file} {why}."
    if not any(_LM_WEIGHTS.fullmatch(file.name) and file.parent == path for file in inside):
        for sign, why in _SIGNS.items():
            signs = [f for f in inside if re.fullmatch(sign, f.relative_to(path).as_posix())]
            if signs:
                return f"{max(signs, key=lambda file: file.stat().st_mtime)} {why}."
    return ""


def _is_hub_online(request: LMConfig) -> bool:
    """Check once whether the hub can be reached: each download would retry for twenty seconds."""
    from huggingface_hub import HfApi, constants, errors

    if request.local_files_only or constants.HF_HUB_OFFLINE:
        return False
    try:
        HfApi().model_info(request.name_or_path, revision=request.revision, timeout=_HUB_TIMEOUT_S)
    except errors.HfHubHTTPError:
        pass  # the hub answered; the download reports what is wrong with the name
    except Exception as error:  # depends on the HTTP library
        message = "The Hugging Face hub cannot be reached (%s); looking for %s among downloads."
        _log.warning(message, error, request.name_or_path)
        return False
    return True


@contextmanager
def explained(checkpoint: Checkpoint, what: str, hint: str) -> Iterator[None]:
    """Turn any reader's error into a `LanguageModelError` that says what to do."""
    try:
        yield
    except LanguageModelError:
        raise
    except Exception as error:  # transformers' readers raise errors of many types
        place = Path(checkpoint.location, checkpoint.gguf_file or "")
        seen = _look_at(place) if checkpoint.is_folder else ""
        message = f"{what} of {checkpoint} cannot be read: {seen or f'{one_line(error)}. {hint}'}"
        if not checkpoint.is_folder and not checkpoint.is_online:
            name = checkpoint.location
            adapter = checkpoint.adapter
            whose = f", the base of {adapter.location}," if adapter else ""
            message = (
                f"{name}{whose} is not a folder, and as a hub id it is not among earlier downloads "
                f"with {what}, and the Hugging Face hub cannot be reached (no network, or offline "
                "mode). Pass the folder of a checkpoint as lm.name_or_path (with an adapter as "
                f"lm.adapter), or run `hf download {name}` on a machine with network access."
            )
        raise LanguageModelError(message) from error


def read_config(checkpoint: Checkpoint, must_be_causal: bool = True) -> PreTrainedConfig:
    """Read config.json, or the metadata of a GGUF file."""
    from transformers import AutoConfig

    what = "config.json" if checkpoint.gguf_file is None else "the metadata"
    hint = (
        "Is it complete, and its architecture known to this transformers version? Copy or download "
        "it again; if it comes with Python code that you trust, set lm.trust_remote_code."
    )
    if checkpoint.gguf_file is not None:
        hint = f"{hint.split(';')[0]}; or pass the Hugging Face checkpoint that it was made from."
    with explained(checkpoint, what, hint):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            checkpoint.location, **checkpoint.options
        )
        if checkpoint.gguf_file is not None:
            complete_config(config, Path(checkpoint.location) / checkpoint.gguf_file)
    attention = checkpoint.request.attn_implementation or config._attn_implementation
    if "/" in str(attention) and not checkpoint.request.trust_remote_code:
        raise LanguageModelError(
            f"{attention} is code from the hub, which computes the attention of {checkpoint}. Set "
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
    name = checkpoint.request.tokenizer
    adapter = checkpoint.adapter
    if name is None:
        return _read_tokenizer(adapter if adapter and file_of(adapter, _TOKENIZER) else checkpoint)
    alone: Any = dict.fromkeys(("tokenizer", "revision", "adapter"))
    request = replace(checkpoint.request, name_or_path=name, **alone)
    tokenizer = _read_tokenizer(find_checkpoint(request, "the tokenizer"))
    check_tokenizer(tokenizer, read_config(checkpoint, must_be_causal=False), checkpoint)
    return tokenizer


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, checkpoint: Checkpoint | None
) -> None:
    """Refuse a tokenizer that cannot be an LM's by its size, or by the LM's own, if it has one."""
    vocabulary = tokenizer.get_vocab()
    size, largest = len(vocabulary), max(vocabulary.values())
    vocab_size = int(config.get_text_config().vocab_size)
    why = f"it has {size:,} tokens with ids up to {largest}, and the LM has {vocab_size:,} tokens"
    fits = largest < vocab_size and size >= _MIN_USED_FRACTION * vocab_size
    if fits:
        own: dict[str, int] = {}
        with suppress(LanguageModelError):  # it has none
            own = {} if checkpoint is None else _read_tokenizer(checkpoint).get_vocab()
        if len(own) < _MIN_USED_FRACTION * vocab_size:  # of missing files, or replaced since
            return
        n_equal = sum(own.get(token) == token_id for token, token_id in vocabulary.items())
        why = f"only {n_equal:,} of its {size:,} tokens have the ids of the LM's own tokenizer"
        fits = n_equal >= _MIN_SHARED_FRACTION * min(size, len(own))  # some may be added
    if not fits:
        raise LanguageModelError(
            f"the tokenizer {tokenizer.name_or_path} does not fit {checkpoint or 'the LM'}: {why}. "
            "Pass the one that the LM was trained with; lm.tokenizer null is its own."
        )


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
    from transformers import TokenizersBackend

    way_out = (
        "Copy the tokenizer files (config.json, tokenizer.json, tokenizer_config.json, ...) of the "
        "base LM into it, or pass their folder as lm.tokenizer (`audit`: as --lm)."
    )
    if checkpoint.gguf_file is not None:
        way_out = "Pass the folder or hub id of its tokenizer as lm.tokenizer (`audit`: as --lm)."
    elif find_spec("sentencepiece") is None and Path(checkpoint.location, _PIECES).exists():
        way_out = f"Its {_PIECES} needs the package sentencepiece: run `pip install sentencepiece`."
    with explained(checkpoint, "the tokenizer", way_out):
        tokenizer: PreTrainedTokenizerBase = _tokenizer_class(checkpoint).from_pretrained(
            checkpoint.location, **checkpoint.options
        )
        # The classes of some architectures build what they expect of the vocabulary, and leave out
        # what else the LM was trained with: added tokens, a normalizer, a split of digits.
        generic: Any = TokenizersBackend
        is_built = isinstance(tokenizer, generic) and type(tokenizer) is not generic
        is_own = checkpoint.gguf_file is not None or checkpoint.request.trust_remote_code
        if is_built and not is_own and file_of(checkpoint, "tokenizer.json"):
            saved = generic.from_pretrained(checkpoint.location, **checkpoint.options)
            tokenizer._tokenizer = saved._tokenizer
        tokenizer("a text of 9 " * 9, verbose=False)  # some settings are used only now
    # For many architectures transformers creates an empty tokenizer where files are missing.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise LanguageModelError(f"{checkpoint} has no vocabulary of a tokenizer. {way_out}")
    return tokenizer


# The last LM with its state; nothing is kept outside of `weights_read_once`.
_kept: ContextVar[dict[LMConfig, tuple[Any, object]] | None] = ContextVar("kept", default=None)


@contextmanager
def weights_read_once() -> Iterator[None]:
    """Keep the last LM in memory inside a ``with`` block, for `load_model`, until it is changed."""
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def load_model(checkpoint: Checkpoint, config: PreTrainedConfig) -> PreTrainedModel:
    """Read the weights, or return the unchanged LM that `weights_read_once` keeps."""
    kept = _kept.get()
    if kept is None:
        return read_model(checkpoint, config)
    model, state = kept.pop(checkpoint.request, (None, None))
    if model is None or state != _state(model, checkpoint):
        del model  # before another one needs memory
        kept.clear()
        model = read_model(checkpoint, config)
    kept[checkpoint.request] = model, _state(model, checkpoint)
    return model


def _state(model: PreTrainedModel, checkpoint: Checkpoint) -> object:
    """Return what changes when an LM is trained, extended, hooked, sharded, or its files are."""
    weights = [(n, p.shape, p.dtype, p._version) for n, p in model.named_parameters()]
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    files_read = [part.files for part in (checkpoint, checkpoint.adapter) if part]
    return weights, hooks, files_read


def read_model(checkpoint: Checkpoint, config: PreTrainedConfig) -> PreTrainedModel:
    """Read the weights, on the CPU; those of a GGUF file are dequantized to ``lm.dtype``.

    An adapter is merged into them.
    """
    from transformers import AutoModelForCausalLM, GgufConfig

    if checkpoint.adapter is not None:
        base = replace(checkpoint, adapter=None)
        if checkpoint.gguf_file is None and hasattr(config, "quantization_config"):
            raise LanguageModelError(
                f"the weights of {base} are quantized, so that no adapter can be merged into them. "
                "Pass the LM from before the quantization as lm.name_or_path."
            )
        try:
            return _merged(read_model(base, config), checkpoint.adapter)
        except RoundedAdapterError as error:
            _log.warning("%s: it is read in float32.", error)
            base = replace(base, request=replace(base.request, dtype="float32"))
            return _merged(read_model(base, config), checkpoint.adapter)
    options = checkpoint.options | {"dtype": checkpoint.request.dtype}
    if attention := checkpoint.request.attn_implementation:
        options["attn_implementation"] = attention
    hint = "Is it complete, and does this machine have what its config.json asks for?"
    if checkpoint.gguf_file is not None:
        hint = "The file may be cut short: compare its size, or download it again."
        options["quantization_config"] = GgufConfig(dequantize=True)
    with explained(checkpoint, "the weights", hint):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint.location,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    model, info = loaded
    checkpoint.require_unchanged()
    if other := sorted(info["mismatched_keys"]):
        key, stored, needed = other[0]
        hint = "correct config.json, or copy the checkpoint again"
        if checkpoint.gguf_file is not None:
            hint = "pass the Hugging Face checkpoint that the file was made from"
        if 0 in stored:
            hint = "DeepSpeed saved it without its shards: run its zero_to_fp32.py"
        raise LanguageModelError(
            f"{key} of {checkpoint} is {(*stored,)}, and by its config {(*needed,)} "
            f"({len(other)} such weights): {hint}."
        )
    if missing := sorted(info["missing_keys"]):
        last = missing[-1]
        prefixes = [k.removesuffix(last) for k in info["unexpected_keys"] if k.endswith(last)]
        hint = (
            f"Its config.json is for {type(model).__name__}: save the checkpoint again with that "
            "class, or correct the config (tie_word_embeddings, if the head is missing)."
        )
        if prefixes:
            hint = f"They have the prefix {prefixes[0]!r}: save the LM without its wrapper."
        if checkpoint.gguf_file is not None:
            hint = "Is it one part of a split file? Merge the parts with llama.cpp's gguf-split."
        raise LanguageModelError(
            f"the weights of {checkpoint} lack {listed(missing)}, which would be "
            f"initialized at random. {hint}"
        )
    _check_layers(checkpoint, model, info["unexpected_keys"])
    if checkpoint.gguf_file is not None:
        path = Path(checkpoint.location) / checkpoint.gguf_file
        check_tensors(model, path, info["unexpected_keys"])
        # The weights are plain now. With these attributes, peft and save_pretrained refuse them.
        model.hf_quantizer = None
        model.is_quantized = False
        model.config.__dict__.pop("quantization_config", None)
    return model


def _merged(model: PreTrainedModel, adapter: Checkpoint) -> PreTrainedModel:
    from lincorr_lightning.lm.adapter import merge_adapter

    weights = next(filter(None, (file_of(adapter, name) for name in _ADAPTER_WEIGHTS)), None)
    if weights is None:
        raise LanguageModelError(
            f"{adapter} lacks {_ADAPTER_WEIGHTS[0]}. Copy or download it again."
        )
    hint = (
        "Is it complete, and is the LM the one that it was trained on? Copy it again, or pass "
        "that LM as lm.name_or_path and the adapter as lm.adapter."
    )
    with explained(adapter, "the adapter", hint):
        merged: PreTrainedModel = merge_adapter(model, _adapter_settings(adapter), weights)
    adapter.require_unchanged()
    return merged


def _check_layers(checkpoint: Checkpoint, model: PreTrainedModel, unused: Iterable[str]) -> None:
    """Refuse weights of layers that the config omits: the LM would be another one."""
    from torch import nn

    # Layers for multi-token prediction follow the LM's own under the same name.
    n_further = getattr(model.config.get_text_config(), "num_nextn_predict_layers", 0) or 0
    stacks = {n: len(part) for n, part in model.named_modules() if isinstance(part, nn.ModuleList)}
    for key in sorted(unused):
        numbered = re.match(r"(.*?)\.(\d+)\.", key)
        if numbered is None:
            continue
        stack = numbered[1]
        number = int(numbered[2])
        sizes = [size for name, size in stacks.items() if f".{name}".endswith(f".{stack}")]
        if sizes and number >= sizes[0] + n_further:
            raise LanguageModelError(
                f"the weights of {checkpoint} have {key}, but its config.json has {sizes[0]} "
                "layers (num_hidden_layers). Correct it, or copy the checkpoint again."
            )
