"""Each default is declared once: what lab, simulator, benchmarks and commands share, they take from where it is."""

import ast
import operator
from collections.abc import Iterator
from typing import Any

from diloco.options import ALL_FIELDS, DemoProcess
from diloco.pipeline.settings import RankProcess, defaults
from tests.test_layers import parsed, sources

DECLARED = {
    "pipeline/settings.py": "where they are declared",
    "diloco/options.py": "a launcher's, and where they differ from a party's",
    "studies/diloco_studies/strikes/settings.py": "of what is done to a run",
}
OTHER_MEANING = {
    ("studies/diloco_studies/goodput/constants.py", "checkpoint_every"): "of a job without elasticity",
    ("studies/diloco_studies/quality/settings.py", "eval_tokens"): "the lab evaluates seldom, and on more text",
    ("studies/diloco_studies/quality/settings.py", "learners"): "of the lab, which has no launcher",
    ("studies/diloco_studies/quality/settings.py", "method"): "the lab has one more",
    ("diloco/plan.py", "codec"): "auto is none of a run's",
    ("diloco/plan.py", "precision"): "of a learner, which a plan does not start",
    ("studies/diloco_studies/bench/cost.py", "fragments"): "of the measurement",
    ("studies/diloco_studies/bench/stepping.py", "fragments"): "of the measurement",
    ("studies/diloco_studies/bench/command.py", "fragments"): "of the measurement",
}
"""What has a setting's name and is something else, each with its reason."""
USUAL = defaults(DemoProcess) | defaults(RankProcess)
_OPERATORS = {ast.Mult: operator.mul, ast.Pow: operator.pow, ast.Add: operator.add, ast.Sub: operator.sub}


def constant(node: ast.expr) -> Any:
    """The value of a literal, or of an expression of such as 512 * 1024; None: it is none."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = constant(node.left), constant(node.right)
        return None if None in (left, right) else _OPERATORS[type(node.op)](left, right)
    return node.value if isinstance(node, ast.Constant) else None


def declared(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """(name, default) of the class attributes `name: type = Field(default, ...)` with a constant."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Call):
            called = node.value
            field = isinstance(called.func, ast.Name) and called.func.id in ("Field", "expert") and called.args
            if field and (value := constant(called.args[0])) is not None:
                yield node.target.id, value


def said(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """(name, number) of other class attributes and of functions' arguments."""
    for node in ast.walk(tree):
        pairs: list[tuple[str, ast.expr | None]] = []
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            pairs = [(node.target.id, node.value)]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            pairs = [(a.arg, d) for a, d in zip(given.args[::-1], given.defaults[::-1], strict=False)]
            pairs += [(a.arg, d) for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
        for name, default in pairs:
            value = None if default is None else constant(default)
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield name, value


def test_the_parser_sees_what_it_is_for() -> None:
    source = "class A:\n    gamma: float = Field(0.8, ge=0)\n    out: Path = Field(x)\n    chunk: int = 512 * 1024\n"
    assert dict(declared(ast.parse(source))) == {"gamma": 0.8}
    assert dict(said(ast.parse(source))) == {"chunk": 524288}
    assert dict(said(ast.parse("def f(a, b=2**3, *, c: float = 2.0, d=x): ..."))) == {"b": 8, "c": 2.0}
    assert "grace_gamma" in ALL_FIELDS


def test_no_default_is_declared_again() -> None:
    """Neither with the same value, which would go another way one day, nor, as a setting, with another one."""
    again = set()
    for path in sources():
        tree = parsed(path)
        found = {(name, value) for name, value in declared(tree) if name in ALL_FIELDS}
        found |= {(name, value) for name, value in said(tree) if value not in (0, 1) and USUAL.get(name) == value}
        again |= {(path, *one) for one in found if path not in DECLARED and (path, one[0]) not in OTHER_MEANING}
    assert again == set(), "take it from diloco.pipeline.settings.defaults, or say in what it differs"
