"""What headway publishes of the trained DLRM: `serve.py` says what, headway does it elsewhere."""

from serve import golden, shapes

import headway
from dlrm import DLRM


def served() -> headway.Served:
    """The model, and the batches that it is checked with."""
    return headway.Served(DLRM(), golden(), dynamic_shapes=shapes())
