"""Sweeps: runs fanned out over warm workers, followed, resumed and never lost."""
