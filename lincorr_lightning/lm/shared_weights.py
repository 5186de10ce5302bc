"""Reading the weights of an LM once for several studies of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from lincorr_lightning.lm.config import LMConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Shared(NamedTuple):
    key: tuple[Any, ...]
    model: PreTrainedModel
    state: object


_shared: ContextVar[list[_Shared] | None] = ContextVar("shared", default=None)


@contextmanager
def weights_read_once() -> Iterator[None]:
    """Return a context in which `LanguageModel.load` reads the weights of an LM once.

    The last LM stays in memory. It is read again after a training that changed its weights.
    """
    token = _shared.set([])
    try:
        yield
    finally:
        _shared.reset(token)


def shared_model(config: LMConfig, read: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Return the LM that is in memory already, if it is unchanged, or read it.

    Outside of `weights_read_once`, each call reads it.

    Args:
        config: What LM it is, and how its weights are read.
        read: Function that reads it.
    """
    kept = _shared.get()
    if kept is None:
        return read()
    key = (
        config.name_or_path, config.revision, config.dtype, config.attn_implementation,
        config.compile, config.trust_remote_code,
    )  # fmt: skip
    if kept and kept[0].key == key and kept[0].state == _state(kept[0].model):
        return kept[0].model
    kept.clear()  # before another one needs memory
    model = read()
    kept.append(_Shared(key, model, _state(model)))
    return model


def _state(model: PreTrainedModel) -> object:
    """Return what changes when weights are trained, or layers are added, hooked or sharded."""
    weights = [(n, p.shape, p.dtype, p._version) for n, p in model.named_parameters()]
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return weights, hooks
