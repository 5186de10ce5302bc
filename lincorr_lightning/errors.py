"""Errors a caller may want to catch: one class per cause, all under `LincorrError`.

The program `lincorr` shows their message alone, without a traceback: it is written for the person
who can act on it, and names the file, key, prompt or label and the way out.
"""


class LincorrError(Exception):
    """Base class of everything this package raises on purpose."""


class KnowledgeError(LincorrError):
    """A knowledge, relation or knowledge file is unknown or not valid."""


class DomainError(LincorrError):
    """A tokenizer leaves a knowledge without usable labels."""


class LanguageModelError(LincorrError):
    """A language model cannot be found, read or used as a causal LM."""


class LinearMapError(LincorrError):
    """A stored linear map is damaged, or belongs to other labels or another LM."""


class SubjectsError(LincorrError):
    """The subjects X cannot be sampled, split or batched as asked."""


class NonFiniteError(LincorrError):
    """An LM answered a prompt with NaN or infinite logits."""


class ConfigError(LincorrError):
    """Settings that contradict each other or that this study cannot run under."""


class SparseAutoencoderError(LincorrError):
    """A sparse autoencoder cannot be read, or does not fit the LM, place or feature asked for."""


class ReportError(LincorrError):
    """A run's folder cannot be told of, or not on one page with the others."""


class OutputError(LincorrError):
    """The run's folder cannot be written."""
