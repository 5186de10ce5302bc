"""The studies: one LightningModule each."""

from lincorr_lightning.modules.edit_forecast import EditForecast
from lincorr_lightning.modules.feature_flow import FeatureFlowStudy
from lincorr_lightning.modules.knowledge_geometry import KnowledgeGeometry
from lincorr_lightning.modules.linear_probe import LinearProbe
from lincorr_lightning.modules.map_resilience import MapResilience
from lincorr_lightning.modules.pretraining import Pretraining
from lincorr_lightning.modules.source_finetune import SourceFinetune
from lincorr_lightning.modules.sparse_autoencoders import SparseAutoencoders
from lincorr_lightning.modules.token_geometry import TokenGeometry
from lincorr_lightning.modules.vocabulary_ablation import VocabularyAblation

__all__ = [
    "EditForecast",
    "FeatureFlowStudy",
    "KnowledgeGeometry",
    "LinearProbe",
    "MapResilience",
    "Pretraining",
    "SourceFinetune",
    "SparseAutoencoders",
    "TokenGeometry",
    "VocabularyAblation",
]
