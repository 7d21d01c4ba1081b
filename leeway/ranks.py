"""`python -m leeway.ranks ...`: torchrun as a child of `leeway run`. Same arguments, but it dies with its parent and the ranks with it."""

import os
import signal
import sys

from wire.process import PARENT, die_with_parent


def main() -> None:
    die_with_parent(signal.SIGKILL)
    os.environ[PARENT] = str(os.getpid())
    from torch.distributed.run import main as torchrun

    torchrun(sys.argv[1:])


if __name__ == "__main__":
    main()
