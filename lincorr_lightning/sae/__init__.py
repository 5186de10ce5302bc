"""Sparse autoencoders (SAEs) of an LM's activations, and how their features flow through it."""

from lincorr_lightning.sae.formats import (
    FORMATS,
    SAEFormat,
    load_sae,
    load_saes,
    register_format,
)
from lincorr_lightning.sae.hook_points import KINDS, HookKind, HookPoint
from lincorr_lightning.sae.hooks import captured, edited, find_hook_points, width_of
from lincorr_lightning.sae.loading import load_folder
from lincorr_lightning.sae.sparse_autoencoder import ACTIVATIONS, Activation, SparseAutoencoder

__all__ = [
    "ACTIVATIONS",
    "FORMATS",
    "KINDS",
    "Activation",
    "HookKind",
    "HookPoint",
    "SAEFormat",
    "SparseAutoencoder",
    "captured",
    "edited",
    "find_hook_points",
    "load_folder",
    "load_sae",
    "load_saes",
    "register_format",
    "width_of",
]
