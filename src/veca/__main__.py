"""`python -m veca`, which is also what torchrun starts: `torchrun --nproc-per-node=gpu -m veca distill …`."""

from veca.cli import main

if __name__ == "__main__":
    main()
