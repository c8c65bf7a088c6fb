"""`python -m tests.releases`: what this release writes, kept for the tests of later ones, and what its wire format has.

Each release has a folder of its name. `make release` makes sure that it is what the release would write.
"""

import shutil
import sys
from pathlib import Path

from tests.releases.kept import FOLDER, VERSION, check_frozen, lost_scripts, write_files, write_frozen


def main() -> None:
    """Write the folder of the version in pyproject.toml; with --check, only compare its wire format and its scripts."""
    folder = FOLDER / VERSION
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    if sys.argv[1:]:
        if problem := check_frozen(folder):
            sys.exit(problem)
        if lost := lost_scripts(folder):
            sys.exit(f"{folder.name}: no syncer loads its {', '.join(lost)} any more ('A new field', CONTRIBUTING.md)")
        return
    shutil.rmtree(folder / "run", ignore_errors=True)
    shutil.rmtree(folder / "learner", ignore_errors=True)
    folder.mkdir(exist_ok=True)
    write_frozen(folder)
    write_files(folder)
    print(f"wrote {folder.relative_to(Path.cwd())}: {sum(path.stat().st_size for path in folder.rglob('*'))} bytes")


if __name__ == "__main__":
    main()
