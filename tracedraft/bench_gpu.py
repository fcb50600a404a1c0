"""``python -m tracedraft.bench_gpu``: how near decoding comes to the limits of a GPU."""

from tracedraft.cli import bench_gpu

if __name__ == "__main__":
    bench_gpu()
