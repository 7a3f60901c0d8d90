"""Runs code that makes tensors, but not larger ones than a limit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedshift.errors import UserError


class Bounded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Ends code that makes tensors of more numbers than a limit, before their memory is taken.

    Counted are tensors that are made of no other: weights and buffers begin so. Their sum is bounded, too. For code
    whose options are a stranger's, such as those in a model file.

    ``largest``: numbers that the code may make in all. Raises UserError: on leaving or within, as soon as a tensor is
    larger, or all are together.

    Example:
        >>> with Bounded(10):
        ...     torch.zeros(4, 4)
        Traceback (most recent call last):
        fedshift.errors.UserError: the network is much larger than the file of its weights
    """

    def __init__(self, largest: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = largest

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to tell torch's compiler to skip this would import it, which takes a second

    def __torch_dispatch__(
        self, operator: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, options))):
            self._left -= self._size(operator, args, options)
            if self._left < 0:
                raise UserError("the network is much larger than the file of its weights")
        return operator(*args, **options)

    def _size(self, operator: Any, args: Sequence[Any], options: Mapping[str, Any]) -> int:
        """The numbers that an operation makes, found without their memory."""
        if all(argument.name != "device" for argument in operator._schema.arguments):
            return 0
        shaped = {name: value for name, value in options.items() if name not in ("generator", "pin_memory")}
        made = operator.overloadpacket(*args, **{**shaped, "device": torch.device("meta")})
        return math.prod(made.shape) if isinstance(made, Tensor) else 0
