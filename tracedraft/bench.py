"""``python -m tracedraft.bench``: how fast decoding is, beside transformers and beside itself without a draft."""

from tracedraft.cli import bench

if __name__ == "__main__":
    bench()
