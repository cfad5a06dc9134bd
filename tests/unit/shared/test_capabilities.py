"""What a capability says, who may sign it, and what the files of its keys must be."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.capabilities import Signer, Signers, load_signer, load_signers, new_seed, ranges
from shared.errors import ConfigError, ReadRefused
from shared.ids import ModelId, NodeId

READER, MODEL = NodeId("n1"), ModelId("m")
PLANNER, REGISTRY = Signer("planner", b"p" * 32), Signer("registry", b"r" * 32)
SIGNERS = Signers({"planner": PLANNER.public_half, "registry": REGISTRY.public_half})


@given(blocks=st.sets(st.integers(0, 200)), until_ns=st.integers(0, 2**63 - 1))
def test_what_is_signed_is_read_again(blocks: set[int], until_ns: int) -> None:
    claims = SIGNERS.claims_of(PLANNER.sign(READER, MODEL, blocks, until_ns))
    assert (claims.reader, claims.model, claims.until_ns) == (READER, MODEL, until_ns)
    assert {block for block in range(202) if claims.cover(block)} == blocks


def test_ranges_do_not_touch() -> None:
    assert ranges([3, 1, 2, 7, 7]) == ((1, 4), (7, 8))
    assert ranges([]) == ()


@given(data=st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ReadRefused):
        SIGNERS.claims_of(data)


@given(place=st.integers(0), bit=st.integers(0, 7))
def test_a_changed_bit_is_refused(place: int, bit: int) -> None:
    capability = bytearray(PLANNER.sign(READER, MODEL, range(4), 10**18))
    capability[place % len(capability)] ^= 1 << bit
    with pytest.raises(ReadRefused):
        SIGNERS.claims_of(bytes(capability))


@pytest.mark.parametrize(
    "signer",
    [Signer("planner", new_seed()), Signer("planner", b"r" * 32), Signer("gateway", b"p" * 32)],
    ids=["of another cluster", "another role's key", "a role that signs nothing"],
)
def test_other_signers_are_refused(signer: Signer) -> None:
    with pytest.raises(ReadRefused):
        SIGNERS.claims_of(signer.sign(READER, MODEL, range(4), 10**18))


def test_a_capability_that_is_too_long_is_refused_unread() -> None:
    with pytest.raises(ReadRefused, match="at most"):
        SIGNERS.claims_of(PLANNER.sign(READER, MODEL, range(0, 100_000, 2), 10**18))


def test_no_file_is_no_key() -> None:
    assert load_signer("planner", "") is None
    assert load_signers("") is None


def test_files_that_cannot_be_used_name_their_setting(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match=r"planner.signing_key_file: .* cannot be read"):
        load_signer("planner", str(path))
    with pytest.raises(ConfigError, match=r"node.signers_file: .* cannot be read"):
        load_signers(str(path))
    path.write_text("junk")
    with pytest.raises(ConfigError, match=r"chmod 600"):
        load_signers(str(path))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"registry.signing_key_file: .* holds no key"):
        load_signer("registry", str(path))
    for text in ("junk", "[]", '{"planner": 7}', '{"planner": "00"}', '{"planner": "xy"}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"node.signers_file: .* holds no keys"):
            load_signers(str(path))
