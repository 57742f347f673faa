"""Muon for matrices, AdamW for other parameters. All state is named, so that a run can be resumed.

Muon (Jordan et al. 2024): the momentum of a matrix is orthogonalised by a Newton-Schulz iteration, so
every direction of the update has the same size. Stacked matrices [E, out, in] are handled at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from functools import partial

import torch
from torch import Tensor, nn

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


def orthogonalize(update: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix to `update` [..., out, in], roughly (singular values 0.7 to 1.2)."""
    a, b, c = _NEWTON_SCHULZ
    tall = update.shape[-2] > update.shape[-1]
    x = update.mT if tall else update
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    out: Tensor = x.mT if tall else x
    return out


class Optimizer:
    """`parameters`: name -> parameter. Matrices that `muon_names` names take Muon, others AdamW."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        muon_names: frozenset[str],
        muon_lr: float,
        muon_momentum: float,
        adam_lr: float,
        adam_betas: tuple[float, float],
        weight_decay: float,
        lr_factors: Mapping[str, float] | None = None,
    ) -> None:
        """`lr_factors`: parameter -> what its learning rate is multiplied by; 1 where not named."""
        self._parameters = dict(parameters)
        self._muon_names = muon_names
        self._muon_lr, self._muon_momentum = muon_lr, muon_momentum
        self._adam_lr, self._adam_betas = adam_lr, adam_betas
        self._weight_decay = weight_decay
        self._lr_factors = dict(lr_factors or {})
        self._state: dict[str, Tensor] = {}
        for name, p in self._parameters.items():
            for key in ("momentum",) if name in muon_names else ("mean", "square"):
                self._state[f"{key}.{name}"] = torch.zeros_like(p)
        self._steps = 0

    def state(self) -> dict[str, Tensor]:
        """All state as named tensors."""
        return {**self._state, "steps": torch.tensor([self._steps])}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the tensors that `state` returned."""
        for name, tensor in self._state.items():
            tensor.copy_(state[name])
        self._steps = int(state["steps"].item())

    def set_lr_factors(self, lr_factors: Mapping[str, float]) -> None:
        """Replaces the factors given at the start."""
        self._lr_factors = dict(lr_factors)

    def step(self, lr_scale: float, pool: Executor | None = None) -> None:
        """Applies the gradients and clears them. `lr_scale` multiplies both learning rates.

        With a `pool`, parameters are updated in parallel, largest first.
        """
        self._steps += 1
        names = sorted(self._parameters, key=lambda name: -self._parameters[name].numel())
        update = partial(self._update, lr_scale=lr_scale)
        for _ in pool.map(update, names) if pool else map(update, names):
            pass

    # As a decorator, because a pool's threads do not inherit the caller's gradient mode.
    @torch.no_grad()
    def _update(self, name: str, *, lr_scale: float) -> None:
        p = self._parameters[name]
        if p.grad is None:
            return
        lr_scale *= self._lr_factors.get(name, 1.0)
        if name in self._muon_names:
            self._muon(name, p, p.grad, lr_scale)
        else:
            self._adam(name, p, p.grad, lr_scale)
        p.grad = None

    def _muon(self, name: str, p: nn.Parameter, grad: Tensor, lr_scale: float) -> None:
        momentum = self._state[f"momentum.{name}"]
        momentum.lerp_(grad, 1 - self._muon_momentum)
        update = orthogonalize(grad.lerp(momentum, self._muon_momentum))
        lr = self._muon_lr * lr_scale
        p.mul_(1 - lr * self._weight_decay)
        p.add_(update, alpha=-lr * max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5)

    def _adam(self, name: str, p: nn.Parameter, grad: Tensor, lr_scale: float) -> None:
        beta1, beta2 = self._adam_betas
        mean, square = self._state[f"mean.{name}"], self._state[f"square.{name}"]
        mean.lerp_(grad, 1 - beta1)
        square.lerp_(grad.square(), 1 - beta2)
        lr = self._adam_lr * lr_scale
        denominator = (square / (1 - beta2**self._steps)).sqrt_().add_(1e-8)
        p.addcdiv_(mean / (1 - beta1**self._steps), denominator, value=-lr)
