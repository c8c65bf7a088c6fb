"""What this build's wire format is, as digests in `wire.json`, and a small run that it recorded, in `run/`."""

from pathlib import Path

FOLDER = Path(__file__).parent
RUN = FOLDER / "run"
