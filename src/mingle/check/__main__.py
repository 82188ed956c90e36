"""``python -m mingle.check``: what ``mingle-check --nproc-per-node`` starts for the further ranks of a machine."""

from mingle.check.command import main

if __name__ == "__main__":
    main()
