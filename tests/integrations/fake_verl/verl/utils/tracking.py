"""Where metrics of a step go."""


class Tracking:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, object]]] = []

    def log(self, data, step, backend=None) -> None:
        self.logged.append((step, dict(data)))
