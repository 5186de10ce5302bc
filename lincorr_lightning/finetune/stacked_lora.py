"""Many LoRA adapters on one frozen LM, trained side by side in one forward and one backward.

Each row of a forward pass belongs to one adapter, whose ``scaling * B_i A_i x`` is added to the
output of a target layer by batched matrix products (LoRA: Hu et al. 2021, section 4.1). Rows do not
interact in an LM, so an adapter's gradient is that of its own rows, and an elementwise optimizer
(SGD, Adam, AdamW) does to a stack of n adapters what n optimizers do to one each.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lincorr_lightning.errors import ConfigError, LanguageModelError, require
from lincorr_lightning.lm.finder import features_of, has_rows, target_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lincorr_lightning.finetune.adapters import AdapterSettings

_BASE = -1


class _Rows(NamedTuple):
    """The n rows of a forward pass: those that have an adapter, and the number of each of these."""

    n: int
    with_adapter: Tensor
    adapters: Tensor
    n_first: int  # n if the adapters 0 to n - 1 have as many rows each, in this order; else 0

    def select(self, factors: Tensor) -> Tensor:
        """Return the factors of each row that has an adapter, or of the `n_first`: no copies."""
        if self.n_first:  # a slice has the gradient of a whole, which would be filled with zeros
            return factors if self.n_first == len(factors) else factors[: self.n_first]
        return factors.index_select(0, self.adapters.to(factors.device))


class StackedLoRA(nn.Module):
    """Independent LoRA adapters, n of them, on one frozen causal LM, trained side by side.

    The LM is not a submodule of it, and keeps its modules, parameters and names: hooks on its
    layers do the work. Forward passes outside of `rows` are those of the LM itself.

    Sum the rows' losses before ``backward``: a mean would divide each adapter's gradient. An
    adapter without a row in a step has zero gradients, with which AdamW still decays its weights.

    The seed of the settings is left to `reset`.
    """

    def __init__(self, model: "PreTrainedModel", n: int, settings: "AdapterSettings") -> None:
        super().__init__()
        require("StackedLoRA.n", n, at_least=1)
        self.n = n
        self.scaling = settings.alpha / settings.rank
        layers = target_layers(model, settings.target_modules)
        self.targets = tuple(layers)  #: Full names of the layers that have adapters.
        # By layer, whose name has / for . here; A reads its input, and B adds to its output.
        self.lora_A = nn.ParameterDict()  #: ``(n, rank, n_inputs)``
        self.lora_B = nn.ParameterDict()  #: ``(n, n_outputs, rank)``, transposed for fast products
        for name, layer in layers.items():
            n_in, n_out = features_of(layer)
            dtype: Any = layer.weight.dtype  # as in peft: the layer's, but at least float32
            dtype = dtype if dtype.is_floating_point and dtype.itemsize >= 4 else torch.float32
            like = torch.empty(0, dtype=dtype, device=layer.weight.device)  # type: ignore[arg-type]
            self.lora_A[_key(name)] = nn.Parameter(like.new_empty(n, settings.rank, n_in))
            self.lora_B[_key(name)] = nn.Parameter(like.new_zeros(n, settings.rank, n_out).mT)
        self.reset(range(n))

        self._rows: _Rows | None = None
        self._length: int | None = None  # of the current forward pass, if its shape is known
        model.requires_grad_(False)
        # Methods, not closures, so that a copied or pickled module has working ones.
        self._hooks = [model.register_forward_pre_hook(self._check_forward, with_kwargs=True)]
        for name, layer in layers.items():
            hook = layer.register_forward_hook(partial(self._add_to, name), with_kwargs=True)
            self._hooks.append(hook)

    def remove(self) -> None:
        """Take the adapters off the LM, which is then as it was, with its weights frozen."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def reset(self, seeds: Sequence[int]) -> None:
        """Reinitialize as many adapters as there are seeds: A uniform as peft draws it, B zero.

        The initial weights of an adapter depend on its seed alone.
        """
        if len(seeds) > self.n:
            raise ConfigError(
                f"a batch has {len(seeds)} edits, but at most {self.n} are trained side by side. "
                "Make smaller batches, or raise model.edits_per_step."
            )
        for i, seed in enumerate(seeds):
            # Drawn on the CPU in float32, so that device and precision do not change the start.
            generator = torch.Generator().manual_seed(seed)
            for factors in self.lora_A.values():
                start = torch.empty(factors.shape[1:])
                nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator)
                factors[i] = start.to(factors)
        for factors in self.lora_B.values():
            factors[: len(seeds)] = 0

    @contextmanager
    def rows(self, which: Sequence[int] | Tensor) -> Iterator[None]:
        """Return a context in which row i of each forward pass uses adapter ``which[i]``.

        -1 is the LM itself, whose logits are then bitwise the same. `LanguageModel.logits_of_rows`
        sorts its rows; pass this context to it instead of entering it.
        """
        chosen = torch.as_tensor(which)
        unknown = chosen[(chosen < _BASE) | (chosen >= self.n)]
        if len(unknown):
            raise LanguageModelError(
                f"a row names adapter {unknown[0]}; there are 0 to {self.n - 1}, and -1 for none."
            )
        with_adapter = (chosen != _BASE).nonzero().flatten()
        adapters = chosen[with_adapter]
        device = next(self.parameters()).device
        n = int(adapters.max()) + 1 if len(adapters) else 0
        each = len(adapters) // max(n, 1)
        in_order = adapters.tolist() == [i for i in range(n) for _ in range(each)]
        n_first = n if in_order else 0
        rows = _Rows(len(chosen), with_adapter.to(device), adapters.to(device), n_first)
        outer, self._rows = self._rows, rows
        try:
            yield
        finally:
            self._rows = outer

    def _check_forward(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (rows := self._rows) is None:
            return
        parts = model.modules() if model.training and torch.is_grad_enabled() else ()
        if any(getattr(part, "gradient_checkpointing", False) for part in parts):
            raise LanguageModelError(
                "gradient checkpointing reruns layers after the context of the adapters has ended. "
                "Call gradient_checkpointing_disable() on the LM."
            )
        given = kwargs.get("input_ids", args[0] if args else None)
        if given is None:
            given = kwargs.get("inputs_embeds")
        self._length = None
        if isinstance(given, Tensor):
            if len(given) != rows.n:
                raise LanguageModelError(
                    f"the LM got {len(given)} rows, but rows() names the adapters of {rows.n}. "
                    "Name one adapter per row, and -1 for the LM itself."
                )
            self._length = given.shape[1]

    def _add_to(
        self,
        name: str,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Tensor,
    ) -> Tensor | None:
        rows = self._rows
        if rows is None or not len(rows.adapters):
            return None
        x: Tensor = args[0] if args else next(iter(kwargs.values()))
        if not has_rows(x, rows.n, self._length):
            raise LanguageModelError(
                f"{name} gets an input of shape {tuple(x.shape)} in a forward pass of "
                f"{rows.n} rows, so that its rows cannot be separated (as in a mixture of "
                "experts). Leave it out of the target modules."
            )
        down, up = (rows.select(factors[_key(name)]) for factors in (self.lora_A, self.lora_B))
        x = x.reshape(rows.n, -1, x.shape[-1])
        is_mixed = len(rows.adapters) < rows.n
        with_adapter = rows.with_adapter.to(x.device)  # an LM may be spread over several devices
        if is_mixed:
            x = x.index_select(0, with_adapter)
        # The rows of an adapter are one, so that its factors are read once.
        x = x.reshape(len(down), -1, x.shape[-1]).to(down.dtype)
        by_hand = output.dtype == x.dtype and not torch.is_autocast_enabled(x.device.type)
        if by_hand and not is_mixed:
            sums = output.reshape(len(down), -1, output.shape[-1])
            return _Sum.apply(sums, x, down, up, self.scaling).reshape(output.shape)  # type: ignore[no-untyped-call, no-any-return]
        added = torch.bmm(torch.bmm(x, down.mT) * self.scaling, up.mT)
        wide = output.reshape(rows.n, -1, output.shape[-1])
        wide = wide.to(torch.promote_types(output.dtype, added.dtype))
        # Not a sum with zeros: rows of the LM itself stay bitwise the same.
        added = added.to(wide.dtype).reshape(len(rows.adapters), -1, wide.shape[-1])
        wide = wide.index_add(0, with_adapter, added) if is_mixed else wide + added
        return wide.to(output.dtype).reshape(output.shape)


class _Sum(torch.autograd.Function):
    """A layer's output plus that of adapters, ``sums + scaling * x A^T B^T``, by adapter.

    The gradients of A and B are laid out as these are; with others, such as autograd's own of
    transposed factors, fused AdamW makes wrong updates on a CPU (torch 2.13).
    """

    @staticmethod
    def forward(ctx: Any, sums: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
        low = torch.bmm(x, a.mT).mul_(scaling)
        ctx.save_for_backward(x, a, b, low)
        ctx.scaling = scaling
        return torch.baddbmm(sums, low, b.mT)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, a, b, low) = gradients, ctx.saved_tensors
        of_low = torch.bmm(gradient, b).mul_(ctx.scaling)
        of_x = torch.bmm(of_low, a) if ctx.needs_input_grad[1] else None
        return gradient, of_x, torch.bmm(of_low.mT, x), torch.bmm(low.mT, gradient).mT, None


def _key(name: str) -> str:
    return name.replace(".", "/")
