"""Casting stored tensors: one rounding from the stored dtype, never two."""

import ml_dtypes
import numpy as np

FLOAT_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


def cast(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`x` rounded to the nearest value of `dtype`, ties to even, in one step.

    float64 to bfloat16 by way of float32 would round twice: a value just above a tie of bfloat16
    can fall onto the tie in float32 and then to the wrong side.

    >>> cast(np.array([1 + 2.0**-8 + 2.0**-40]), FLOAT_DTYPES["bfloat16"]).item()
    1.0078125
    """
    if x.dtype == dtype:
        return x
    if x.dtype == np.float64 and dtype == FLOAT_DTYPES["bfloat16"]:
        x = _round_to_odd(x)
    return x.astype(dtype)


def _round_to_odd(x: np.ndarray) -> np.ndarray:
    """float64 to float32, towards zero, with the last bit set where anything was cut off.

    A later rounding to fewer than 23 bits then sees which side of a tie the value was on.
    """
    with np.errstate(over="ignore"):
        y = x.astype(np.float32)
    beyond = np.abs(y.astype(np.float64)) > np.abs(x)
    y = np.where(beyond & np.isfinite(x), np.nextafter(y, np.float32(0)), y)
    inexact = (y.astype(np.float64) != x) & np.isfinite(x)
    return (y.view(np.uint32) | inexact.astype(np.uint32)).view(np.float32)
