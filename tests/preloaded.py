"""Imported by the server that forks the processes of tests: what each of them would do again.

No tensor is made and no thread is started.
"""

from importlib import import_module

from lincorr_lightning.knowledge import Catalogue
from tests.toys import white_figures

for name in (
    "lincorr_lightning.cli.lightning_cli",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.utils.tensorboard",
    "transformers.models.llama.modeling_llama",
):
    import_module(name)
Catalogue.load()
white_figures().start()
