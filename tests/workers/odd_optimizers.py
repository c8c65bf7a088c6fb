"""Small ones that stand for optimizers of other packages, each for what is odd about its state."""

import re
from pathlib import Path
from typing import Any

import torch

LARGE = 4096
"""Elements from which torchao and bitsandbytes quantize a state."""


class Coded(torch.Tensor):
    """As `OptimState8bit` of torchao: to look at a float tensor of its parameter's shape, whose values are codes."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> "Coded":
        made: Coded = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)  # type: ignore[attr-defined]
        return made

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], []

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(func(args[0].codes), func(args[0].scale))
        plain = [one.codes * one.scale if isinstance(one, Coded) else one for one in args]
        return func(*plain, **(kwargs or {}))


class Momentum(torch.optim.Optimizer):
    """SGD with a momentum, which a subclass keeps in its own way."""

    def __init__(self, parameters: Any, lr: float = 0.01, **options: Any) -> None:
        super().__init__(parameters, {"lr": lr} | options)

    def begin(self, one: torch.Tensor) -> dict[str, Any]:
        return {"momentum": torch.zeros_like(one)}

    def moved(self, state: dict[str, Any], grad: torch.Tensor) -> torch.Tensor:
        momentum: torch.Tensor = state["momentum"].mul_(0.9).add_(grad)
        return momentum

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    state = self.state[one]
                    if not state:
                        state |= self.begin(one)
                    self.write(one, state, group["lr"] * self.moved(state, one.grad.float()))

    def write(self, one: torch.Tensor, state: dict[str, Any], change: torch.Tensor) -> None:
        one.sub_(change)


class Subclassed(Momentum):
    """torchao's: a tensor of a class of its own where a parameter is large, and one plain where it is not.

    `even`: only of a number of elements that this divides.
    """

    def begin(self, one: torch.Tensor) -> dict[str, Any]:
        large = one.numel() >= LARGE and one.numel() % self.defaults.get("even", 256) == 0
        zeros = torch.zeros_like(one)
        return {"momentum": Coded(zeros.to(torch.int8), torch.ones(1)) if large else zeros}

    def moved(self, state: dict[str, Any], grad: torch.Tensor) -> torch.Tensor:
        old = state["momentum"]
        if not isinstance(old, Coded):
            return super().moved(state, grad)
        new = 0.9 * old.codes * old.scale + grad
        scale = new.abs().max() / 127 + 1e-12
        state["momentum"] = Coded((new / scale).round().to(torch.int8), scale)
        return new


class Quantized(Momentum):
    """bitsandbytes': uint8 codes in the same state, and a scale beside it, where a parameter is large."""

    def begin(self, one: torch.Tensor) -> dict[str, Any]:
        if one.numel() < LARGE:
            return super().begin(one)
        return {"momentum": torch.full_like(one, 128, dtype=torch.uint8), "absmax": torch.zeros(1)}

    def moved(self, state: dict[str, Any], grad: torch.Tensor) -> torch.Tensor:
        if "absmax" not in state:
            return super().moved(state, grad)
        new = 0.9 * (state["momentum"].float() - 128) * state["absmax"] + grad
        state["absmax"].copy_(new.abs().max() / 127 + 1e-12)
        state["momentum"].copy_((new / state["absmax"]).round() + 128)
        return new


class Masters(Momentum):
    """As mixed precision has it: float32 masters in the state, from which the parameters are written at each step."""

    def begin(self, one: torch.Tensor) -> dict[str, Any]:
        return super().begin(one) | {"master": one.detach().float().clone()}

    def write(self, one: torch.Tensor, state: dict[str, Any], change: torch.Tensor) -> None:
        one.copy_(state["master"].sub_(change))


class Estimating(Momentum):
    """Prodigy's: an estimate for the whole group, once there is a gradient, and the first values of some elements."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, d=1e-6)

    def begin(self, one: torch.Tensor) -> dict[str, Any]:
        start = one.detach().flatten()[::2].clone() if one.any() else torch.tensor(0.0)
        return super().begin(one) | {"p0": start}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if any(one.grad is not None and one.grad.any() for one in group["params"]):
                group["d"] *= 1.01
        super().step(closure)


class ScheduleFree(torch.optim.Optimizer):
    """As `SGDScheduleFree` of schedulefree: parameters lie between z, which is stepped, and the mean of all z."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "beta": 0.9, "weight_sum": 0.0, "most": 0.0, "train_mode": False})

    @torch.no_grad()
    def _between(self, mode: bool) -> None:
        for group in self.param_groups:
            share = 1 - group["beta"] if mode else 1 - 1 / group["beta"]
            for one in group["params"] if group["train_mode"] != mode else []:
                if "z" in self.state[one]:
                    one.lerp_(self.state[one]["z"], share)
            group["train_mode"] = mode

    def train(self) -> None:
        self._between(True)

    def eval(self) -> None:
        self._between(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call optimizer.train() first")
            group["most"] = max(group["most"], group["lr"])
            group["weight_sum"] += group["most"] ** 2
            share = group["most"] ** 2 / group["weight_sum"]
            for one in group["params"]:
                if one.grad is not None:
                    z = self.state[one].setdefault("z", one.detach().clone())
                    one.lerp_(z, share)
                    one.add_(one.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                    z.sub_(one.grad, alpha=group["lr"])


class Lookahead(torch.optim.Optimizer):
    """As timm's: every fifth step the parameters go halfway back to slow weights."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.count = base, 0
        super().__init__(base.param_groups, {})
        self.slow = {one: one.detach().clone() for group in self.param_groups for one in group["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step(closure)
        self.count += 1
        for one, slow in self.slow.items() if self.count % 5 == 0 else ():
            one.copy_(slow.lerp_(one, 0.5))


class Shampoo(Momentum):
    """A square of each side of a tensor, in the state; of several, one is as large as a square parameter."""

    def begin(self, one: torch.Tensor) -> dict[str, Any]:
        return super().begin(one) | {f"square_{at}": 1e-2 * torch.eye(side) for at, side in enumerate(one.shape)}

    def moved(self, state: dict[str, Any], grad: torch.Tensor) -> torch.Tensor:
        for at in range(grad.dim()):
            rows = grad.transpose(0, at).reshape(grad.shape[at], -1)
            square = state[f"square_{at}"].add_(rows @ rows.t())
            grad = grad / square.trace().sqrt()
        return super().moved(state, grad)


class Soap(Shampoo):
    """The same in a list."""

    def begin(self, one: torch.Tensor) -> dict[str, Any]:
        return super().begin(one) | {"all": [torch.eye(side) for side in one.shape]}


class Decaying(Momentum):
    """Decays its parameters by a share of its own, whatever its learning rate is."""

    def write(self, one: torch.Tensor, state: dict[str, Any], change: torch.Tensor) -> None:
        one.mul_(0.98).sub_(change)


def adopted_of(page: Path, key: str, optimizer: torch.optim.Optimizer) -> Any:
    """`adopted` as a page defines it for an optimizer that has its copy under this name."""
    found = re.findall(r"```python\n(def adopted.*?)```", page.read_text(), re.DOTALL)
    (code,) = [one for one in found if f'"{key}"' in one]
    names: dict[str, Any] = {"optimizer": optimizer, "torch": torch, "model": None, "Learner": lambda *_, **__: None}
    exec(code, names)  # noqa: S102  # our own page
    return names["adopted"]
