"""`python -m diloco`: the command line, and how the launcher starts its children with its own interpreter."""

import sys

from diloco.cli import main
from diloco.pipeline.process.lifecycle import die_with_launcher

if __name__ == "__main__":
    die_with_launcher()
    sys.exit(main())
