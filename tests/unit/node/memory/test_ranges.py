import random

from services.node.memory.ranges import Ranges


def test_ranges_are_those_of_a_set_of_bytes() -> None:
    for seed in range(300):
        numbers = random.Random(seed)
        ranges, model = Ranges(), set[int]()
        for _ in range(30):
            start = numbers.randrange(40)
            stop = start + numbers.randrange(1, 12)
            if numbers.random() < 0.6:
                ranges.add(start, stop)
                model |= set(range(start, stop))
            else:
                ranges.discard(start, stop)
                model -= set(range(start, stop))
            for low in range(52):
                for high in (low + 1, low + 3, low + 8):
                    assert ranges.cover(low, high) == (set(range(low, high)) <= model)


def test_what_grows_together_is_one_range() -> None:
    ranges = Ranges()
    for start in (20, 0, 10):
        ranges.add(start, start + 10)
    assert (ranges._starts, ranges._stops) == ([0], [30])
