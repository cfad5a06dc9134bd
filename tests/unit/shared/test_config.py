from pathlib import Path

import pytest

from shared.config import Config, load
from shared.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "lambdascale.toml"


def test_the_defaults_are_a_valid_configuration() -> None:
    assert load(None, {}) == Config()


def test_the_environment_wins_over_the_file_and_the_file_over_defaults(file: Path) -> None:
    file.write_text('[node]\nid = "n1"\nslots = 3\n[bus]\nurl = "nats://there:1"\n')
    config = load(file, {"LAMBDASCALE_NODE_SLOTS": "5", "PATH": "/bin"})
    assert config.node.id == "n1"
    assert config.node.slots == 5
    assert config.bus.url == "nats://there:1"
    assert config.node.step_tokens == Config().node.step_tokens


def test_variables_are_converted_to_the_type_of_the_key() -> None:
    config = load(
        None,
        {
            "LAMBDASCALE_TELEMETRY_LOG_JSON": "true",
            "LAMBDASCALE_PLANNER_IDLE_S": "1.5",
            "LAMBDASCALE_NODE_LINK_BYTES_PER_S": "9000000",
            "LAMBDASCALE_GATEWAY_API_KEYS": "aa,bb",
            "LAMBDASCALE_BUS_CREDENTIALS": "123",
        },
    )
    assert config.telemetry.log_json is True
    assert config.planner.idle_s == 1.5
    assert config.node.link_bytes_per_s == 9_000_000
    assert config.gateway.api_keys == ("aa", "bb")
    assert config.bus.credentials == "123"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[node]\nprot = 1\n", "prot"),
        ("[nod]\nport = 1\n", "nod"),
        ("node = 3\n", "node"),
        ('[node]\nport = "many"\n', r"node\.port"),
        ("[node]\nport = 70000\n", r"node\.port"),
        ("[node]\nslots = 0\n", r"node\.slots"),
        ("[node]\nlease_s = 0\n", r"node\.lease_s"),
        ("[node]\nlease_s = 1.5\n", r"node\.lease_s"),
        ('[node]\nid = "a.b"\n', r"node\.id"),
        ('[node]\nid = "a\\n"\n', r"node\.id"),
        ("[planner]\nidle_s = -1\n", r"planner\.idle_s"),
        ("[planner]\nidle_s = nan\n", r"planner\.idle_s"),
        ("[planner]\nstray_s = 0\n", r"planner\.stray_s"),
        ("[planner]\ntick_s = inf\n", r"planner\.tick_s"),
        ("[planner]\ntick_s = 0.0\n", r"planner\.tick_s"),
        ("[gateway]\napi_keys = 'aa'\n", r"gateway\.api_keys"),
        ("[node\n", "not valid TOML"),
    ],
)
def test_a_bad_file_is_refused_by_name(file: Path, text: str, named: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=named) as caught:
        load(file, {})
    assert str(file) in str(caught.value)


def test_a_file_that_is_no_text_or_not_there_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(file, {})
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(file, {})


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("LAMBDASCALE_NODE_SLOTS", "many", r"node\.slots"),
        ("LAMBDASCALE_NODE_SLOTS", "", r"node\.slots"),
        ("LAMBDASCALE_NODE_SLOTS", "-1", r"node\.slots"),
        ("LAMBDASCALE_NODE_SLOT", "1", "no such key.*slots"),
        ("LAMBDASCALE_NOD_SLOTS", "1", "no such table.*node"),
        ("LAMBDASCALE_NODE", "1", "no such key"),
        ("LAMBDASCALE_", "1", "no such table"),
        ("LAMBDASCALE_NODE_ID", "a b", r"node\.id"),
    ],
)
def test_a_bad_variable_is_refused_by_name(variable: str, value: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        load(None, {variable: value})
    assert variable in str(caught.value)
