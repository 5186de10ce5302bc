"""Sparse autoencoders (SAEs) of an LM's activations, and how their features flow through it."""

from lincorr_lightning.sae.activations import captured, edited, places_of, width_of
from lincorr_lightning.sae.feature_flow import FeatureFlow
from lincorr_lightning.sae.feature_groups import FeatureGroups
from lincorr_lightning.sae.flow_graph import GROUPS, Edge, Feature, FlowGraph, group_codes
from lincorr_lightning.sae.formats import (
    FORMATS,
    SAEFormat,
    load_sae,
    load_saes,
    register_format,
)
from lincorr_lightning.sae.loading import load_folder
from lincorr_lightning.sae.place import KINDS, Kind, Place
from lincorr_lightning.sae.sparse_autoencoder import ACTIVATIONS, Activation, SparseAutoencoder

__all__ = [
    "ACTIVATIONS",
    "FORMATS",
    "GROUPS",
    "KINDS",
    "Activation",
    "Edge",
    "Feature",
    "FeatureFlow",
    "FeatureGroups",
    "FlowGraph",
    "Kind",
    "Place",
    "SAEFormat",
    "SparseAutoencoder",
    "captured",
    "edited",
    "group_codes",
    "load_folder",
    "load_sae",
    "load_saes",
    "places_of",
    "register_format",
    "width_of",
]
