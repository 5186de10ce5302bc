"""A causal LM that returns the logits of a few tokens after each of many prompts."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn

from lincorr_lightning.errors import ConfigError, LanguageModelError, NonFiniteError
from lincorr_lightning.lm import file_changes, loading, modes, shared_prefixes
from lincorr_lightning.lm import fingerprint as prints
from lincorr_lightning.lm import head as heads
from lincorr_lightning.lm.batching import MicroBatches, RowsContext
from lincorr_lightning.lm.config import TINY_WORLD, LMConfig
from lincorr_lightning.lm.encoding import PromptEncoder, chat_lead_in
from lincorr_lightning.lm.finder import causal_lm_of
from lincorr_lightning.lm.head import VocabularyRows
from lincorr_lightning.lm.loading import Checkpoint
from lincorr_lightning.lm.nearest_words import NearestWords
from lincorr_lightning.lm.sharding import shard, splits_matrices
from lincorr_lightning.lm.shared_prefixes import PromptTree, grow_trees
from lincorr_lightning.lm.state_cache import StateCache
from lincorr_lightning.lm.stored_rows import stored_head

if TYPE_CHECKING:
    import transformers as hf
    from torch.distributed.device_mesh import DeviceMesh

AnyLM = str | Path | LMConfig | Mapping[str, Any] | nn.Module
"""An LM by its name or settings, as a `LanguageModel`, or any module that holds one."""
P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger(__name__)

# The number of positions, as configurations of different types name it.
_POSITIONS = ("max_position_embeddings", "max_target_positions", "max_seq_len")
_LEAST_POSITIONS = 3
_LONGEST_TRIED = 512  # tokens


class _Support(NamedTuple):
    """How an LM can be read."""

    by_rows: bool  # rows of its head alone
    sharing_error: str | None  # why prefixes cannot be shared
    skips_head: bool  # its head may stay in half precision where the rest computes in float32
    is_product: bool  # logits are the product of states and rows of the head, and nothing more


def _locked(method: Callable[P, T]) -> Callable[P, T]:
    """Let one thread at a time run a method of a loaded LM."""

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        lm: Any = args[0]
        with modes.lock_of(lm.model):
            return method(*args, **kwargs)

    return run


class LanguageModel(nn.Module):
    """A causal LM and its tokenizer, with methods that return domain logits.

    The constructor reads the tokenizer and the configuration only; `load` reads the weights. Device
    and strategy are left to Lightning. The text `prefix` stands before each prompt, or is the
    user's turn with `LMConfig.chat_template`.

    Example:
        >>> lm = LanguageModel.from_pretrained("tiny-world")
        >>> lm.domain_logits(["one prompt", "a second one"], token_ids=[5, 6, 7]).shape
        torch.Size([2, 3])
    """

    config: LMConfig
    tokenizer: hf.PreTrainedTokenizerBase
    model: hf.PreTrainedModel  #: The Hugging Face module, after `load`.
    checkpoint: Checkpoint | None = None  # where it is stored; None of one that was in memory
    reads_prompts: str | None = None  #: How prompts of one subject were read last, in words.

    def __init__(self, config: LMConfig | Mapping[str, Any], prefix: str = "") -> None:
        super().__init__()
        self.config = config if isinstance(config, LMConfig) else LMConfig(**config)
        self.checkpoint = checkpoint = loading.find_checkpoint(self.config)
        # The configuration first: for an encoder, errors about the tokenizer would mislead.
        model_config = loading.read_config(checkpoint)
        self._prepare(loading.read_tokenizer(checkpoint), model_config, prefix)

    def _prepare(
        self, tokenizer: hf.PreTrainedTokenizerBase, model_config: hf.PreTrainedConfig, prefix: str
    ) -> None:
        self.tokenizer = tokenizer
        self.prompt_prefix = prefix
        is_chat = self.config.chat_template
        #: Text before each prompt: the prefix, or the chat up to the assistant's turn.
        self.lead_in = chat_lead_in(tokenizer, prefix) if is_chat else prefix or ""
        self._model_config = model_config
        text = model_config.get_text_config()
        self.vocab_size = int(text.vocab_size)
        limits = (getattr(text, name, None) for name in _POSITIONS)
        longest = next((n for n in limits if isinstance(n, int) and n > 0), None)
        if longest is not None and longest < _LEAST_POSITIONS:
            raise LanguageModelError(
                f"{self.config.name_or_path} has positions for {longest} tokens by its config.json "
                f"({', '.join(_POSITIONS)}), too few for a prompt. Correct it, or pass another LM."
            )
        self._encoder = PromptEncoder(
            tokenizer, self.vocab_size, longest, self.config.add_bos, self.lead_in, is_chat
        )
        self._tested: dict[tuple[type, bool], _Support] = {}
        width = getattr(text, "hidden_size", None)
        uniform_from = shared_prefixes.length_of_other_positions(text)
        self._batches = MicroBatches(self.config.tokens_per_forward, width, uniform_from)
        self._whole_print: str | None = None
        self._last_print: str | None = None
        self.state_cache: StateCache | None = None
        if self.config.state_cache is not None:
            self.state_cache = StateCache(self.config.state_cache, self.config.state_cache_gib)

    @classmethod
    def from_pretrained(cls, name_or_path: str = TINY_WORLD, **options: Any) -> LanguageModel:
        """Load an LM, frozen and in eval mode; the `options` are other fields of `LMConfig`."""
        return cls(LMConfig(name_or_path=name_or_path, **options)).load()

    @classmethod
    def from_module(
        cls,
        model: hf.PreTrainedModel,
        tokenizer: hf.PreTrainedTokenizerBase,
        prefix: str = "",
        **options: Any,
    ) -> LanguageModel:
        """Wrap an LM that is in memory, such as one in training; it is not copied or changed.

        `options` are fields of `LMConfig` for reading: `add_bos`, `chat_template`,
        `tokens_per_forward`, `share_prefixes`.
        """
        lm = cls.__new__(cls)
        nn.Module.__init__(lm)
        name = model.name_or_path or type(model).__name__
        lm.config = LMConfig(**{"name_or_path": name, "dtype": "auto"} | options)
        lm._prepare(tokenizer, model.config, prefix)
        lm._set_model(model)
        return lm

    @classmethod
    def of(
        cls, lm: AnyLM, tokenizer: hf.PreTrainedTokenizerBase | None = None, prefix: str = ""
    ) -> LanguageModel:
        """Return an LM by name or settings, or one in memory, with its tokenizer: `from_module`."""
        if isinstance(lm, LanguageModel):
            if prefix not in ("", lm.prompt_prefix):
                raise ConfigError("the prefix is for LMs by name. Give it to the LanguageModel.")
            return lm
        if not isinstance(lm, nn.Module):
            if tokenizer is not None or not isinstance(lm, (str, Path, LMConfig, Mapping)):
                raise LanguageModelError(
                    f"lm is {lm!r:.80}. Pass a name or folder alone, a LanguageModel, or a "
                    "transformers model in memory with its tokenizer."
                )
            return cls(LMConfig(str(lm)) if isinstance(lm, (str, Path)) else lm, prefix)
        model = causal_lm_of(lm)
        if tokenizer is None:
            raise LanguageModelError(
                f"{type(model).__name__} is in memory, without a tokenizer. Pass tokenizer=..., "
                "such as AutoTokenizer.from_pretrained(FOLDER)."
            )
        where = LMConfig(model.name_or_path or ".")
        stored = (Path(where.name_or_path) / "tokenizer_config.json").is_file()
        checkpoint = loading.find_checkpoint(where) if stored else None
        loading.check_tokenizer(tokenizer, model.config, checkpoint)
        return cls.from_module(model, tokenizer, prefix)

    @property
    def location(self) -> str:
        """Folder or hub id of the LM; of an adapter, of its base."""
        return self.checkpoint.location if self.checkpoint else self.config.name_or_path

    @property
    def is_loaded(self) -> bool:
        """Whether the weights are in memory."""
        return "model" in self._modules

    def load(self) -> LanguageModel:
        """Load the weights, frozen and in eval mode, unless they are loaded; return this object."""
        if not self.is_loaded:
            assert self.checkpoint is not None
            if self.state_cache is not None:  # before hours of reading
                self.state_cache.prepare()
            model = loading.load_model(self.checkpoint, self._model_config)
            model.requires_grad_(False)
            model.eval()  # type: ignore[no-untyped-call]
            if self.config.compile:
                # The backbone alone: the forward of the head is patched in each forward pass.
                model.base_model.compile(dynamic=True)
            self._set_model(model)
        return self

    def _set_model(self, model: hf.PreTrainedModel) -> None:
        self.model = model
        self._files = file_changes.mapped_files(model)
        if self._files:  # to tell a file that was touched from one that was changed
            self._last_print = prints.fingerprint_weights(model)
        # An adapter may have resized the vocabulary.
        self.vocab_size = self._encoder.vocab_size = model.config.get_text_config().vocab_size
        # RoBERTa-like LMs count positions from the one after padding.
        for name, part in model.named_modules():
            is_table = isinstance(part, nn.Embedding) and "position" in name
            if is_table and part.padding_idx is not None:
                self._encoder.max_length = part.num_embeddings - part.padding_idx - 1

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights; before they are loaded, that of the config."""
        if self.is_loaded:
            return self.model.dtype
        if self.config.dtype == "auto":
            return cast(torch.dtype, self._model_config.dtype or torch.float32)
        return getattr(torch, self.config.dtype)

    @property
    def is_sharded(self) -> bool:
        """Whether the LM is sharded over ranks."""
        return self._batches.shared_on is not None

    @property
    def can_widen(self) -> bool:
        """Whether frozen half-precision weights can compute in float32; not sharded or compiled."""
        return not (self.is_sharded or self.config.compile)

    @property
    def _may_widen(self) -> bool:
        return self.can_widen and not modes.trained_in_half_precision(self.model)

    def any_rank(self, condition: bool) -> bool:
        """Return whether a condition holds on any of the ranks that share the LM."""
        return bool(self._batches.max_over_ranks(condition))

    def shard(self, mesh: DeviceMesh | None) -> None:
        """Shard the weights over ranks, all of which must then take part in every forward pass.

        Does nothing without a mesh, or if they are sharded.
        """
        if mesh is None or self.is_sharded:
            return
        if self.config.compile and splits_matrices(mesh):
            raise ConfigError("tensor parallelism goes without model.lm.compile. Set it to false.")
        self._whole_print = prints.fingerprint_weights(self.model)  # later it would need all ranks
        shard(self.model, mesh)
        self._batches.shared_on = mesh.device_type

    @property
    def prefix(self) -> list[int]:
        """Ids of the special tokens before each text, such as BOS."""
        return list(self._encoder.prefix)

    @property
    def max_length(self) -> int | None:
        """Number of positions of the LM; None if no limit is known."""
        return self._encoder.max_length

    def in_batches(
        self,
        lengths: Sequence[int],
        forward: Callable[[list[int]], None],
        equal_lengths: bool = False,
    ) -> None:
        """Call `forward` with the indices of rows, as many at a time as fit the memory.

        It is called again with a part of the batch if memory ran out. `lengths` are the tokens of
        each row; with `equal_lengths`, those of a batch are the same, so that nothing is padded.
        """
        self._batches.run(lengths, self.model.device.type, forward, equal_lengths)

    # -- logits ------------------------------------------------------------------------------

    def encode(self, prompts: Sequence[str]) -> hf.BatchEncoding:
        """Return ``input_ids`` and ``attention_mask``, ``(n_prompts, longest)``, padded right."""
        from transformers import BatchEncoding

        ids, mask = self._encoder.pad(self.rows(prompts))
        return BatchEncoding({"input_ids": ids, "attention_mask": mask})

    def rows(self, prompts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of prompts, for `logits_of_rows`."""
        return self._encoder.rows(prompts)

    def pad(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return token ids, padded on the right, and mask, ``(n_rows, longest)``, on the device."""
        ids, mask = self._encoder.pad(rows)
        return ids.to(self.model.device), mask.to(self.model.device)

    def domain_logits(self, prompts: Sequence[str], token_ids: Sequence[int] | Tensor) -> Tensor:
        """Return the logits of some tokens after each prompt.

        The LM runs in eval mode and its own dtype, whatever its mode and the active autocast; both
        are restored. The logits are ``(n_prompts, n_labels)``, float64, on the LM's device.

        Raises:
            NonFiniteError: The logits after a prompt are NaN or infinite.
            SubjectsError: A prompt has no tokens, or more than the LM has positions for.
            LanguageModelError: The LM does not have a token, or memory ran out.
        """
        return self.logits_of_rows(self.rows(prompts), token_ids)

    @_locked
    @torch.no_grad()
    def logits_of_rows(
        self,
        rows: Sequence[Sequence[int]],
        token_ids: Sequence[int] | Tensor,
        context: RowsContext | None = None,
    ) -> Tensor:
        """Return the logits of some tokens after each prompt, like `domain_logits`, from token ids.

        `rows` are those that the method `rows` returns; a forward pass runs in the `context` of its
        rows, such as that of their adapters.
        """
        return self._logits(rows, [range(len(rows))], [token_ids], (), context)

    def _require_finite(self, logits: Tensor, rows: Sequence[Sequence[int]]) -> None:
        finite = logits.isfinite().all(dim=1)
        if not finite.all():
            index = int((~finite).nonzero()[0])
            prompt = self.tokenizer.decode(list(rows[index][len(self._encoder.prefix) :]))
            raise NonFiniteError(
                f"the LM {self.config.name_or_path} gives NaN or infinite logits after prompt "
                f"{index} ({prompt!r}) in {modes.dtype_name(self.model.dtype)}. With float16, set "
                "lm.dtype to bfloat16 or float32; otherwise its weights are broken."
            )

    @_locked
    def logits_of_groups(
        self,
        rows: Sequence[Sequence[int]],
        token_ids: Sequence[int] | Tensor,
        groups: Sequence[Hashable],
        context: RowsContext | None = None,
    ) -> Tensor:
        """Return `logits_of_rows` in float32, with the common prefix of a group computed once.

        Prefixes are shared if `LMConfig.share_prefixes` allows, in LMs of float32 on one device.
        `groups` has the group of each row, such as its subject and adapter; all rows of a group are
        read in one context. An LM in half precision computes in float32, unless it is sharded or
        compiled, or its half-precision weights are trained.
        """
        members: dict[Hashable, list[int]] = {}
        for index, group in enumerate(groups):
            members.setdefault(group, []).append(index)
        can = self._test()
        shares = self.model.dtype == torch.float32 and not self.is_sharded
        skipped = heads.head_of(self.model) if can.skips_head else None
        with modes.float32_forward(self.model, skipped) if self._may_widen else nullcontext():
            shared = members.values() if shares else ()
            return self._logits(rows, [range(len(rows))], [token_ids], shared, context)

    def head_rows(self) -> VocabularyRows | None:
        """Return the rows of the output head; of an LM that is not loaded, as they are stored.

        They are None for a head that multiplies by more than its weight, such as a quantized one.
        """
        if not self.is_loaded:
            assert self.checkpoint is not None
            return stored_head(self.checkpoint, self.tokenizer)
        head = heads.head_of(self.model)
        return heads.HeldRows(head) if heads.is_plain(head) else None

    def nearest_words(self) -> NearestWords | None:
        """Return the nearest words of the LM as it is now; None for a head without rows."""
        rows = self.head_rows()
        return None if rows is None else NearestWords(rows, self.config.name_or_path)

    @property
    @_locked
    def has_linear_head(self) -> bool:
        """Whether a logit is the product of the state and the token's row of the head, no more."""
        head: Any = heads.head_of(self.model)
        return self._test().is_product and head.bias is None

    @_locked
    def joint_logits(
        self,
        prompts: Sequence[Sequence[str]],
        token_ids: Sequence[Sequence[int] | Tensor],
        read_after: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the logits of several domains side by side, each after its own prompt.

        The values are those of `domain_logits` for each domain; the common prefix of a subject's
        prompts is computed once, if `LMConfig.share_prefixes` allows.

        With `LMConfig.state_cache`, prompts whose states are known are not read again. Logits are
        the same bit for bit where an earlier call had the same prompts, else up to the rounding of
        the LM's dtype, like with any other choice of what is read together.

        Each domain has one prompt per subject, in the same order of subjects, and its tokens; with
        `read_after`, a domain has the prompts of that index, so that several share prompts, which
        are read once. The logits are ``(n_subjects, n_labels of all domains)``, float64, on the
        LM's device. Errors are those of `domain_logits`, and of required prefix sharing that is
        not supported.
        """
        rows = self.rows(list(chain.from_iterable(prompts)))
        n = len(prompts[0])
        spans = [range(i * n, (i + 1) * n) for i in range(len(prompts))]
        subjects = list(zip(*spans, strict=True))
        after = range(len(prompts)) if read_after is None else read_after
        return self._logits(rows, [spans[i] for i in after], token_ids, subjects)

    @torch.no_grad()
    def _logits(
        self,
        rows: Sequence[Sequence[int]],
        domains: Sequence[range],
        token_ids: Sequence[Sequence[int] | Tensor],
        groups: Collection[Sequence[int]],
        context: RowsContext | None = None,
    ) -> Tensor:
        """Return the logits of domains side by side, each of its tokens after its span of rows."""
        tokens = [heads.to_device(self._checked(ids), self.model.device) for ids in token_ids]
        if self._test().by_rows:
            states = self._last_states(rows, [*dict.fromkeys(domains)], groups, context)
            head: Any = heads.head_of(self.model)
            alone = self._test().is_product and not (self.is_sharded or head._forward_hooks)
            parts = [states[domain.start : domain.stop] for domain in domains]
            with self._reading():
                pairs = list(zip(parts, tokens, strict=True))
                logits = heads.logits_of_states(self.model, pairs, alone)
        else:
            if groups:
                _, self.reads_prompts = self._plan(rows, groups)
            parts = [torch.empty(0)] * len(domains)
            for span in dict.fromkeys(domains):
                inside = [k for k, domain in enumerate(domains) if domain == span]
                wanted = torch.cat([tokens[k] for k in inside])
                read = heads.States(len(span), self.model.device)
                chosen = [rows[i] for i in span]
                self._read(chosen, [range(len(span))], [], read, context, wanted)
                read_after = read.all.view(len(span), len(wanted)).double()
                sizes = [len(tokens[k]) for k in inside]
                for k, part in zip(inside, torch.split(read_after, sizes, dim=1), strict=True):
                    parts[k] = part
            logits = torch.cat(parts, dim=1)
        split = torch.split(logits, [len(ids) for ids in tokens], dim=1)
        for domain, column in zip(domains, split, strict=True):
            self._require_finite(column, [rows[i] for i in domain])
        return logits

    def _last_states(
        self,
        rows: Sequence[Sequence[int]],
        domains: Sequence[range],
        groups: Collection[Sequence[int]],
        context: RowsContext | None,
    ) -> Tensor:
        """Return the states that the head reads after each row, ``(n_rows, hidden_size)``.

        Rows of a domain are read together, those of a group with shared prefixes where it pays.
        """
        # A file for one prompt would cost more than to read it.
        cache = self._cache() if context is None and len(rows) > 1 else None
        states = heads.States(len(rows), self.model.device)
        missing = cache.find(rows, states.keep) if cache else range(len(rows))
        wanted = set(missing)
        new = [[i for i in domain if i in wanted] for domain in domains]
        trees: list[PromptTree] = []
        if groups:
            of_groups = [[i for i in group if i in wanted] for group in groups]
            trees, self.reads_prompts = self._plan(rows, [group for group in of_groups if group])
        self._read(rows, new, trees, states, context)
        if cache and missing and states.all.isfinite().all():
            cache.store([rows[i] for i in missing], states.all[missing], self._read_alone)
        return states.all

    def _read_alone(self, row: Sequence[int]) -> Tensor:
        """Return the bits of the states after a prompt, read as a row and, if shared, as a tree.

        What torch.compile makes is not run, as its bits depend on what it was first run on.
        """
        ways: list[list[PromptTree]] = [[]]
        if self.config.share_prefixes is not False and self._test().sharing_error is None:
            ways.append(list(grow_trees({0: row})))
        eager = self.config.compile and torch.compiler.set_stance("force_eager")
        states = [heads.States(1, self.model.device) for _ in ways]
        with eager or nullcontext():
            for trees, state in zip(ways, states, strict=True):
                self._read([row], [range(1)], trees, state, None)
        return torch.cat([state.all[0] for state in states]).view(torch.uint8).cpu()

    def _plan(
        self, rows: Sequence[Sequence[int]], groups: Collection[Sequence[int]]
    ) -> tuple[list[PromptTree], str]:
        error = self._test().sharing_error
        if any(self._batches.is_uniform(len(rows[i])) for group in groups for i in group):
            error = f"its positions change from {self._batches.uniform_from} tokens on"
        trees, why = shared_prefixes.plan_reading(
            self.model,
            [{i: rows[i] for i in group} for group in groups],
            self.config.share_prefixes,
            self._batches.fixed,
            error,
        )
        if self._batches.max_over_ranks(not trees) and trees:
            return [], "one by one, as another rank must"
        return trees, why

    def _read(
        self,
        rows: Sequence[Sequence[int]],
        domains: Sequence[Sequence[int]],
        trees: Sequence[PromptTree],
        states: heads.States,
        context: RowsContext | None,
        tokens: Tensor | None = None,
    ) -> None:
        """Read the states after the rows of domains, which are those of the trees, if any.

        With `tokens`, it is their logits, from those of the whole vocabulary.
        """

        def forward(domain: Sequence[int], batch: list[int]) -> None:
            chosen = [domain[i] for i in batch]
            ids, mask = self._encoder.pad([rows[i] for i in chosen])
            if self._batches.is_uniform(ids.shape[1]):  # as if nothing longer had been read before
                heads.call_model(self.model, ids[:1, :1].to(self.model.device))
            device = states.all.device
            ids, last = (heads.to_device(part, device) for part in (ids, mask.sum(1) - 1))
            with context(chosen) if context is not None else nullcontext():
                if tokens is None:
                    part = heads.read_states(self.model, ids, heads.flat_ends(ids, last))
                else:
                    part = heads.read_logits(self.model, ids, None, last, tokens, by_rows=False)
                states.keep(chosen, part)

        with self._reading():
            if trees:
                shared_prefixes.read_trees(self.model, trees, self._batches, states.keep, context)
                # NaN spreads through a tree despite the mask: find the prompt that it comes from.
                if not self._batches.max_over_ranks(not states.all.isfinite().all()):
                    return
            for domain in domains:
                self.in_batches([len(rows[i]) for i in domain], partial(forward, domain))

    def _cache(self) -> StateCache | None:
        """Return the cache of states, turned to the LM as it is now; None if it is not used."""
        cache = self.state_cache
        if cache is None or any(p.requires_grad for p in self.model.parameters()):
            return None
        # Adapters of edits and passes in float32 come and go within a run.
        if self.is_sharded or any(
            part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part)
            for part in self.model.modules()
        ):
            why = "it is sharded" if self.is_sharded else "its modules have hooks"
            warnings.warn(f"The LM is read without lm.state_cache: {why}.", stacklevel=2)
            return None
        cache.open(self.model, self.config, self._read_alone)
        return cache

    @contextmanager
    def _reading(self) -> Iterator[None]:
        device = self.model.device.type
        self.require_unchanged()
        with torch.no_grad(), modes.reading(self.model, device, compiled=self.config.compile):
            yield
        self.require_unchanged()

    def require_unchanged(self) -> None:
        """Refuse an LM whose weights are mapped from a file that has been written to."""
        files = file_changes.written_into(self.model, self._files) if self.is_loaded else {}
        for file, stamp in files.items():
            is_whole = stamp[2] >= self._files[file][2]
            if not is_whole or self._last_print != prints.fingerprint_weights(self.model):
                raise LanguageModelError(
                    f"{file} has been written to since the LM was read from it, which changes the "
                    "LM in memory. Run again, and replace files of a checkpoint in use by `mv`, "
                    "which leaves the old ones to their readers."
                )
            self._files[file] = stamp

    def _checked(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        tokens = torch.as_tensor(token_ids, dtype=torch.long).cpu()
        unknown = tokens[(tokens < 0) | (tokens >= self.vocab_size)]
        if tokens.dim() != 1 or len(unknown):
            bad = f"the token id {int(unknown[0])}" if len(unknown) else "a nested list of tokens"
            raise LanguageModelError(
                f"the LM {self.config.name_or_path} does not have {bad}; its tokens are 0 to "
                f"{self.vocab_size - 1}. Build the domain with this LM's tokenizer."
            )
        return tokens

    def _test(self) -> _Support:
        """Return how the LM can be read, from a short text.

        Tested once for each type of its head, and again when half-precision weights are no longer
        trained; all ranks that share an LM must call it together.
        """
        widens = self.dtype in modes.HALF_PRECISIONS and self._may_widen
        kind: tuple[type, bool] = type(heads.head_of(self.model)), widens
        if kind not in self._tested:
            probe = self._encoder.probe()
            size = self.vocab_size
            dtype = torch.float32 if widens else self.dtype
            with self._reading(), modes.float32_forward(self.model) if widens else nullcontext():
                by_rows = heads.can_read_rows(self.model, probe, size, dtype)
                error = shared_prefixes.prefix_sharing_error(
                    self.model, by_rows, probe, size, dtype
                )
                alone = by_rows and not self.is_sharded and self._is_product(probe)
                self._find_other_positions(probe, dtype)
            skips = by_rows and not (widens and self._casts_to_head(probe))
            if not by_rows and self.state_cache is not None:
                _log.warning("lm.state_cache is not used: the head is not a plain linear layer.")
            self._tested[kind] = _Support(by_rows, error, skips, alone)
        return self._tested[kind]

    def _find_other_positions(self, probe: Sequence[int], dtype: torch.dtype) -> None:
        """Read a short row beside one as long as each length that the configuration names.

        Lengths of thousands of tokens would take too long: there the type of rotary positions says
        whether rows depend on each other.
        """
        tokens = heads.probe_tokens(self.vocab_size)
        config = self.model.config.get_text_config()
        longest = min(self._encoder.max_length or _LONGEST_TRIED, _LONGEST_TRIED)
        n = len(probe)
        for length in shared_prefixes.lengths_in(config):
            if n <= length < longest and not self._batches.is_uniform(length):
                rows = [probe, (list(probe) * length)[: length + 1]]
                ids, mask = self.pad(rows)
                beside, alone = (
                    heads.call_model(self.model, i, attention_mask=m).logits[0, :n, tokens].double()
                    for i, m in ((ids, mask), (ids[:1, :n], mask[:1, :n]))
                )
                if not heads.are_same(beside, alone, dtype):
                    self._batches.uniform_from = length

    def _is_product(self, probe: Sequence[int]) -> bool:
        ids = torch.tensor([list(probe)], device=self.model.device)
        states = heads.read_states(self.model, ids, torch.arange(len(probe)))
        parts = [(states, heads.probe_tokens(self.vocab_size))]
        by_product, by_model = (heads.logits_of_states(self.model, parts, b) for b in (True, False))
        return torch.equal(by_product, by_model)

    def _casts_to_head(self, probe: Sequence[int]) -> bool:
        seen: list[torch.dtype] = []
        head = heads.head_of(self.model)
        ids = torch.tensor([list(probe)], device=self.model.device)
        assert head is not None
        hook = head.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
        with hook, self._reading(), modes.float32_forward(self.model, head):
            heads.read_states(self.model, ids, ids.new_tensor([0]))
        return seen != [torch.float32]

    def has_logits_of(self, other: LanguageModel) -> bool:
        """Return whether another LM with this tokenizer has the same logits, up to rounding."""
        probe = self._encoder.probe()
        tokens = heads.probe_tokens(self.vocab_size)
        rows = [probe[: n + 1] for n in range(len(probe))]
        logits, expected = (lm.logits_of_rows(rows, tokens) for lm in (other, self))
        return heads.are_same(logits, expected, self.dtype)

    # -- identity ----------------------------------------------------------------------------

    @property
    def info(self) -> dict[str, Any]:
        """Name or path, dtype, fingerprint and number of parameters, as in ``results.json``.

        An LM with an adapter has also the name of the adapter and that of the base.
        """
        return {
            "name_or_path": self.config.name_or_path,
            "dtype": modes.dtype_name(self.model.dtype),
            "fingerprint": self.fingerprint,
            "n_parameters": self.model.num_parameters(),
        } | (self.checkpoint.merged if self.checkpoint else {})

    @property
    @_locked
    def fingerprint(self) -> dict[str, str]:
        """Hashes that identify the LM, by ``tokenizer``, ``config``, ``dtype`` and ``weights``.

        The weights, and which adapters are in use, are read at memory speed; of a sharded LM, they
        are those from before it was sharded.
        """
        self.require_unchanged()
        weights = self._whole_print or prints.fingerprint_weights(self.model)
        self.require_unchanged()
        self._last_print = weights
        return {
            "tokenizer": prints.fingerprint_tokenizer(self.tokenizer, self.prefix, self.lead_in),
            "config": prints.fingerprint_config(self.model.config),
            "dtype": modes.dtype_name(self.model.dtype),
            "weights": weights,
        }
