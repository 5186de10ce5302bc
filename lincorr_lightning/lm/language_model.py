"""Any causal LM, asked for the logits of a few tokens after each of many prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lincorr_lightning.errors import LanguageModelError, NonFiniteError
from lincorr_lightning.lm.batching import MicroBatches
from lincorr_lightning.lm.config import TINY_WORLD, LMConfig
from lincorr_lightning.lm.encoding import PromptEncoder
from lincorr_lightning.lm.fingerprint import (
    fingerprint_config,
    fingerprint_tokenizer,
    fingerprint_weights,
)
from lincorr_lightning.lm.head import (
    LogitMethod,
    head_of,
    pad_right,
    read_hidden,
    read_logits,
    select_logit_method,
    to_device,
)
from lincorr_lightning.lm.loading import find_checkpoint, read_config, read_model, read_tokenizer
from lincorr_lightning.lm.modes import evaluating
from lincorr_lightning.lm.sharding import shard
from lincorr_lightning.lm.shared_prefixes import (
    Plan,
    logits_of_trees,
    plan_reading,
    prefix_sharing_error,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import (
        BatchEncoding,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )


class _NotLoadedError(LanguageModelError, AttributeError):
    """The weights are asked for before `LanguageModel.load`; an AttributeError for `hasattr`."""


class LanguageModel(nn.Module):
    """A causal LM that is asked for domain logits.

    Making one reads the tokenizer and the configuration only; `load` reads the weights, which stay
    where they are put: device and strategy are Lightning's business.

    Args:
        config: Which LM, and how it is read.

    Attributes:
        config: As given.
        tokenizer: The LM's tokenizer.
        model: The Hugging Face module, after `load`.
        reads_prompts: In words, how `joint_logits` read the prompts of an X; None before.

    Raises:
        LanguageModelError: There is no such LM, it is not causal, or it cannot be read.

    Example:
        >>> lm = LanguageModel.from_pretrained("tiny-world")
        >>> lm.domain_logits(["one prompt", "a second one"], token_ids=[5, 6, 7]).shape
        torch.Size([2, 3])
    """

    config: LMConfig
    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel

    def __init__(self, config: LMConfig | Mapping[str, Any]) -> None:
        super().__init__()
        self.config = config if isinstance(config, LMConfig) else LMConfig(**config)
        self._checkpoint = find_checkpoint(self.config)
        # The configuration first: of an encoder the tokenizer's errors would only mislead.
        model_config = read_config(self._checkpoint)
        self._prepare(read_tokenizer(self._checkpoint), model_config)

    def _prepare(self, tokenizer: PreTrainedTokenizerBase, model_config: PreTrainedConfig) -> None:
        self.tokenizer = tokenizer
        self._model_config = model_config
        text = model_config.get_text_config()
        self._vocab_size = int(text.vocab_size)
        longest = getattr(text, "max_position_embeddings", None)
        self._encoder = PromptEncoder(
            tokenizer,
            self._vocab_size,
            longest if isinstance(longest, int) and longest > 0 else None,
            self.config.add_bos,
        )
        self._readings: dict[type, LogitMethod] = {}
        self._why_not_shared: dict[type, str | None] = {}
        self.reads_prompts: str | None = None
        width = getattr(text, "hidden_size", None)
        self._batches = MicroBatches(self.config.tokens_per_forward, width)
        self._weights_print: tuple[object, str] | None = None

    @classmethod
    def from_pretrained(cls, name_or_path: str = TINY_WORLD, **options: Any) -> LanguageModel:
        """Make and load an LM.

        Args:
            name_or_path: A folder, a hub id, or ``tiny-world``.
            **options: Other fields of `LMConfig`.

        Raises:
            LanguageModelError: There is no such LM, it is not causal, or it cannot be read.
        """
        return cls(LMConfig(name_or_path=name_or_path, **options)).load()

    @classmethod
    def from_module(
        cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **options: Any
    ) -> LanguageModel:
        """Ask an LM that is in memory, such as one in training, without changing it.

        Args:
            model: The Hugging Face module; it is neither copied, frozen nor moved.
            tokenizer: Its tokenizer.
            **options: Fields of `LMConfig` that concern asking: `add_bos`, `tokens_per_forward`,
                `share_prefixes`.
        """
        lm = cls.__new__(cls)
        nn.Module.__init__(lm)
        name = model.name_or_path or type(model).__name__
        lm.config = LMConfig(**{"name_or_path": name, "dtype": "auto"} | options)
        lm._prepare(tokenizer, model.config)
        lm.model = model
        return lm

    def __getattr__(self, name: str) -> Any:
        if name == "model" and "model" not in self._modules:
            raise _NotLoadedError(
                f"the weights of the LM {self.config.name_or_path} are not loaded yet. Call load()."
            )
        return super().__getattr__(name)

    @property
    def is_loaded(self) -> bool:
        """Whether the weights are in memory."""
        return "model" in self._modules

    def load(self) -> LanguageModel:
        """Read the weights, frozen and in eval mode; does nothing when they are there.

        Raises:
            LanguageModelError: The weights are missing, incomplete or damaged.
        """
        if not self.is_loaded:
            model = read_model(self._checkpoint, self._model_config)
            model.requires_grad_(False)
            model.eval()  # type: ignore[no-untyped-call]
            if self.config.compile:
                # The backbone alone: the head is stood in for anew at each forward.
                model.base_model.compile(dynamic=True)
            self.model = model
        return self

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds a piece of it."""
        return self._batches.lock_step is not None

    def shard(self, mesh: DeviceMesh) -> None:
        """Split the weights over processes, all of which must then ask at the same times.

        Args:
            mesh: The processes, in one dimension, or in ``data_parallel`` and
                ``tensor_parallel``; those of the latter share each product.

        Raises:
            LanguageModelError: The LM does not say what its layers are, or how its matrices can be
                split.
        """
        whole = self.fingerprint["weights"]
        self._batches.lock_step = shard(self.model, mesh)
        # Afterwards it would take all processes to tell.
        self._weights_print = self._weights_state(), whole

    def _weights_state(self) -> object:
        return tuple((p.data_ptr(), p._version) for p in self.model.parameters())

    @property
    def prefix(self) -> list[int]:
        """Ids of the special tokens that a prompt begins with, such as BOS."""
        return list(self._encoder.prefix)

    @property
    def max_length(self) -> int | None:
        """Most tokens that the LM has positions for; None: no limit is known."""
        return self._encoder.max_length

    def in_batches(
        self, lengths: Sequence[int], ask: Callable[[list[int]], None], alike: bool = False
    ) -> None:
        """Call `ask` with the indices of rows, as many at a time as fit the memory.

        Args:
            lengths: Tokens of each row.
            ask: Deals with one batch in one forward; it is called again with a part of it if memory
                ran out.
            alike: Whether rows of a batch must be of one length, so that nothing is padded.

        Raises:
            LanguageModelError: Not even one row fits, or ``lm.tokens_per_forward`` is too large.
        """
        self._batches.run(lengths, self.model.device.type, ask, alike)

    # -- asking ------------------------------------------------------------------------------

    def encode(self, prompts: Sequence[str]) -> BatchEncoding:
        """Encode prompts as `domain_logits` does.

        Returns:
            ``input_ids`` and ``attention_mask``, ``(n_prompts, longest)``, padded on the right.

        Raises:
            SubjectsError: A prompt without tokens, or longer than the LM can read.
            LanguageModelError: A token that the LM has no embedding for.
        """
        return self._encoder.encode(prompts)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_ids: Tensor) -> Tensor:
        """Logits of some tokens after each row, in one forward; differentiable.

        Args:
            input_ids: Token ids, padded on either side, ``(n_rows, length)``.
            attention_mask: 1 at true tokens, same shape.
            token_ids: The tokens to read, ``(n_labels,)``.

        Returns:
            ``(n_rows, n_labels)``, float64. Head rows are multiplied in float64.
        """
        input_ids, mask, last = pad_right(input_ids, attention_mask)
        return read_logits(self.model, input_ids, mask, last, token_ids, self._reading())

    def last_hidden(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """What the LM's head is given after each row, in one forward; differentiable.

        Args:
            input_ids: Token ids, padded on either side, ``(n_rows, length)``.
            attention_mask: 1 at true tokens, same shape.

        Returns:
            ``(n_rows, hidden_size)``, in the LM's dtype.
        """
        return read_hidden(self.model, *pad_right(input_ids, attention_mask))

    def domain_logits(self, prompts: Sequence[str], token_ids: Sequence[int] | Tensor) -> Tensor:
        """Logits of some tokens after each prompt.

        The LM is asked in eval mode and its own precision, whatever mode and autocast it is in;
        both are as before afterwards.

        Args:
            prompts: The prompts, of any lengths.
            token_ids: The tokens to read; those of several domains may stand one after another.

        Returns:
            ``(n_prompts, n_labels)``, float64, on the LM's device, in the order of `prompts`.

        Raises:
            NonFiniteError: The LM answers a prompt with NaN or infinite logits.
            SubjectsError: A prompt without tokens, or longer than the LM can read.
            LanguageModelError: A token that the LM does not have, or too little memory.
        """
        return self.logits_of_rows(self.rows(prompts), token_ids)

    def rows(self, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids of each prompt, for `logits_of_rows`, which may be asked again and again.

        Raises:
            SubjectsError: A prompt without tokens, or longer than the LM can read.
            LanguageModelError: A token that the LM has no embedding for.
        """
        return self._encoder.rows(prompts)

    def pad(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Lay token ids side by side for a forward of one's own.

        Args:
            rows: Token ids of each prompt, as `rows` gives them.

        Returns:
            Token ids padded on the right and attention mask, ``(n_rows, longest)``, on the LM's
            device.
        """
        ids, mask = self._encoder.pad(rows)
        return ids.to(self.model.device), mask.to(self.model.device)

    @torch.no_grad()
    def logits_of_rows(
        self,
        rows: Sequence[Sequence[int]],
        token_ids: Sequence[int] | Tensor,
        around: Callable[[list[int]], AbstractContextManager[object]] | None = None,
    ) -> Tensor:
        """Do what `domain_logits` does, for prompts that are token ids already.

        Args:
            rows: Token ids of each prompt, of any lengths, as `rows` gives them.
            token_ids: The tokens to read.
            around: Makes a context to run each forward in, from the indices of the rows that are
                in it; an LM that answers each row in another state needs it.
        """
        device = self.model.device
        tokens = to_device(self._checked(token_ids), device)
        logits = torch.empty(len(rows), len(tokens), dtype=torch.float64, device=device)

        def ask(batch: list[int]) -> None:
            ids, _ = self._encoder.pad([rows[i] for i in batch])
            last = to_device(torch.tensor([len(rows[i]) - 1 for i in batch]), device)
            reading = self._reading()
            with around(batch) if around is not None else nullcontext():
                part = read_logits(self.model, to_device(ids, device), None, last, tokens, reading)
            logits[to_device(torch.tensor(batch), device)] = part.to(device)

        with evaluating(self.model), torch.autocast(device.type, enabled=False):
            self.in_batches([len(row) for row in rows], ask)
        finite = logits.isfinite().all(dim=1)
        if not finite.all():
            index = int((~finite).nonzero()[0])
            prompt = self.tokenizer.decode(list(rows[index][len(self._encoder.prefix) :]))
            raise NonFiniteError(
                f"the LM {self.config.name_or_path} answers prompt {index} ({prompt!r}) with NaN "
                f"or infinite logits in {self.model.dtype}. If they come from float16, set "
                "lm.dtype to bfloat16 or float32; else its weights are broken."
            )
        return logits

    @torch.no_grad()
    def joint_logits(
        self,
        prompts: Sequence[Sequence[str]],
        token_ids: Sequence[Sequence[int] | Tensor],
    ) -> Tensor:
        """Logits of several domains side by side, each after its own prompt about each X.

        What `domain_logits` gives for one domain after the other; what the prompts about one X
        begin with is read once, if `LMConfig.share_prefixes` allows.

        Args:
            prompts: Of each domain, one about each X, in one order of the X's.
            token_ids: The tokens of each domain.

        Returns:
            ``(n_subjects, n_labels of all domains)``, float64, on the LM's device.

        Raises:
            NonFiniteError: The LM answers a prompt with NaN or infinite logits.
            SubjectsError: A prompt without tokens, or longer than the LM can read.
            LanguageModelError: A token that the LM does not have, too little memory, or
                prefixes that must be shared and cannot.
        """
        flat = self.rows(list(chain.from_iterable(prompts)))
        n_subjects = len(prompts[0])
        rows = [flat[domain * n_subjects :][:n_subjects] for domain in range(len(prompts))]
        lock_step = self._batches.lock_step
        if lock_step is not None and self.config.share_prefixes is not False:
            self._why_not()  # all try at the same time
        plan = plan_reading(
            self.model, rows, self.config.share_prefixes, self._batches.fixed, self._why_not
        )
        if lock_step is not None and lock_step.any(not plan.trees):
            plan = Plan([], plan.why if not plan.trees else "one by one, as another process must")
        self.reads_prompts = plan.why
        if plan.trees:
            device = self.model.device
            tokens = [to_device(self._checked(ids), device) for ids in token_ids]
            with evaluating(self.model), torch.autocast(device.type, enabled=False):
                logits = logits_of_trees(
                    self.model, plan.trees, n_subjects, tokens, self._batches, self._encoder.pad_id
                )
            finite = bool(logits.isfinite().all())
            if finite if lock_step is None else not lock_step.any(not finite):
                return logits
            # A masked NaN is NaN still, and spreads through a tree: ask which prompt it comes from.
        asked = zip(rows, token_ids, strict=True)
        return torch.cat([self.logits_of_rows(*domain) for domain in asked], dim=1)

    def _checked(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        tokens = torch.as_tensor(token_ids, dtype=torch.long)
        unknown = tokens[(tokens < 0) | (tokens >= self._vocab_size)]
        if tokens.dim() != 1 or len(unknown):
            what = f"the token id {int(unknown[0])}" if len(unknown) else "a nested list of tokens"
            raise LanguageModelError(
                f"the LM {self.config.name_or_path} was asked for {what}; it has the tokens 0 to "
                f"{self._vocab_size - 1}. Build the domain with this LM's tokenizer."
            )
        return tokens

    def _reading(self) -> LogitMethod:
        """How this LM's logits can be got; tried once for each kind of head it is given."""
        kind: type = type(head_of(self.model))
        if kind not in self._readings:
            probe = self._encoder.probe()
            device = self.model.device.type
            with torch.no_grad(), evaluating(self.model), torch.autocast(device, enabled=False):
                self._readings[kind] = select_logit_method(self.model, probe, self._vocab_size)
        return self._readings[kind]

    def _why_not(self) -> str | None:
        """Why prompts cannot share what they begin with; None: they can. Tried as `_reading` is."""
        kind: type = type(head_of(self.model))
        if kind not in self._why_not_shared:
            reading, device = self._reading(), self.model.device.type
            with torch.no_grad(), evaluating(self.model), torch.autocast(device, enabled=False):
                self._why_not_shared[kind] = prefix_sharing_error(
                    self.model, reading, self._encoder.probe(), self._vocab_size
                )
        return self._why_not_shared[kind]

    # -- identity ----------------------------------------------------------------------------

    @property
    def info(self) -> dict[str, Any]:
        """Name or path, dtype, fingerprint and number of parameters, as ``results.json`` has them."""
        fingerprint = self.fingerprint
        return {
            "name_or_path": self.config.name_or_path,
            "dtype": fingerprint["dtype"],
            "fingerprint": fingerprint,
            "n_parameters": self.model.num_parameters(),
        }

    @property
    def fingerprint(self) -> dict[str, str]:
        """Hashes that tell whether another LM is this one.

        Of the tokenizer (vocabulary, and how it splits some texts), of the configuration (shape
        and architecture), of the precision, and of the weights: exact sums over all their bits, so
        that one changed bit shows. Reads the weights once, at memory speed; a frozen LM's are kept.

        Returns:
            ``tokenizer``, ``config``, ``dtype`` and ``weights``.
        """
        parameters = list(self.model.parameters())
        state = self._weights_state()
        is_frozen = not any(p.requires_grad for p in parameters)
        known = self._weights_print
        # In pieces, weights lie elsewhere after a forward, and one process cannot tell by itself.
        if known is None or not is_frozen or not (self.is_sharded or known[0] == state):
            known = self._weights_print = (state, fingerprint_weights(self.model))
        return {
            "tokenizer": fingerprint_tokenizer(self.tokenizer, self._encoder.prefix),
            "config": fingerprint_config(self.model.config),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "weights": known[1],
        }
