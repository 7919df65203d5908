"""The rows of the runner's arrays. Law: a seat is free or somebody's; what was given back is told once."""


class Seats:
    """Numbers from 0 to `num_seats - 1`."""

    def __init__(self, num_seats: int) -> None:
        self._free = list(reversed(range(num_seats)))
        self._released: list[int] = []

    def __bool__(self) -> bool:
        """One is free."""
        return bool(self._free)

    def take(self) -> int:
        """Raises IndexError when none is free."""
        return self._free.pop()

    def give_back(self, seat: int) -> None:
        self._free.append(seat)
        self._released.append(seat)

    def tell_again(self, seats: tuple[int, ...]) -> None:
        """Nobody has acted on these."""
        self._released += seats

    def take_released(self) -> tuple[int, ...]:
        """Those that lost their sequence since this was last asked."""
        released = tuple(self._released)
        self._released.clear()
        return released
