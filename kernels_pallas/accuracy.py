"""How far a kernel may be off: by the error of XLA's form in the same dtype on the same inputs."""

# Times the error of XLA's form, and the least, relative to the largest value.
_OUTPUTS, _GRADIENTS = (2, 2e-6), (3, 1e-5)
# Whatever XLA's error is: three roundings of bfloat16, or of the tensor cores' float32.
_MOST = {'bfloat16': 0.02, 'float16': 0.02, 'float32': 4e-3}


def allowed_error(dtype: str, gradient: bool, plain_error: float, largest: float) -> float:
    """The largest absolute error that a result may have.

    Args:
      dtype: of the inputs, such as bfloat16.
      gradient: the result is a gradient, not an output.
      plain_error: largest absolute error of XLA's form in that dtype; NaN counts as no bound.
      largest: largest absolute value of the exact result; below 1 it counts as 1.
    """
    factor, least = _GRADIENTS if gradient else _OUTPUTS
    largest = max(1.0, largest)
    return min(_MOST[dtype] * largest, factor * plain_error + least * largest)
