"""The sources of a setting's value, their precedence, and the errors of refused values."""

from __future__ import annotations

import json
import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from libs.common.runtime.loading import load_settings
from libs.common.runtime.process_settings import ServiceSettings
from libs.common.runtime.settings import check_advertised, rows, setting
from libs.worker.process.settings import EngineSettings, WorkerSettings
from services.decode.settings import DecodeSettings
from services.kvstore.settings import NodeSettings
from services.router.settings import RouterSettings
from slipstream.errors import InvalidArgument

ROOT = Path(__file__).resolve().parents[3]
SERVICES = (RouterSettings, EngineSettings, DecodeSettings, NodeSettings, WorkerSettings)


def even(value: int) -> None:
    if value % 2:
        raise ValueError(f"{value} is odd")


@dataclass(frozen=True)
class Sample:
    name: str = setting("a name")
    size: int = setting("a size", default=8, check=even)
    share: float = setting("a share", default=0.5)
    mode: str = setting("a mode", default="auto", choices=("auto", "on"))
    keys: Path | None = setting("a file", default=None)
    disk: tuple[Path, ...] = setting("a disk", default=(), default_text="none of its own")
    pins: bool = setting("a switch", default=False)
    parent: int = setting("a pid", default=0, is_hidden=True)


def load_sample(
    *arguments: str, file: str | None = None, tmp_path: Path | None = None, **environment: str
) -> Sample:
    given = ["--name", "n", *arguments]
    if file is not None:
        assert tmp_path is not None
        (tmp_path / "config.toml").write_text(f"[decode]\n{file}")
        given += ["--config", str(tmp_path / "config.toml")]
    return load_settings(
        Sample, section="decode", program="p", description="d", arguments=given, environment=environment
    )


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str, **how: Any) -> str:
    with pytest.raises(SystemExit) as ended:
        load_sample(*arguments, **how)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("p: ") and line.endswith("; see --help")
    return line.removeprefix("p: ").removesuffix("; see --help")


def test_settings_have_defaults() -> None:
    assert load_sample() == Sample(name="n")
    assert Sample(name="n").disk == ()


def test_precedence_is_flag_environment_file_default(tmp_path: Path) -> None:
    file = 'size = 2\nshare = 0.2\nmode = "on"'
    found = load_sample(
        *("--size", "6"), file=file, tmp_path=tmp_path, SLIPSTREAM_SIZE="4", SLIPSTREAM_SHARE="0.4"
    )
    assert (found.size, found.share, found.mode, found.pins) == (6, 0.4, "on", False)


def test_every_source_gives_every_type(tmp_path: Path) -> None:
    wanted = Sample(
        name="n", size=4, share=1.0, mode="on", keys=Path("k"), disk=(Path("/a"), Path("/b")), pins=True
    )
    flags = "--size 4 --share 1 --mode on --keys k --disk /a --disk /b --pins"
    assert load_sample(*flags.split()) == wanted
    environment = {"SIZE": "4", "SHARE": "1", "MODE": "on", "KEYS": "k", "DISK": "/a,/b", "PINS": "true"}
    variables: dict[str, Any] = {f"SLIPSTREAM_{name}": text for name, text in environment.items()}
    assert load_sample(**variables) == wanted
    file = 'size = 4\nshare = 1\nmode = "on"\nkeys = "k"\ndisk = ["/a", "/b"]\npins = true'
    assert load_sample(file=file, tmp_path=tmp_path) == wanted


def test_a_flag_turns_off_a_switch_of_the_environment_or_file() -> None:
    assert load_sample(SLIPSTREAM_PINS="1").pins
    assert not load_sample("--no-pins", SLIPSTREAM_PINS="1").pins


