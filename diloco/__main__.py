"""`python -m diloco`: the command line, for processes that the launcher starts with its own interpreter."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
