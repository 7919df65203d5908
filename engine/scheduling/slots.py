"""The rows of the runner's arrays. Law: a slot is free or somebody's; what was given back is told once."""


class Slots:
    """Numbers from 0 to `num_slots - 1`."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(reversed(range(num_slots)))
        self._released: list[int] = []

    def __bool__(self) -> bool:
        """One is free."""
        return bool(self._free)

    def take(self) -> int:
        """Raises IndexError when none is free."""
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)
        self._released.append(slot)

    def tell_again(self, slots: tuple[int, ...]) -> None:
        """Nobody has acted on these."""
        self._released += slots

    def take_released(self) -> tuple[int, ...]:
        """Those that lost their sequence since this was last asked."""
        released = tuple(self._released)
        self._released.clear()
        return released
