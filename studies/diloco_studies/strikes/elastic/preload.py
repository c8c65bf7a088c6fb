"""Imported once by the process from which ranks are forked: torch and the text are there at each restart already."""

import os

import torch._dynamo  # noqa: F401  # loaded for the first optimizer

from diloco.workers.trainer.data.text import open_text
from diloco_studies.strikes.elastic import rank  # noqa: F401  # with all that it imports

TEXT = "ELASTIC_TEXT"
"""Environment variable: `data` of the run."""

if os.environ.get(TEXT) == "stdlib":  # which is read as a whole; other text is mapped into memory
    open_text("stdlib")
