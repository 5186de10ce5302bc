"""The whole paper on one or more LMs: plan, runs, and a page of its tables and figures."""

from lincorr_lightning.reproduce.command import reproduce

__all__ = ["reproduce"]
