"""Adapters of peft, merged in memory into the weights of the LM that they were trained on."""

import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lincorr_lightning.errors import LanguageModelError, RoundedAdapterError, one_line
from lincorr_lightning.lm.batching import oom_reason
from lincorr_lightning.lm.head import call_model, head_of, probe_tokens
from lincorr_lightning.lm.modes import HALF_PRECISIONS, dtype_name, float32_forward

_MAX_LISTED = 3
_MAX_LOST = 0.1  # of an adapter's effect on logits, by rounding of the merged weights
_ROUNDING = 1e-5  # of logits in float32
_TWICE = re.compile(r"\.(modules_to_save\.weight|token_adapter\.trainable_tokens_delta)")


def merge_adapter(model: Any, settings: dict[str, Any], file: Path) -> Any:
    """Merge an adapter into the weights of an LM, in place and in its dtype; return the LM.

    The `settings` are those of its ``adapter_config.json``. It is a plain LM afterwards, with as
    many tokens as an embedding that is saved in the `file` of the adapter's weights. Errors of
    peft, and those of reading, are left to the caller.

    Raises:
        RoundedAdapterError: The LM's dtype rounds away too much of the adapter.
        LanguageModelError: The adapter cannot be merged, or does not fit the LM's layers.
    """
    from peft import PeftConfig, PeftModel, set_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer
    from safetensors.torch import load_file

    config: Any = PeftConfig.from_peft_type(**settings)  # type: ignore[no-untyped-call]
    is_safe = file.suffix == ".safetensors"
    weights = load_file(file) if is_safe else torch.load(file, "cpu", weights_only=True)
    if broken := [key for key, weight in weights.items() if not weight.float().isfinite().all()]:
        raise LanguageModelError(
            f"{file} has NaN or infinite values in {broken[0]}. Pass an earlier checkpoint of it."
        )
    lacks = _resize(model, weights)
    base_logits = _logits(model)  # some adapters change the weights below them, too
    shared: Tensor = model.get_input_embeddings().weight
    # peft draws initial weights from torch's generator, and warns of shared embeddings.
    with torch.random.fork_rng([]), warnings.catch_warnings(action="ignore"):
        torch.manual_seed(0)
        wrapper = PeftModel(model, config).eval()
        try:
            read: Any = set_peft_model_state_dict(wrapper, weights)
            # With another vocabulary, peft saves twice what was trained.
            has = [key for key in read.unexpected_keys if not _is_twin(key, weights)]
            parameters = dict(wrapper.named_parameters(remove_duplicate=False))
            known = {id(p) for name, p in parameters.items() if name not in read.missing_keys}
            lacks += [
                name
                for name, p in parameters.items()
                if p.requires_grad and ".default" in name and id(p) not in known
            ]
        except KeyError as error:  # of peft, which looks for modules_to_save itself
            lacks = [*lacks, *error.args]
            has = []
        if lacks or has:
            keys = [key.replace(".default", "") for key in lacks or has]
            raise LanguageModelError(
                f"{file} {'lacks' if lacks else 'has'} {', '.join(keys[:_MAX_LISTED])}"
                f"{'' if lacks else ', for which the LM has no layer'} ({len(keys)} in all). Copy "
                "it again, or pass the LM that it was trained on as lm.name_or_path and the "
                "adapter as lm.adapter."
            )
        for layer in wrapper.modules():
            base: Any = layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else None
            if getattr(base, "weight", None) is shared:  # the adapter changes one of two
                base.weight = nn.Parameter(shared.detach().clone())
        try:
            expected = _logits(model)
            merged: Any = wrapper.merge_and_unload(safe_merge=True)  # type: ignore[operator]
        except Exception as error:  # peft has no word for adapters that are no change of weights
            if oom_reason(error):
                raise
            raise LanguageModelError(
                f"{file} is of the peft_type {config.peft_type.value}, which peft cannot merge "
                f"into the LM's weights with these settings ({one_line(error)}). Pass an adapter "
                "that changes weights alone, such as plain LoRA."
            ) from error
    effect = float((expected - base_logits).norm())
    lost = float((_logits(merged) - expected).norm())
    if lost > max(_MAX_LOST * effect, _ROUNDING * float(expected.norm())):
        if merged.dtype in HALF_PRECISIONS:
            raise RoundedAdapterError(
                f"{file} changes the LM so little that {dtype_name(merged.dtype)} rounds away "
                f"{lost / effect:.0%} of it"
            )
        raise LanguageModelError(
            f"{file} cannot be merged: the merged LM has other logits than the LM with the adapter "
            "unmerged, as with quantized weights or adapters of single tokens. Merge it with the "
            "library that trained it, and pass the merged LM."
        )
    return merged


def _is_twin(key: str, weights: dict[str, Tensor]) -> bool:
    weight = weights.get(key.replace(".default", ""), torch.empty(0))
    others = (w for w in weights.values() if w is not weight and _TWICE.search(key))
    return any(torch.equal(weight, other) for other in others)


def _resize(model: Any, weights: dict[str, Tensor]) -> list[str]:
    """Give an LM as many tokens as a saved embedding; return names of weights that are missing."""
    embedding = model.get_input_embeddings()
    head = head_of(model)
    names = {part: f"base_model.model.{name}.weight" for name, part in model.named_modules()}
    # As an adapted layer saves them.
    weights = {re.sub(r"(\.token_adapter)?\.base_layer", "", key): w for key, w in weights.items()}
    saved = weights.get(names[embedding])
    if saved is None or len(saved) == len(embedding.weight):
        return []
    is_tied = head is None or head.weight is embedding.weight
    model.resize_token_embeddings(len(saved), mean_resizing=False)
    return [] if is_tied or head is None or names[head] in weights else [names[head]]


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    """Return logits of weights as they are, ``(n_positions, n_tokens)``, computed in float32."""
    tokens = probe_tokens(model.config.get_text_config().vocab_size)
    with float32_forward(model):
        return call_model(model, tokens[None]).logits[0, :, tokens].double()
