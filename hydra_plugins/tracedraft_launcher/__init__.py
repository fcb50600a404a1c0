"""Hydra finds launchers by their place in ``hydra_plugins``."""
