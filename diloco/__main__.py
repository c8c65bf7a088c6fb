"""`python -m diloco`, which is how the launcher starts its children, and `diloco`: the command line."""

import sys

try:
    from diloco.pipeline.process.interrupts import INTERRUPTED_STATUS, end_at_once, nothing_is_left

    end_at_once()  # until the command is imported
except KeyboardInterrupt:
    sys.exit(130)  # INTERRUPTED_STATUS, which may not be there yet


def main() -> int:
    """Run the command that the arguments name; the exit status."""
    from diloco import cli
    from diloco.pipeline.process.lifecycle import die_with_launcher

    die_with_launcher()
    try:
        return cli.main()
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS
    finally:
        nothing_is_left()


if __name__ == "__main__":
    sys.exit(main())
