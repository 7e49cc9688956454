"""The `veca` command and `python -m veca`, which is also what torchrun starts: `torchrun … -m veca distill …`."""

import os
import sys


def main() -> None:
    """Run the command line.

    Importing it takes seconds, and nothing before this function does: Ctrl-C then ends the command without a traceback.
    """
    try:
        if sys.argv[1:2] == ["serve"]:
            from veca.utils.supervisor import SUPPORTED, is_worker, supervise

            if SUPPORTED and not is_worker():
                # As this process was started: the name of the command is in what it prints.
                own = sys.argv[:1] if os.path.basename(sys.argv[0]) == "veca" else ["-m", "veca"]
                sys.exit(supervise([sys.executable, *own, *sys.argv[1:]]))
        from veca.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
