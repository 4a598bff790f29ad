"""Groups finished beyond what a round needed: they start a later one, if they are not too old by then.

Not here: which groups are over (`source`).
"""

from collections.abc import Sequence

from ycore.types import Finished


class Surplus:
    """Keeps what can teach, oldest first. `max_age`: policy versions a group may lag behind when it is trained on."""

    def __init__(self, *, max_age: int) -> None:
        self.waiting: list[Finished] = []
        self._max_age = max_age

    def __len__(self) -> int:
        return len(self.waiting)

    def put(self, finished: Sequence[Finished]) -> None:
        self.waiting += [item for item in finished if item.teaches]

    def take(self, version: int) -> list[Finished]:
        """All that are young enough for this version of the policy; the others are dropped."""
        young = [item for item in self.waiting if version - _oldest(item) <= self._max_age]
        self.waiting = []
        return young


def _oldest(item: Finished) -> int:
    return min(completion.policy_version for completion in item.group.completions)
