"""A pytree of arrays as named tensors: its leaves with their names, shapes and axes in the run.

A leaf's own name is its path, joined by dots: `layers.0.kernel`. A table may give it another name and another order of
axes in the run, so that learners of other frameworks have the same tensors.
"""

import math
import operator
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.spec import TensorSpec
from diloco.pipeline.messages.wire import MAX_DIMS, MAX_TENSORS, MAX_TEXT_CHARS
from diloco.workers.proposed import Proposed, Trained

# Types that leaves may have; specs use the same names.
DTYPES = ("float32", "bfloat16", "float16", "float64")
# Flax's and Haiku's names for the table of an embedding.
EMBEDDINGS = ("embedding", "embeddings")
SHOWN = 5

# A leaf's own name -> its name in the run; or that and the order of its axes there, as `jnp.transpose` takes it.
Names = Mapping[str, str | tuple[str, Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One synchronised leaf."""

    at: int
    """Its index among all leaves of the pytree."""
    path: str
    """Its own name."""
    name: str
    """Its name in the run."""
    shape: tuple[int, ...]
    """Its own shape."""
    dtype: Any
    """A numpy dtype."""
    axes: tuple[int, ...]
    """The run's axis i is its own axis `axes[i]`."""
    embedding: bool

    @property
    def run_shape(self) -> tuple[int, ...]:
        """Its shape in the run."""
        return tuple(self.shape[axis] for axis in self.axes)

    @property
    def elements(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)

    def own(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a copy of values in the run's axis order, in its own axis order and type."""
        return np.array(values.transpose(np.argsort(self.axes)), self.dtype, order="C")


class Tree:
    """The form of one pytree's leaves, which must not change."""

    def __init__(self, params: Any, names: Names | None = None, embeddings: Iterable[str] | None = None) -> None:
        """Examine the pytree.

        Args:
            params: a pytree of arrays.
            names: names of leaves that differ in the run.
            embeddings: own names of leaves whose rows are vectors; None: those that end in one of `EMBEDDINGS`.

        Raises:
            UsageError: a leaf cannot be trained or travel, or an argument names a leaf that is not there or has a wrong
                form.
        """
        named, self.structure = _flatten(params, jax.tree_util.tree_flatten_with_path)
        paths = [jax.tree_util.keystr(path, simple=True, separator=".") or "params" for path, _ in named]
        names = {} if names is None else names
        if not isinstance(names, Mapping):
            raise UsageError(f"names={reprlib.repr(names)}: pass a dict of own name -> {FORMS}")
        if embeddings is not None and (isinstance(embeddings, str) or not isinstance(embeddings, Iterable)):
            raise UsageError(f"embeddings={embeddings!r}: pass a list of own names, such as ['table.embedding']")
        embeddings = None if embeddings is None else tuple(embeddings)
        _check_named("names", names, paths)
        _check_named("embeddings", embeddings or (), paths)
        self._paths, self._forms = paths, [_form(path, array) for path, (_, array) in zip(paths, named, strict=True)]
        found = []
        for at, (path, (shape, dtype)) in enumerate(zip(paths, self._forms, strict=True)):
            name, axes = _mapped(path, len(shape), names.get(path, path))
            embedding = path.split(".")[-1] in EMBEDDINGS if embeddings is None else path in embeddings
            if math.prod(shape):
                found.append(Leaf(at, path, name, shape, dtype, axes, embedding))
        place = {path: number for number, path in enumerate(names)}
        # The synchronised leaves: those in `names` in its order, then the others in the pytree's order.
        self.leaves = sorted(found, key=lambda leaf: place.get(leaf.path, len(place)))
        _check_leaves(self.leaves)

    def described(self, held: Iterable[TensorSpec] = ()) -> Proposed:
        """Return what a run must know of the leaves. held: the run's table, whose order they then have."""
        place = {name: at for at, name in enumerate(dict.fromkeys(tensor.name for tensor in held))}
        leaves = sorted(self.leaves, key=lambda leaf: place.get(leaf.name, len(place)))
        return Proposed(
            trained=[Trained(leaf.name, leaf.run_shape, leaf.dtype.name, leaf.embedding) for leaf in leaves],
            embeddings=[leaf.run_shape for leaf in self.leaves if leaf.embedding],
        )

    def flatten(self, params: Any) -> list[Any]:
        """Return the leaves of a pytree, which must still have the same form.

        Raises:
            UsageError: it has another form; names the leaf.
        """
        leaves: list[Any]
        leaves, structure = _flatten(params, jax.tree_util.tree_flatten)
        if structure != self.structure:
            raise UsageError(self._what_differs(params))
        for path, form, leaf in zip(self._paths, self._forms, leaves, strict=True):
            if (now := _form(path, leaf)) != form:
                raise UsageError(
                    f"leaf {path} was {_said(form)} when the learner joined and is {_said(now)} now: {REMEDY}"
                )
        return leaves

    def _what_differs(self, params: Any) -> str:
        named, structure = jax.tree_util.tree_flatten_with_path(params)
        now = [jax.tree_util.keystr(path, simple=True, separator=".") or "params" for path, _ in named]
        for path in now:
            if path not in self._paths:
                return f"leaf {path} did not exist when the learner joined: {REMEDY}"
        for path in self._paths:
            if path not in now:
                return f"leaf {path} no longer exists: {REMEDY}"
        return f"the pytree was {self.structure} when the learner joined and is {structure} now: {REMEDY}"


REMEDY = (
    "step() takes only the parameters that the learner was created with, trained further. To train others, create "
    "another learner in another run"
)


# How a value of `Names` is written.
FORMS = "its name in the run, or (its name in the run, the order of its axes there), such as ('0.weight', (1, 0))"


def _flatten(params: Any, flatten: Callable[[Any], tuple[list[Any], Any]]) -> tuple[list[Any], Any]:
    """Return (leaves, structure), as JAX's `flatten` gives them.

    Raises:
        UsageError: JAX cannot flatten it, for example because a dict's keys have no order.
    """
    try:
        return flatten(params)
    except ValueError as error:
        raise UsageError(
            f"JAX cannot flatten the pytree: {str(error).rstrip('.')}; use keys of only one type, such as str, in "
            "each of its dicts"
        ) from error


def _form(path: str, leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Return (shape, type) of a leaf; for a numpy array, those of the array that JAX makes of it.

    Raises:
        UsageError: it is not an array that can be trained.
    """
    if isinstance(leaf, jax.core.Tracer):
        raise UsageError(f"leaf {path} is traced: call the learner outside of jit, grad and scan")
    if not isinstance(leaf, jax.Array | np.ndarray):
        raise UsageError(f"leaf {path} is a {type(leaf).__name__}: pass only parameters, as arrays (jnp.asarray)")
    if leaf.dtype.name not in DTYPES:
        raise UsageError(
            f"leaf {path} is {leaf.dtype.name}; trained leaves may be {', '.join(DTYPES)}: convert it, or do not pass "
            "it to the learner"
        )
    if not isinstance(leaf, jax.Array):
        return leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype.newbyteorder("="))
    if leaf.is_deleted():
        raise UsageError(
            f"leaf {path} was donated to a jitted function and no longer exists: pass what that function returned"
        )
    if not leaf.is_fully_addressable:
        raise UsageError(
            f"leaf {path} is on devices of several processes, but a JAX learner is one process: keep it "
            "on this process's devices"
        )
    return leaf.shape, leaf.dtype


def _said(form: tuple[tuple[int, ...], Any]) -> str:
    return f"{form[1].name} of shape {form[0]}"


def _mapped(path: str, dims: int, given: Any) -> tuple[str, tuple[int, ...]]:
    """Return a leaf's name and axes in the run, from its entry in `names`."""
    try:
        name, axes = (given, range(dims)) if isinstance(given, str) else given
        axes = tuple(map(operator.index, axes))
    except (TypeError, ValueError):
        name, axes = None, ()
    if not isinstance(name, str):
        raise UsageError(f"names: {path} -> {reprlib.repr(given)}; give {FORMS}")
    if sorted(axes) != list(range(dims)):
        raise UsageError(f"names: {path} -> {name!r} with axes {axes}, which are not a permutation of its {dims} axes")
    return name, axes


def _check_named(argument: str, named: Collection[str], paths: Sequence[str]) -> None:
    """Raise UsageError if an argument names leaves that are not there."""
    if (missing := next((name for name in named if name not in paths), None)) is not None:
        some = ", ".join(paths[:SHOWN]) + ", ..." * (len(paths) > SHOWN)
        raise UsageError(f"{argument}: the pytree does not have a leaf {missing!r}; it has {some}")


def _check_leaves(leaves: Sequence[Leaf]) -> None:
    """Raise UsageError if the leaves cannot be the tensors of a run."""
    if not leaves:
        raise UsageError("none of the pytree's leaves has elements, so a learner would have nothing to train")
    if len(leaves) > MAX_TENSORS:
        raise UsageError(f"the pytree has {len(leaves)} leaves, but at most {MAX_TENSORS} are allowed")
    seen = dict[str, Leaf]()
    for leaf in leaves:
        if (other := seen.setdefault(leaf.name, leaf)) is not leaf:
            raise UsageError(f"leaves {other.path} and {leaf.path} are both {leaf.name!r} in the run: rename one")
        if len(leaf.name) > MAX_TEXT_CHARS:
            raise UsageError(
                f"leaf {leaf.name[:60]}... has a name of {len(leaf.name)} characters, but at most {MAX_TEXT_CHARS} "
                "are allowed"
            )
        if not _is_unicode(leaf.name):
            raise UsageError(f"leaf {leaf.path!r}: its name is not valid Unicode and cannot be sent; rename it")
        if len(leaf.shape) > MAX_DIMS:
            raise UsageError(f"leaf {leaf.path} has {len(leaf.shape)} dimensions, but at most {MAX_DIMS} are allowed")


def _is_unicode(name: str) -> bool:
    """Return whether a name can be encoded. Half of a surrogate pair cannot, as may occur in a file's name."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
