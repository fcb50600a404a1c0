"""``python -m tracedraft.run``: the main job."""

from tracedraft.cli import run

if __name__ == "__main__":
    run()
