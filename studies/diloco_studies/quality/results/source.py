"""Which code decides a result: a digest of all modules of ours that a module imports, however indirectly.

Comments, docstrings and layout do not count, nor do modules that decide nothing here (`NOT_COUNTED`).
"""

import ast
from functools import cache
from pathlib import Path

import xxhash

import diloco
import diloco_studies

FOLDERS = {one.__name__: Path(one.__path__[0]) for one in (diloco, diloco_studies)}
NOT_COUNTED = frozenset(
    {
        "diloco_studies.quality.settings",  # its values are in a run's own digest
        # Imported by code that runs in the lab, and never called there.
        *(
            "diloco.pipeline.bus.redis_streams",
            "diloco.pipeline.tls",
            "diloco.pipeline.process.logs",
            "diloco.pipeline.process.signals",
            "diloco.pipeline.view.status",
        ),
        *(
            "diloco.syncer.serving.http",
            "diloco.syncer.serving.checkpointing",
            "diloco.syncer.checkpoints.loading",
            "diloco.syncer.checkpoints.manifest",
            "diloco.syncer.checkpoints.places",
            "diloco.syncer.checkpoints.restoring",
            "diloco.syncer.checkpoints.saving",
            "diloco.syncer.replay.archive",
            "diloco.syncer.replay.recording",
        ),
    }
)


@cache
def code_digest(module: str) -> str:
    """Of a module by its dotted name, and of all that it imports of ours."""
    digest = xxhash.xxh3_64()
    for name in sorted(closure(module)):
        digest.update(name.encode() + _meaning(_file(name)).encode())
    return digest.hexdigest()


def closure(module: str) -> set[str]:
    """Dotted names of our modules that a module imports, itself among them, without those that do not count."""
    found: set[str] = set()
    left = [module]
    while left:
        name = left.pop()
        if name not in found and name not in NOT_COUNTED:
            found.add(name)
            left += [other for other in _imports(name) if other not in found]
    return found


def _file(name: str) -> Path:
    top, *inside = name.split(".")
    path = FOLDERS[top].joinpath(*inside)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def tree_of(source: str) -> ast.Module:
    """A source. Tried again on SystemError: where threads parse too, CPython 3.11 counts wrongly (gh-106905)."""
    try:
        return ast.parse(source)
    except SystemError:
        return ast.parse(source)


def _imports(name: str) -> set[str]:
    """Our modules that a module's source names, inside functions too."""
    file = _file(name)
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    named: set[str] = set()
    for node in ast.walk(tree_of(file.read_text())):
        if isinstance(node, ast.Import):
            named.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            named.add(base)
            named.update(f"{base}.{alias.name}" for alias in node.names)
    return {one for one in named if one.partition(".")[0] in FOLDERS and _file(one).is_file()}


def _meaning(file: Path) -> str:
    tree = tree_of(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            # Any bare string is a docstring or a field's description in this code.
            node.body = [
                part for part in node.body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
            ]
    return ast.dump(tree)
