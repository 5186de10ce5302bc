"""Edits that were made elsewhere, such as by ROME or MEMIT: an LM before and after them."""
