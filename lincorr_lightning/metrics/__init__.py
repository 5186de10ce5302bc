"""torchmetrics over `lincorr_lightning.functional`: the same numbers on one device or many."""

from lincorr_lightning.metrics.instancewise_pearson import InstancewisePearson
from lincorr_lightning.metrics.joint_moments import JointMoments
from lincorr_lightning.metrics.mean_r_error import MeanRStandardError, Scale
from lincorr_lightning.metrics.reconstruction import Reconstruction, ReconstructionQuality

__all__ = [
    "InstancewisePearson",
    "JointMoments",
    "MeanRStandardError",
    "Reconstruction",
    "ReconstructionQuality",
    "Scale",
]
