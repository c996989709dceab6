"""Array: the type of numpy's arrays. Docstrings give shapes and dtypes, which the type does not.

The others are fields of messages: the codec reads their dtypes from these types.
"""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

Int32Array = np.ndarray[Any, np.dtype[np.int32]]
Float32Array = np.ndarray[Any, np.dtype[np.float32]]
Float64Array = np.ndarray[Any, np.dtype[np.float64]]
UInt8Array = np.ndarray[Any, np.dtype[np.uint8]]
