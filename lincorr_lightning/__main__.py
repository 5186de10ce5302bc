"""Run the program `lincorr` by `python -m lincorr_lightning`."""

from lincorr_lightning.cli import console

if __name__ == "__main__":
    console()
