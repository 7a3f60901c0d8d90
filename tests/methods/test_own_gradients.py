"""Which methods take gradients beside those of `Site.minimise`, which alone are scaled in fp16 and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from every_method import every_method_in_time, method_of
from tiny import normed_for, run
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fedshift.federation.steps import Steps


@every_method_in_time
def test_methods_with_gradients_of_their_own_say_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Site.minimise` scales and compiles; a gradient or a step beside it is the trait ``own_gradients``."""
    method, beside, depth = method_of(name), [], [0]

    def inside(function: Any) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            depth[0] += 1
            try:
                return function(*given, **options)
            finally:
                depth[0] -= 1

        return call

    def watched(function: Any) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            if not depth[0]:
                beside.append(function.__name__)
            return function(*given, **options)

        return call

    for what in ("add", "step"):
        monkeypatch.setattr(Steps, what, inside(getattr(Steps, what)))
    monkeypatch.setattr(torch.Tensor, "backward", watched(torch.Tensor.backward))
    monkeypatch.setattr(torch.autograd, "grad", watched(torch.autograd.grad))
    hook = register_optimizer_step_pre_hook(lambda *_: None if depth[0] else beside.append("step"))
    try:
        run(method, network=normed_for(method), rounds=2 if name == "fedala" else 1)  # fedala: from the second on
    finally:
        hook.remove()
    if not method.at_sites((1, 12, 12)).local:
        assert bool(beside) == method.traits.own_gradients, beside
