"""Memory layouts of the same values: strides, slices, expanded and negated views, other byte orders and types."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: Returns the same values in some layout; `narrow` allows int32 for int64.
Shape = Callable[..., Any]


def plain(tensor: Tensor, *, narrow: bool = False) -> Tensor:
    """A contiguous copy."""
    del narrow
    return tensor.clone()


def _junk(tensor: Tensor) -> Tensor:
    """Values of the tensor's shape that spoil every result that they enter."""
    if tensor.dtype == torch.bool:
        return torch.ones_like(tensor)
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.full_like(tensor, float("nan"))
    return torch.full_like(tensor, torch.iinfo(tensor.dtype).max - 5)


def _slice(tensor: Tensor) -> Tensor:
    return torch.cat([_junk(tensor), tensor, _junk(tensor)])[len(tensor) : 2 * len(tensor)]


def _column(tensor: Tensor) -> Tensor:
    return torch.stack([_junk(tensor), tensor], -1)[..., 1]


def _steps(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, _junk(tensor), _junk(tensor)], 1).flatten(0, 1)[::3]


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0)


def _expanded(tensor: Tensor) -> Tensor:
    """A view of the first entry if all entries are equal, else a copy."""
    is_alike = len(tensor) > 0 and bool((tensor == tensor[:1]).all())
    return tensor[:1].clone().expand(tensor.shape) if is_alike else tensor.clone()


def _odd_stride(tensor: Tensor) -> Tensor:
    """A view of one element with an unused stride."""
    return tensor.clone().as_strided(tensor.shape, [7] * tensor.dim()) if tensor.numel() == 1 else tensor.clone()


def _negated(tensor: Tensor) -> Tensor:
    """A view with torch's negative bit."""
    if tensor.dtype not in (torch.float32, torch.float64):
        return tensor.clone()
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


def _conjugate(tensor: Tensor) -> Tensor:
    return tensor.conj().resolve_conj().conj() if tensor.is_complex() else tensor.clone()


_FORMS = [_slice, _column, _steps, _transposed, *[_expanded, _odd_stride, _conjugate] * 2, _negated]


def shaper(dice: random.Random) -> Shape:
    """Returns a function that puts a tensor into a random layout."""

    def shape(tensor: Tensor, *, narrow: bool = False) -> Tensor:
        fits = tensor.numel() == 0 or (int(tensor.min()) >= -(2**31) and int(tensor.max()) < 2**31) if narrow else False
        given = tensor.to(torch.int32) if fits and dice.random() < 0.3 else tensor.clone()
        if given.dim() == 0:
            return given
        for form in dice.choices(_FORMS, k=dice.randint(0, 2)):
            given = form(given)
        return given

    return shape


def placer(dice: random.Random) -> Callable[[Tensor], Tensor]:
    """Returns a function that puts a tensor into a random writable layout."""
    forms = [_slice, _column, _steps, _transposed, _odd_stride]
    return lambda tensor: dice.choice(forms)(tensor) if tensor.dim() else tensor


def array_shaper(dice: random.Random) -> Callable[[Tensor], Any]:
    """Returns a function that converts a tensor to a tensor, an array or a list, in a random layout."""

    def shape(tensor: Tensor) -> Any:
        kind = dice.choice(["tensor", "array", "list"])
        if kind == "tensor":
            return shaper(dice)(tensor)
        array: NDArray[Any] = tensor.numpy().copy()
        if kind == "list":
            return array.tolist() if array.size else array
        forms: list[Callable[[NDArray[Any]], NDArray[Any]]] = [
            np.asfortranarray,
            lambda given: given[::-1].copy()[::-1],
            lambda given: np.repeat(given, 2, axis=0)[::2],
            lambda given: given.astype(given.dtype.newbyteorder()),
            lambda given: np.frombuffer(given.tobytes(), given.dtype).reshape(given.shape),  # read-only
            lambda given: np.ma.masked_array(given),
        ]
        return dice.choice(forms)(array)

    return shape
