"""The order in which a run sees its prompts: a pure function of seed, number of rows and position.

So a resumed run, another number of ranks, or an extra draw sees the same row at the same position.

Not here: who owns which position, and how far a run has come.
"""

import numpy as np
import numpy.typing as npt

_NUM_CACHED = 2  # a round that crosses the edge of an epoch looks at both


class PromptOrder:
    """Every row once an epoch, in a fresh order each epoch.

    Example: `PromptOrder(seed=0, num_rows=3)` gives `row_at(0..2)` some order of 0, 1, 2 and `row_at(3..5)` another.
    """

    def __init__(self, *, seed: int, num_rows: int) -> None:
        if num_rows < 1 or seed < 0:
            raise ValueError(f"an order needs a row and a seed from 0, not num_rows={num_rows}, seed={seed}")
        self.seed = seed
        self.num_rows = num_rows
        self._epochs: dict[int, npt.NDArray[np.int64]] = {}

    def row_at(self, position: int) -> int:
        """The row that position `position` of the run draws; positions count from 0 over all epochs."""
        if position < 0:
            raise ValueError(f"a position counts from 0, not {position}")
        epoch, place = divmod(position, self.num_rows)
        return int(self._permutation(epoch)[place])

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch not in self._epochs:
            while len(self._epochs) >= _NUM_CACHED:
                self._epochs.pop(next(iter(self._epochs)))
            self._epochs[epoch] = np.random.default_rng([self.seed, epoch]).permutation(self.num_rows)
        return self._epochs[epoch]
