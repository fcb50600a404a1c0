"""``python -m tracedraft.train``: offline training of a draft for a target."""

from tracedraft.cli import train

if __name__ == "__main__":
    train()
