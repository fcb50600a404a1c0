"""``python -m tracedraft.export``: write a draft in the layout of another engine."""

from tracedraft.cli import export

if __name__ == "__main__":
    export()
