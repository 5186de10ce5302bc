"""torchmetrics over `lincorr_lightning.functional`: the same numbers on one device or many."""

from lincorr_lightning.metrics.correlation import InstancewisePearson
from lincorr_lightning.metrics.joint_moments import JointMoments
from lincorr_lightning.metrics.reconstruction import Reconstruction, ReconstructionQuality

__all__ = ["InstancewisePearson", "JointMoments", "Reconstruction", "ReconstructionQuality"]
