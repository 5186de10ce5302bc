"""The tiny world: its people, what is true of them, and the sentences that say so."""
