"""Repair: a short fine-tune after which edits of the source generalize to the target."""
