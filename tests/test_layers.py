"""The import layers of ARCHITECTURE.md, frozen, and who may import what."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT = {
    "pipeline": {"pipeline"},
    "syncer": {"pipeline", "syncer"},
    "workers": {"pipeline", "workers"},
    "chaos": {"pipeline", "syncer", "workers", "chaos"},
    "bench": {"pipeline", "syncer", "workers", "chaos", "bench"},
    "diloco": {"pipeline", "syncer", "workers", "chaos", "bench", "diloco"},
}
OURS = {*MAY_IMPORT, "tests", "examples"}

ONLY_IN = {
    "torch": ("workers/", "chaos/lab/", "bench/"),
    "redis": ("pipeline/redis_", "pipeline/embedded.py"),
    "aiohttp": ("syncer/http.py",),
}

PURE = (
    "pipeline/wire.py",
    "pipeline/delta_messages.py",
    "pipeline/head_messages.py",
    "pipeline/moments_messages.py",
    "pipeline/run_messages.py",
    "pipeline/tape_messages.py",
    "pipeline/commits.py",
    "pipeline/codec.py",
    "pipeline/chunks.py",
    "pipeline/fragments.py",
    "pipeline/quantize.py",
    "pipeline/halves.py",
    "pipeline/updates.py",
    "pipeline/outer_state.py",
    "pipeline/global_format.py",
    "pipeline/global_formats.py",
    "pipeline/global_fp32.py",
    "pipeline/global_bf16.py",
    "pipeline/global_int8.py",
    "pipeline/payload_messages.py",
    "pipeline/shard_messages.py",
    "pipeline/spec_messages.py",
    "pipeline/keys.py",
    "pipeline/strict_json.py",
    "pipeline/errors.py",
    "pipeline/head_hash.py",
    "pipeline/entry_ids.py",
    "pipeline/cluster_slots.py",
    "pipeline/stored_values.py",
    "pipeline/key_usage.py",
    "pipeline/ramps.py",
    "pipeline/shares.py",
    "pipeline/units.py",
    "pipeline/methods.py",
    "pipeline/needs.py",
    "pipeline/pacing.py",
    "pipeline/agreement.py",
    "syncer/window.py",
    "syncer/admission.py",
    "syncer/doubts.py",
    "syncer/watch.py",
    "syncer/algorithm.py",
    "syncer/grace.py",
    "syncer/merge.py",
    "syncer/norms.py",
    "syncer/outer.py",
    "syncer/fragment.py",
    "syncer/draft.py",
    "syncer/sharing.py",
    "workers/schedule.py",
    "workers/models/sizes.py",
    "workers/step_times.py",
    "workers/encoding.py",
    "workers/feedback.py",
    "workers/rounds.py",
    "workers/shared.py",
    "chaos/audit.py",
    "chaos/growth.py",
    "chaos/goodput/calibrate.py",
    "chaos/goodput/table.py",
    "chaos/goodput/studies.py",
    "chaos/goodput/plan.py",
    "chaos/goodput/bandwidth.py",
    "chaos/goodput/constants.py",
    "chaos/goodput/figures.py",
    "chaos/goodput/fleet.py",
    "chaos/goodput/job.py",
    "chaos/goodput/link.py",
    "chaos/goodput/parties.py",
    "chaos/goodput/renewal.py",
    "chaos/goodput/strikes.py",
    "chaos/goodput/windows.py",
    "chaos/rates.py",
    "chaos/virtual_report.py",
    "diloco/chaos_bounds.py",
    "diloco/chaos_compare.py",
    "diloco/chaos_report.py",
    "diloco/elastic_report.py",
    "chaos/lab/fragment.py",
    "chaos/lab/outer.py",
    "chaos/lab/settings.py",
    "chaos/lab/schedule.py",
    "chaos/lab/report.py",
    "chaos/lab/summary.py",
)
IMPURE = {"asyncio", "threading", "time", "datetime", "logging", "structlog", "socket", "random", "os", "subprocess"}


def imports(source: str, package: tuple[str, ...]) -> Iterator[str]:
    """Absolute dotted names of all modules a source imports, inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            yield from ([module] if node.module else (f"{module}.{alias.name}" for alias in node.names))


def sources() -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for top in MAY_IMPORT for p in (ROOT / top).rglob("*.py"))


def imported(path: str) -> set[str]:
    return set(imports((ROOT / path).read_text(), Path(path).parent.parts))


def test_the_parser_sees_every_form_of_import():
    """Relative ones, several on a line, and those hidden in functions: a rule that sees nothing always holds."""
    source = (
        "import a.b, c\nfrom . import d\nfrom .e import f\nfrom ..g.h import i\ndef x():\n    from torch import nn\n"
    )
    assert set(imports(source, ("pkg", "sub"))) == {"a.b", "c", "pkg.sub.d", "pkg.sub.e", "pkg.g.h", "torch"}
    assert "syncer/window.py" in sources()
    assert {"pipeline.wire", "enum"} <= imported("syncer/window.py")


@pytest.mark.parametrize("path", sources())
def test_imports_point_down_only(path):
    """Neither the syncer nor the workers know each other, and nothing below knows the front door."""
    top = path.split("/")[0]
    tops = {name.split(".")[0] for name in imported(path)} & OURS
    assert tops <= MAY_IMPORT[top], f"{path} imports {tops - MAY_IMPORT[top]}"


@pytest.mark.parametrize("path", [path for path in sources() if path.startswith("bench/peers/")])
def test_drivers_of_other_programs_import_nothing_of_ours(path):
    """They run in environments that have none of it."""
    assert {name.split(".")[0] for name in imported(path)} & OURS == set()


@pytest.mark.parametrize("library", ONLY_IN)
def test_heavy_libraries_stay_where_they_belong(library):
    """torch, redis and aiohttp each have their place; an import inside a function counts."""
    users = [path for path in sources() if library in {name.split(".")[0] for name in imported(path)}]
    assert users, f"nobody imports {library}: is the rule still about this project?"
    assert [path for path in users if not path.startswith(ONLY_IN[library])] == []


@pytest.mark.parametrize("path", PURE)
def test_pure_cores_know_no_clock_no_socket_no_logger(path):
    """What a pure core decides depends on its arguments only."""
    assert (ROOT / path).is_file(), f"{path} has moved: mend this list"
    assert imported(path) & IMPURE == set()


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("diloco", "torch"),
        ("syncer.service", "torch"),
        ("pipeline.status", "redis"),
        ("diloco.cli", "chaos"),
        ("diloco.cli", "bench"),
    ],
)
def test_importing_it_does_not_load_the_library(module, forbidden):
    """The syncer's image carries no torch, and none carries chaos or bench: their processes must not even try."""
    code = f"import {module}, sys; sys.exit({forbidden!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or f"{module} loads {forbidden}"


def test_the_syncers_files_import_each_other_in_no_circle():
    """Who reads one file top to bottom needs to have read only those that it imports."""
    above = {path: imported(path) for path in sources() if path.startswith("syncer/")}
    below = {
        path[: -len(".py")].replace("/", "."): {n for n in names if n != "syncer"} for path, names in above.items()
    }
    while leaves := [name for name, names in below.items() if not names & below.keys()]:
        for name in leaves:
            del below[name]
    assert not below, f"circles among {sorted(below)}"


def test_source_files_stay_readable():
    """No source file over 500 lines."""
    long = {path: n for path in sources() if (n := len((ROOT / path).read_text().splitlines())) > 500}
    assert long == {}
