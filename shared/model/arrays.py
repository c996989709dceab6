"""Array: the type of numpy's arrays. Docstrings give shapes and dtypes, which the type does not.

The others are fields of messages: the codec reads from their annotations in which form they travel.
"""

from typing import Annotated, Any

import numpy as np

Array = np.ndarray[Any, Any]

Int32Array = Annotated[np.ndarray[Any, np.dtype[np.int32]], "<i4"]
Float32Array = Annotated[np.ndarray[Any, np.dtype[np.float32]], "<f4"]
Float64Array = Annotated[np.ndarray[Any, np.dtype[np.float64]], "<f8"]
UInt8Array = Annotated[np.ndarray[Any, np.dtype[np.uint8]], "|u1"]
