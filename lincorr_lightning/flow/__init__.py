"""Feature flow: matching, graphs, deactivation and steering of the features of SAEs."""

from lincorr_lightning.flow.graph import GROUPS, DecoderMatcher, Edge, FlowGraph
from lincorr_lightning.flow.module import FeatureFlow
from lincorr_lightning.flow.text_statistics import FeatureGroups

__all__ = ["GROUPS", "DecoderMatcher", "Edge", "FeatureFlow", "FeatureGroups", "FlowGraph"]
