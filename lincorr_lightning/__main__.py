"""`python -m lincorr_lightning` is the program `lincorr`."""

from lincorr_lightning.cli import console

if __name__ == "__main__":
    console()
