"""Tensors that are their shapes and nothing else, for models as people write them.

with shapes_alone():
    model = Model().to(torch.bfloat16)      # takes no memory
"""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode


class _NoTensorMemo(FakeTensorConverter):
    """Keeps no weak reference to what operators return: `Module.to` refuses a parameter that has one.

    They are for finding the same fake tensor again from the same result, which no operator returns twice. Real tensors from
    outside are remembered all the same, by the converter below this one.
    """

    def set_tensor_memo(self, t: Tensor, v: FakeTensor) -> None:
        """Does nothing."""


def shapes_alone() -> FakeTensorMode:
    """A mode in which tensors are fake, those from outside of it included."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.fake_tensor_converter = _NoTensorMemo()
    return mode
