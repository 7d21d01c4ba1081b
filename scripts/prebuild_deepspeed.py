"""Compile DeepSpeed's C++ helper for collectives on a CPU, once per machine (about 50 s), so that no run and no test has to. Needs g++."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("MAX_JOBS", "1")

from deepspeed.accelerator import get_accelerator


def main() -> None:
    get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)


if __name__ == "__main__":
    main()
