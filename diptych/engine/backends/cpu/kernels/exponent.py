"""The natural exponent, for compiled loops."""

import numpy as np
from numba import njit

from diptych.engine.backends.cpu.kernels.loop import float_of_bits


# Not to be reordered: the remainder below would lose its low bits.
@njit(error_model="numpy", fastmath={"contract"})
def exp(x: np.float32) -> np.float32:
    """Natural exponent; beyond -87 and 87 as there. Relative error below 3e-7; NaN gives NaN.

    Plain arithmetic, so that a loop over it vectorises.
    """
    low, high = np.float32(-87.0), np.float32(87.0)
    x = low if x < low else x
    x = high if x > high else x
    whole = np.int32(x * np.float32(1.44269504) + np.float32(128.0)) - np.int32(128)  # rounds down
    # The logarithm of 2 in two parts, of which the first times a whole number is exact.
    rest = x - np.float32(whole) * np.float32(0.693359375)
    rest += np.float32(whole) * np.float32(2.12194440e-4)
    f = rest * np.float32(1.44269504)
    # 2**f on [0, 1]: least largest relative error (2e-9) at degree 6, exact at 0.
    p = np.float32(2.1612924e-4)
    p = p * f + np.float32(1.2467844e-3)
    p = p * f + np.float32(9.6754518e-3)
    p = p * f + np.float32(5.5485281e-2)
    p = p * f + np.float32(2.4022931e-1)
    p = p * f + np.float32(6.9314704e-1)
    p = p * f + np.float32(1.0)
    power: np.float32 = float_of_bits((whole + np.int32(127)) << np.int32(23))
    return p * power