def test_the_environment_may_name_the_config_file_and_give_required_settings(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[decode]\nsize = 2")
    environment = {"SLIPSTREAM_CONFIG": str(tmp_path / "c.toml"), "SLIPSTREAM_NAME": "n"}
    found = load_settings(
        Sample, section="decode", program="p", description="", arguments=[], environment=environment
    )
    assert found == Sample(name="n", size=2)


def test_a_missing_required_setting_is_named_as_flag_variable_and_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        load_settings(Sample, section="decode", program="p", description="", arguments=[], environment={})
    assert (
        "--name is required (or SLIPSTREAM_NAME, or name in [decode] of the file of --config)"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("sise = 1\nshare = 1", "no setting is named sise"),
        ("parent = 1", "no setting is named parent"),
        ("size = 1.5", "size: must be a whole number, not 1.5"),
        ("size = true", "size: must be a whole number, not True"),
        ("pins = 1", "pins: must be true or false, not 1"),
        ('share = "x"', "share: must be a number, not 'x'"),
        ("keys = 3", "keys: must be a path, not 3"),
        ('disk = "/a"', "disk: must be a list"),
        ('mode = "off"', "mode: must be one of auto, on, not 'off'"),
        ("size = 3", "size: 3 is odd"),
        ("size =", "is not TOML"),
    ],
)
def test_an_unusable_config_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, words: str
) -> None:
    line = error_of(capsys, file=file, tmp_path=tmp_path)
    assert words in line
    assert "config.toml" in line


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"SLIPSTREAM_SIZE": "many"}, "SLIPSTREAM_SIZE: must be a whole number, not 'many'"),
        ({"SLIPSTREAM_PINS": "maybe"}, "SLIPSTREAM_PINS: must be true or false, not 'maybe'"),
        ({"SLIPSTREAM_MODE": "off"}, "SLIPSTREAM_MODE: must be one of auto, on, not 'off'"),
        ({"SLIPSTREAM_SIZE": "3"}, "SLIPSTREAM_SIZE: 3 is odd"),
        ({"SLIPSTREAM_CONFIG": "/none"}, "SLIPSTREAM_CONFIG: /none cannot be read: No such file"),
    ],
)
def test_an_unusable_environment_variable_is_refused(
    capsys: pytest.CaptureFixture[str], environment: dict[str, str], words: str
) -> None:
    assert words in error_of(capsys, **environment)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "-0.5", "1e999"])
def test_a_number_that_is_not_finite_or_too_low_names_its_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    words = f"must be a number of at least 0, not {float(text)}"
    assert error_of(capsys, SLIPSTREAM_SHARE=text) == f"SLIPSTREAM_SHARE: {words}"
    assert error_of(capsys, f"--share={text}") == f"--share: {words}"
    assert f"share: {words}" in error_of(
        capsys, file=f"share = {text}".replace("1e999", "inf"), tmp_path=tmp_path
    )


def test_a_whole_number_that_no_float_can_hold_names_its_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = error_of(capsys, file="share = 1" + 400 * "0", tmp_path=tmp_path)
    assert words.endswith("share: must be a number, not one of 401 digits")


@pytest.mark.parametrize("name", ["BLOCK_TOKENS", "MAX_BATCH", "STEP_TOKENS", "THREADS"])
def test_sizes_of_an_engine_are_at_least_one(capsys: pytest.CaptureFixture[str], name: str) -> None:
    environment = {f"SLIPSTREAM_{name}": "0"}
    given = ["--instance", "decode-0"]
    with pytest.raises(SystemExit):
        load_settings(
            DecodeSettings,
            section="decode",
            program="p",
            description="",
            arguments=given,
            environment=environment,
        )
    assert f"SLIPSTREAM_{name}: must be a whole number of at least 1, not 0" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ETCD_LEASE_S", "POOL_REPLICAS"])
