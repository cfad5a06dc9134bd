"""The small files that a node keeps in memory."""

from services.node.hosting.small_files import SmallFiles


def test_what_was_used_least_lately_goes() -> None:
    files = SmallFiles(most=10)
    files.put("a", b"aaaa")
    files.put("b", b"bbbb")
    assert files.get("a") == b"aaaa"
    files.put("c", b"cccc")
    assert (files.get("a"), files.get("b"), files.get("c")) == (b"aaaa", None, b"cccc")


def test_a_file_takes_its_room_once() -> None:
    files = SmallFiles(most=10)
    for _ in range(3):
        files.put("a", b"aaaa")
    files.put("b", b"bbbbbb")
    assert (files.get("a"), files.get("b")) == (b"aaaa", b"bbbbbb")


def test_a_file_that_is_too_large_drives_nothing_out() -> None:
    files = SmallFiles(most=10)
    files.put("a", b"aaaa")
    files.put("large", bytes(11))
    assert (files.get("a"), files.get("large")) == (b"aaaa", None)
