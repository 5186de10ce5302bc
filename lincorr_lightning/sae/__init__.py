"""Sparse autoencoders (SAEs) of an LM's activations: formats, hook points and training."""

from lincorr_lightning.sae.formats import load_sae, load_saes, save_saes
from lincorr_lightning.sae.hook_points import KINDS, HookKind, HookPoint
from lincorr_lightning.sae.hooks import captured, edited, find_hook_points, width_of
from lincorr_lightning.sae.sparse_autoencoder import ACTIVATIONS, Activation, SparseAutoencoder

__all__ = [
    "ACTIVATIONS",
    "KINDS",
    "Activation",
    "HookKind",
    "HookPoint",
    "SparseAutoencoder",
    "captured",
    "edited",
    "find_hook_points",
    "load_sae",
    "load_saes",
    "save_saes",
    "width_of",
]