def test_sizes_of_a_kvstore_node_are_at_least_one(capsys: pytest.CaptureFixture[str], name: str) -> None:
    environment = {f"SLIPSTREAM_{name}": "0"}
    given = ["--instance", "kv-0"]
    with pytest.raises(SystemExit):
        load_settings(
            NodeSettings,
            section="kvstore",
            program="p",
            description="",
            arguments=given,
            environment=environment,
        )
    assert f"SLIPSTREAM_{name}: must be a whole number of at least 1, not 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("DRAIN_S", "nan", "must be a number of at least 0, not nan"),
        ("DRAIN_S", "inf", "must be a number of at least 0, not inf"),
        ("DRAIN_S", "-1", "must be a number of at least 0, not -1.0"),
        ("PROCESSES", "0", "must be a whole number of at least 1, not 0"),
        ("PROCESSES", "-2", "must be a whole number of at least 1, not -2"),
        ("PROCESSES", "1.5", "must be a whole number, not '1.5'"),
        ("MAX_REQUESTS", "0", "must be a whole number of at least 1, not 0"),
        ("HTTP", "nowhere", "must be HOST:PORT, not 'nowhere'"),
        ("LISTEN", "127.0.0.1:99999", "must be HOST:PORT, not '127.0.0.1:99999'"),
        ("API_KEYS", "/none", "/none cannot be read: No such file or directory"),
        ("MODEL", "/none", "/none cannot be read: No such file or directory"),
        ("REGION_MS", "eu=soon", "'eu=soon' is not NAME=MS"),
    ],
)
def test_values_that_a_router_cannot_use(
    capsys: pytest.CaptureFixture[str], name: str, text: str, words: str
) -> None:
    given = ["--instance", "router-0"]
    with pytest.raises(SystemExit):
        load_settings(
            RouterSettings,
            section="router",
            program="p",
            description="",
            arguments=given,
            environment={f"SLIPSTREAM_{name}": text},
        )
    assert f"SLIPSTREAM_{name}: {words}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "section", "name", "text", "words"),
    [
        (DecodeSettings, "decode", "drafter", "nohost", "must be local, service or HOST:PORT, not 'nohost'"),
        (DecodeSettings, "decode", "drafter", "h:0", "must be local, service or HOST:PORT, not 'h:0'"),
        (DecodeSettings, "decode", "etcd", "e:1,nohost", "must be HOST:PORT, not 'nohost'"),
        (RouterSettings, "router", "etcd", "e:0", "must be HOST:PORT, not 'e:0': nothing listens on port 0"),
        (NodeSettings, "kvstore", "pool_master", "nohost", "must be HOST:PORT or etcd://HOST:PORT"),
        (NodeSettings, "kvstore", "pool_admin", "a:1,nohost", "must be HOST:PORT, not 'nohost'"),
    ],
)
@pytest.mark.parametrize("source", ["flag", "variable", "key"])
def test_an_address_to_dial_without_a_port_is_refused_by_its_name(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    kind: type[Any],
    section: str,
    name: str,
    text: str,
    words: str,
    source: str,
) -> None:
    flag, variable = f"--{name.replace('_', '-')}", f"SLIPSTREAM_{name.upper()}"
    file = tmp_path / "c.toml"
    file.write_text(f'[{section}]\n{name} = "{text}"')
    given, environment, named = ["--instance", "x"], dict[str, str](), flag
    if source == "flag":
        given += [flag, text]
    elif source == "variable":
        environment, named = {variable: text}, variable
    else:
        given += ["--config", str(file)]
        named = f"[{section}] {name}"
    with pytest.raises(SystemExit):
        load_settings(
            kind,
            section=section,
            program="p",
            description="",
            arguments=given,
            environment=environment,
        )
    assert f"{named}: {words}" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("--size", "x"), ("--siz", "2"), ("--mode", "off"), ("--size", "3")])
def test_unusable_flags_are_refused(capsys: pytest.CaptureFixture[str], flags: tuple[str, str]) -> None:
    assert error_of(capsys, *flags)


