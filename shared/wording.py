"""Numbers in sentences."""


def counted(number: int, thing: str, plural: str = "") -> str:
    """`1 request`, `2 requests`. `plural`: where it is not made by an `s`."""
    return f"{number} {thing if number == 1 else plural or thing + 's'}"
