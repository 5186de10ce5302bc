"""Token geometry and knowledge geometry of hidden states."""

from lincorr_lightning.geometry.knowledge_geometry import KnowledgeGeometry
from lincorr_lightning.geometry.token_geometry import TokenGeometry

__all__ = ["KnowledgeGeometry", "TokenGeometry"]
