"""What is kept in host caches, and what gives way there."""

from hypothesis import given
from hypothesis import strategies as st

from services.registry.core.giving_way import STAYS, Resident, Sized, kept, make_room
from shared.ids import ModelId, ModelName

WORTH = st.sampled_from([0.0, 0.5, 1.0, 1.5, 3.0])


@st.composite
def models(draw: st.DrawFn) -> list[Sized]:
    sizes = draw(st.lists(st.integers(1, 50), max_size=8))
    return [
        Sized(ModelId(f"m{i}"), nbytes, draw(WORTH), draw(st.booleans()))
        for i, nbytes in enumerate(sizes)
    ]


@st.composite
def residents(draw: st.DrawFn) -> list[Resident]:
    sizes = draw(st.lists(st.integers(1, 50), max_size=8))
    return [
        Resident(ModelId(f"m{i}"), ModelName(f"m{i}"), nbytes, draw(WORTH), draw(st.booleans()))
        for i, nbytes in enumerate(sizes)
    ]


@given(models=models(), room=st.integers(0, 150))
def test_what_is_kept_fits_and_nothing_that_is_worth_more_is_left_out_for_it(
    models: list[Sized], room: int
) -> None:
    chosen = kept(models, room)
    sizes = {model.model_id: model.nbytes for model in models}
    used = sum(sizes[m] for m in chosen)
    assert used <= room
    for out in (m for m in models if m.model_id not in chosen):
        own = out.worth * (STAYS if out.there else 1.0)
        better = [
            m for m in models if m.model_id in chosen and m.worth * (STAYS if m.there else 1) >= own
        ]
        assert sum(m.nbytes for m in better) + out.nbytes > room


@given(models=models(), room=st.integers(0, 150))
def test_what_is_kept_stays_kept_until_something_is_worth_much_more(
    models: list[Sized], room: int
) -> None:
    chosen = kept(models, room)
    there = [Sized(m.model_id, m.nbytes, m.worth, m.model_id in chosen) for m in models]
    assert kept(there, room) == chosen or any(m.there and m.model_id not in chosen for m in models)


@given(residents=residents(), nbytes=st.integers(1, 100), free=st.integers(0, 60))
def test_room_is_made_without_last_copies_and_without_needless_losses(
    residents: list[Resident], nbytes: int, free: int
) -> None:
    ways = {way.model_id for way in make_room(nbytes, free, residents)}
    by_id = {resident.model_id: resident for resident in residents}
    movable = sum(r.nbytes for r in residents if not r.last)
    if not ways:
        assert free >= nbytes or free + movable < nbytes
        return
    assert not any(by_id[model].last for model in ways)
    freed = sum(by_id[model].nbytes for model in ways)
    assert free + freed >= nbytes > free
    for model in ways:
        assert free + freed - by_id[model].nbytes < nbytes, "it need not have gone"


def test_a_copy_that_is_there_gives_way_to_one_that_is_worth_twice_as_much() -> None:
    there = Sized(ModelId("there"), 10, 1.0, there=True)
    for worth, stays in ((1.9, True), (2.1, False)):
        asked = Sized(ModelId("asked"), 10, worth, there=False)
        assert kept([there, asked], 15) == {"there" if stays else "asked"}
