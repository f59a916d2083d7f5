"""Comparing tensors: bit for bit, with the place of the first difference, and in norm against fp64."""

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(x: Tensor) -> Tensor:
    """The bits of `x` as integers, one a real element (a complex element gives two)."""
    x = x.detach().resolve_conj().resolve_neg().contiguous()
    if x.is_complex():
        x = torch.view_as_real(x).contiguous()
    if x.dtype == torch.bool:
        return x.to(torch.uint8)
    return x.view(_BITS[x.element_size()])


def _ulp_distance(a: int, b: int, width: int) -> int:
    """Floats between two bit patterns: sign-magnitude made monotonic, so that -0 and +0 are 0 apart."""
    sign = 1 << (width - 1)

    def ordered(bits: int) -> int:
        bits &= (1 << width) - 1
        return -(bits & (sign - 1)) if bits & sign else bits

    return abs(ordered(a) - ordered(b))


def assert_bitwise_equal(a: Tensor, b: Tensor) -> None:
    """Raise AssertionError unless `a` and `b` have the same shape, dtype and bits; the message says where they differ.

    Any dtype and layout. Bits are compared, so a NaN equals the same NaN, and -0 differs from +0. The message holds the
    first differing index in row-major order, both values, their distance in ulps and the count of differing elements.
    """
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        raise TypeError(f"assert_bitwise_equal compares tensors, got {type(a).__name__} and {type(b).__name__}")
    if a.shape != b.shape:
        raise AssertionError(f"shapes differ: {tuple(a.shape)} against {tuple(b.shape)}")
    if a.dtype != b.dtype:
        raise AssertionError(f"dtypes differ: {a.dtype} against {b.dtype}")
    if a.numel() == 0:
        return
    bits_a, bits_b = _bits(a), _bits(b.to(a.device))
    different = bits_a != bits_b
    count = int(different.sum())
    if count == 0:
        return
    flat = int(different.flatten().to(torch.uint8).argmax())
    index, rest = [], flat
    for size in reversed(bits_a.shape):
        index.append(rest % size)
        rest //= size
    index.reverse()
    one, other = (int(bits.flatten()[flat]) for bits in (bits_a, bits_b))
    place = tuple(index[: a.dim()])
    value_a, value_b = a[place].item(), b[place].item()
    if a.dtype.is_floating_point or a.is_complex():
        nan = value_a != value_a or value_b != value_b
        distance = "nan against a number or another nan" if nan else (
            f"{_ulp_distance(one, other, 8 * bits_a.element_size())} ulp")
    else:
        distance = f"{abs(int(value_a) - int(value_b))} apart"
    raise AssertionError(
        f"{count} of {bits_a.numel()} elements differ ({100 * count / bits_a.numel():.3g} %); the first at {place}: "
        f"{value_a!r} against {value_b!r}, {distance} ({a.dtype})")


def relative_frobenius_error(result: Tensor, exact: Tensor) -> float:
    """``|result - exact| / |exact|`` in fp64; NaN if either holds one, so that no comparison with a bound passes."""
    exact = exact.double()
    return float((result.double().to(exact.device) - exact).norm() / exact.norm())
