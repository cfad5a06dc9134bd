"""A bell that any thread can ring when it waits for the engine's next pause between blocks."""

import ctypes


class Bell:
    """Not a lock: a ring that comes while the engine looks away is heard after the next block."""

    def __init__(self) -> None:
        self._rung = ctypes.c_int64(0)
        self.address = ctypes.addressof(self._rung)
        """Where the kernels look: the number there is 0 until somebody rings."""

    def ring(self) -> None:
        self._rung.value = 1

    def quiet(self) -> None:
        self._rung.value = 0

    @property
    def rung(self) -> bool:
        return bool(self._rung.value)
