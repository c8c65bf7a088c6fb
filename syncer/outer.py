"""The outer optimizer: SGD with Nesterov momentum on one global fragment (paper, outer step). Pure numpy, in blocks."""

import numpy as np
import numpy.typing as npt

from .merge import BLOCK

Float32 = npt.NDArray[np.float32]


def nesterov_step(theta: Float32, momentum: Float32 | None, pseudogradient: Float32, lr: float, mu: float) -> None:
    """One outer step in place: `b = mu*b + D; theta -= lr*(D + mu*b)`, as torch.optim.SGD(nesterov=True).

    Args:
        theta: (elements,) the global fragment, overwritten.
        momentum: (elements,) b, overwritten; zeros before the first step. None: plain SGD, and mu is 0.
        pseudogradient: (elements,) D, left as it is.
        lr: outer learning rate.
        mu: outer momentum.
    """
    if momentum is None and mu:
        raise ValueError(f"mu={mu} needs a momentum buffer")
    scratch = np.empty(min(BLOCK, len(theta)), np.float32)
    for start in range(0, len(theta), BLOCK):
        block = slice(start, min(start + BLOCK, len(theta)))
        d = pseudogradient[block]
        step = scratch[: len(d)]
        if momentum is None:
            np.multiply(d, lr, out=step)
        else:
            b = momentum[block]
            np.multiply(b, mu, out=b)
            np.add(b, d, out=b)
            np.multiply(b, mu, out=step)
            np.add(step, d, out=step)
            np.multiply(step, lr, out=step)
        np.subtract(theta[block], step, out=theta[block])
