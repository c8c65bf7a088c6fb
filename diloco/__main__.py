"""Entry point of `diloco`, and of `python -m diloco`, with which the launcher starts its children."""

import sys

try:
    from diloco.pipeline.process.interrupts import INTERRUPTED_STATUS, end_at_once, end_with
    from diloco.pipeline.process.output import open_all
except KeyboardInterrupt:
    sys.exit(130)  # INTERRUPTED_STATUS, whose import may be what was interrupted


def main() -> int:
    """Run the command that the arguments name, and return the exit status."""
    open_all()
    end_at_once()  # Ctrl-C ends the process without a traceback while the command is being imported
    from diloco import cli
    from diloco.pipeline.process.signals import die_with_launcher

    die_with_launcher()
    try:
        status = cli.main()
    except KeyboardInterrupt:
        status = INTERRUPTED_STATUS
    end_with(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
