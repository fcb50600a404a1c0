"""``python -m tracedraft.eval_draft``: how good a draft is before anything learns."""

from tracedraft.cli import eval_draft

if __name__ == "__main__":
    eval_draft()