def test_faults_found_after_the_start_name_the_source_of_a_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("short")
    monkeypatch.delenv("SLIPSTREAM_CLUSTER_SECRET", raising=False)

    def load(*flags: str, **environment: str) -> DecodeSettings:
        return load_settings(
            DecodeSettings,
            section="decode",
            program="p",
            description="",
            arguments=["--instance", "d", *flags],
            environment=environment,
        )

    with pytest.raises(
        InvalidArgument, match=r"^SLIPSTREAM_CLUSTER_SECRET_FILE: .*secret: the cluster secret must"
    ):
        load(SLIPSTREAM_CLUSTER_SECRET_FILE=str(secret)).cluster_secret()
    with pytest.raises(InvalidArgument, match=r"^--cluster-secret-file: "):
        load("--cluster-secret-file", str(secret)).cluster_secret()
    monkeypatch.setenv("SLIPSTREAM_CLUSTER_SECRET", "short")
    with pytest.raises(InvalidArgument, match=r"^SLIPSTREAM_CLUSTER_SECRET: "):
        load().cluster_secret()
    with pytest.raises(
        InvalidArgument, match=r"^SLIPSTREAM_TLS_CA, --tls-certificate, --tls-key: go together"
    ):
        load(SLIPSTREAM_TLS_CA=str(secret)).tls()


@pytest.mark.parametrize(
    ("flags", "environment", "text"),
    [
        (("--log-format", "json"), {}, ""),
        ((), {"SLIPSTREAM_LOG_FORMAT": "json"}, ""),
        ((), {}, '[common]\nlog_format = "json"\n'),
        ((), {}, '[common]\nlog_format = "text"\n[decode]\nlog_format = "json"\n'),
    ],
)
def test_refused_settings_are_a_line_of_json_where_the_logs_are(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    flags: tuple[str, ...],
    environment: dict[str, str],
    text: str,
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text + "[kvstore]\n")
    for given, words in (
        (["--max-batch", "1000000"], "--max-batch: must be at most"),
        (["--cluster-secret-file", "/none"], "--cluster-secret-file: /none cannot be read"),
    ):
        with pytest.raises(SystemExit) as ended:
            load_settings(
                DecodeSettings,
                section="decode",
                program="p",
                description="",
                arguments=["--instance", "d", "--config", str(file), *flags, *given],
                environment=environment,
            )
        record = json.loads(capsys.readouterr().err)
        assert (ended.value.code, record["level"]) == (2, "error")
        assert (record["service"], record["instance"]) == ("decode", "d")
        assert record["message"].startswith(words)


def test_help_shows_defaults_and_variables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_sample("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "a size (default: 8; env SLIPSTREAM_SIZE)" in shown
    assert "a disk (default: none of its own; env SLIPSTREAM_DISK)" in shown
    assert "--parent" not in shown


@pytest.mark.parametrize("kind", SERVICES)
def test_every_service_has_the_shared_settings(kind: type[Any]) -> None:
    assert set(rows(ServiceSettings)) <= set(rows(kind))
    assert all(row.described.help for row in rows(kind).values())


def test_the_configuration_page_is_generated_from_the_settings_classes() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "gen_configuration.py"))["render"]()
    assert (ROOT / "docs" / "configuration.md").read_text() == page, "python scripts/gen_configuration.py"


@pytest.mark.parametrize("service", SERVICES)
def test_every_advertised_address_is_one_that_others_can_dial(service: type[Any]) -> None:
    named = [row for name, row in rows(service).items() if name.endswith("advertise")]
    assert {row.name for row in named} >= {"advertise", "admin_http_advertise"}
    assert ("kv_advertise" in rows(service)) == ("kv_listen" in rows(service))
    assert ("admin_advertise" in rows(service)) == ("admin" in rows(service))
    assert all(row.described.check is check_advertised for row in named)
    for text in ("", "decode-0.workers:0", "10.0.0.7:7000", "[fd00::7]:0"):
        check_advertised(text)
    for text in (
        "0.0.0.0:7000",
        "[::]:0",
        "decode-0.workers",
        "host:port",
        "a..b:7000",
        "http://a:1",
        f"{'x' * 64}:0",
    ):
        with pytest.raises(ValueError, match="must be HOST:PORT"):
            check_advertised(text)
