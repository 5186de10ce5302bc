"""Adapters of peft, merged in memory into the weights of the LM that they were trained on."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.io import read_json
from lincorr_lightning.lm.head import are_same, call_model, head_of, probe_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Of LoRA: they repeat layers, depend on tokens of the prompt, and import a library by its name.
_UNMERGEABLE = "layer_replication", "alora_invocation_tokens", "megatron_config"
_MAX_LISTED = 3


def merge_adapter(model: PreTrainedModel, config_file: Path, file: Path) -> PreTrainedModel:
    """Merge an adapter into the weights of an LM, in place, in its dtype; return the LM.

    It is a plain LM of transformers afterwards, with as many tokens as an embedding that is saved
    with the adapter.

    Args:
        model: The LM that the adapter was trained on.
        config_file: The adapter's adapter_config.json.
        file: The adapter's weights, as safetensors or torch's ``.bin``.

    Raises:
        LanguageModelError: The adapter cannot be merged, or does not fit the LM. Of peft's errors,
            and those of reading the files, the caller says what to do.
    """
    from peft import PeftModel, set_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer
    from safetensors.torch import load_file

    config = _read_config(config_file)
    if getattr(model, "is_quantized", False):
        raise LanguageModelError(
            f"{file} cannot be merged into quantized weights, which would be rounded again. Pass "
            "the LM that was quantized as lm.name_or_path, and the adapter as lm.adapter."
        )
    is_safe = file.suffix == ".safetensors"
    weights = load_file(file) if is_safe else torch.load(file, "cpu", weights_only=True)
    lacks = _resize(model, weights)
    shared: Tensor = _embedding(model).weight
    # peft draws initial weights from torch's generator, and warns of shared embeddings.
    with torch.random.fork_rng([]), warnings.catch_warnings(action="ignore"):
        torch.manual_seed(0)
        wrapper = PeftModel(model, config).eval()
        for layer in wrapper.modules():
            base: Any = layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else None
            if getattr(base, "weight", None) is shared:  # the adapter changes one of two
                base.weight = nn.Parameter(shared.detach().clone())
        try:
            read: Any = set_peft_model_state_dict(wrapper, weights)
            lacks, has = [*lacks, *_left_random(wrapper, read.missing_keys)], read.unexpected_keys
        except KeyError as error:  # of peft, which looks for modules_to_save itself
            lacks, has = [*lacks, *error.args], []
        if lacks or has:
            keys = [key.replace(".default", "") for key in lacks or has]
            raise LanguageModelError(
                f"{file} {'lacks' if lacks else 'has'} {', '.join(keys[:_MAX_LISTED])}"
                f"{'' if lacks else ', for which the LM has no layer'} ({len(keys)} in all). Copy "
                "it again, or pass the LM that it was trained on as lm.name_or_path and the "
                "adapter as lm.adapter."
            )
        before = _logits(model)
        merged: Any = wrapper.merge_and_unload(safe_merge=True)  # type: ignore[operator]
    if not are_same(_logits(merged), before, merged.dtype):
        raise LanguageModelError(
            f"{file} cannot be merged: the merged LM has other logits than the LM with the adapter "
            "beside it. Merge it in its own way, save the merged LM and pass its folder."
        )
    return merged  # type: ignore[no-any-return]


def _read_config(path: Path) -> Any:
    """Read adapter_config.json, and refuse what cannot be merged."""
    from peft import PeftConfig
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    settings = read_json(path, LanguageModelError, "Copy the adapter again.")
    settings.pop("runtime_config", None)
    kind: Any = settings.get("peft_type")
    more = [key for key in _UNMERGEABLE if settings.get(key)]
    if more or not hasattr(PEFT_TYPE_TO_TUNER_MAPPING.get(kind), "merge_and_unload"):
        raise LanguageModelError(
            f"{path} has the peft_type {' with '.join([str(kind), *more])}, which the installed "
            "peft cannot merge into an LM's weights. Pass an adapter of another type, such as LORA."
        )
    # Frozen parameters are not told from those that are missing.
    config: Any = PeftConfig.from_peft_type(  # type: ignore[no-untyped-call]
        **settings | {"inference_mode": False}
    )
    return config


def _left_random(wrapper: nn.Module, missing: list[str]) -> list[str]:
    """Return the names of an adapter's parameters that were not read, not even by another name."""
    own = dict(wrapper.named_parameters(remove_duplicate=False))
    read = {id(parameter) for name, parameter in own.items() if name not in missing}
    return [n for n, p in own.items() if p.requires_grad and ".default" in n and id(p) not in read]


def _embedding(model: PreTrainedModel) -> Any:
    return model.get_input_embeddings()  # type: ignore[no-untyped-call]


def _resize(model: PreTrainedModel, weights: dict[str, Tensor]) -> list[str]:
    """Give an LM as many tokens as the embedding has that is saved with an adapter, if one is.

    Returns:
        Names of weights that are missing then.
    """
    embedding, head = _embedding(model), head_of(model)
    names = {part: f"base_model.model.{name}.weight" for name, part in model.named_modules()}
    saved = weights.get(names[embedding])
    if saved is None or len(saved) == len(embedding.weight):
        return []
    is_tied = head is None or head.weight is embedding.weight
    model.resize_token_embeddings(len(saved), mean_resizing=False)
    return [] if is_tied or head is None or names[head] in weights else [names[head]]


@torch.no_grad()
def _logits(model: PreTrainedModel) -> Tensor:
    """Return logits that show whether an LM has changed, ``(n_positions, n_tokens)``."""
    tokens = probe_tokens(model.config.get_text_config().vocab_size)
    logits: Tensor = call_model(model, tokens[None]).logits[0, :, tokens].double()
    return logits
