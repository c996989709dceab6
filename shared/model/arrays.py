"""Array: the type of numpy's arrays. Docstrings give shapes and dtypes, which the type does not."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
