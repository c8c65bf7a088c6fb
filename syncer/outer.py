"""The outer optimizer: SGD with Nesterov momentum on one global fragment (paper, outer step). Pure numpy, in blocks."""

import numpy as np
import numpy.typing as npt

from .norms import BLOCK

Float32 = npt.NDArray[np.float32]


class NesterovStep:
    """One outer step, block by block: `b = mu*b + D; theta -= lr*(D + mu*b)`, as torch.optim.SGD(nesterov=True)."""

    def __init__(
        self,
        theta: Float32,
        momentum: Float32 | None,
        out: Float32,
        momentum_out: Float32 | None,
        lr: float,
        mu: float,
    ) -> None:
        """What each block reads and writes.

        Args:
            theta: (elements,) the global fragment.
            momentum: (elements,) b; None: zeros.
            out: (elements,) D, overwritten with the new values.
            momentum_out: (elements,), overwritten with the new b; it may be `momentum`. None: plain SGD, and mu is 0.
            lr: outer learning rate.
            mu: outer momentum.
        """
        if momentum_out is None and mu:
            raise ValueError(f"mu={mu} needs a momentum buffer")
        self._theta, self._momentum, self._out, self._momentum_out = theta, momentum, out, momentum_out
        self._lr, self._mu = lr, mu
        self._scratch = np.empty(min(BLOCK, len(theta)), np.float32)

    def block(self, start: int, stop: int) -> None:
        """Elements [start, stop), at most `BLOCK` of them."""
        lr, mu, d = self._lr, self._mu, self._out[start:stop]
        step = self._scratch[: stop - start]
        if self._momentum_out is None:
            np.multiply(d, lr, out=step)
        else:
            b = self._momentum_out[start:stop]
            if self._momentum is None:
                b.fill(0)
            else:
                np.multiply(self._momentum[start:stop], mu, out=b)
            np.add(b, d, out=b)
            np.multiply(b, mu, out=step)
            np.add(step, d, out=step)
            np.multiply(step, lr, out=step)
        np.subtract(self._theta[start:stop], step, out=d)
