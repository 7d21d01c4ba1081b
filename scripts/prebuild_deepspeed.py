"""Compile DeepSpeed's C++ helper for collectives on a CPU, once per environment (about 50 s): no run and no test has to. Needs g++."""

import os


def main() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("MAX_JOBS", "1")
    from deepspeed.accelerator import get_accelerator

    import learner  # noqa: F401  (says where the helper is kept; both imports read the environment)

    get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)


if __name__ == "__main__":
    main()
