"""TraceDraft: measure drafts that keep learning while they serve."""

__version__ = "0.1.0"
