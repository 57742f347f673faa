"""The configuration file of a cluster: sections, directories, and what is refused by name."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from libs.common.runtime.config_file import SECTIONS, SHARED_NAMES, file_values, read_sections
from libs.common.runtime.loading import load_settings
from libs.common.runtime.process_settings import ServiceSettings
from libs.common.runtime.settings import rows
from libs.common.service_bounds import MAX_CONFIGURATION_BYTES
from services.decode.settings import DecodeSettings
from services.kvstore.settings import NodeSettings
from supervisor.configuration.cluster_file import SETTINGS


def values(
    tmp_path: Path, text: str, *, kind: type = DecodeSettings, section: str = "decode"
) -> dict[str, object]:
    (tmp_path / "c.toml").write_text(text)
    found = file_values(kind, read_sections(tmp_path / "c.toml"), section, checks_files=False)
    return {name: value for name, (value, _) in found.items()}


def test_a_services_own_section_goes_before_the_common_one(tmp_path: Path) -> None:
    text = '[common]\nlog_level = "debug"\ntransport = "socket"\n[decode]\ntransport = "auto"\nmax_batch = 2'
    assert values(tmp_path, text) == {"log_level": "debug", "transport": "auto", "max_batch": 2}


def test_a_service_skips_shared_settings_that_it_lacks_and_other_sections(tmp_path: Path) -> None:
    text = '[common]\nmodel = "/m"\nregion = "eu"\n[router]\nany = 1\n[up]\ndecode = 2'
    assert values(tmp_path, text, kind=NodeSettings, section="kvstore") == {"region": "eu"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[comon]\n", "no section is named [comon]; is common meant?"),
        ("[cluster]\n", "no section is named [cluster]; there are [common], [router], [prefill],"),
        ("[common]\nlog_levl = 1", "[common] no setting is named log_levl; is log_level meant?"),
        ("[common]\nmax_batch = 1", "[common] max_batch: not every service has it: put it into [decode]"),
        ("[decode]\nmax-batch = 1", "[decode] no setting is named max-batch; is max_batch meant?"),
        ("[decode]\ndram_bytes = 1", "[decode] no setting is named dram_bytes"),
        ("[decode]\nmax_batch = 0", "[decode] max_batch: must be a whole number of at least 1, not 0"),
        ("[decode]\nmax_batch = 65537", "[decode] max_batch: must be at most 65,536, not 65,537"),
        ("[common]\nlisten = 'here'", "[common] listen: must be HOST:PORT"),
        ("max_batch = 1", "max_batch stands outside of a section; there are [common], [router]"),
        ("decode = 1", "decode stands outside of a section"),
        (f"a = {'[' * 9999}", "is nested too deep"),
        ("#" * (MAX_CONFIGURATION_BYTES + 1), f"has more than {MAX_CONFIGURATION_BYTES} bytes"),
    ],
)
def test_what_no_service_knows_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError) as refused:
        values(tmp_path, text)
    assert words in str(refused.value)


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    for path in (tmp_path / "pipe.toml", tmp_path, Path("/dev/zero")):
        with pytest.raises(ValueError, match="is not a file"):
            read_sections(path)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_sections(tmp_path / "none.toml")


def test_a_directory_is_its_files_in_order_as_a_config_map_mounts_them(tmp_path: Path) -> None:
    hidden = tmp_path / "..2026_11_23"
    hidden.mkdir()
    (hidden / "10-cluster.toml").write_text('[common]\nlog_level = "debug"\netcd = "e:1"\n')
    (hidden / "50-tls.toml").write_text('[common]\nlog_level = "info"\n[decode]\nmax_batch = 3\n')
    (tmp_path / "..data").symlink_to(hidden)
    for name in ("10-cluster.toml", "50-tls.toml"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    (tmp_path / "notes.txt").write_text("no TOML")
    sections = read_sections(tmp_path)
    assert sections == {"common": {"log_level": "info", "etcd": "e:1"}, "decode": {"max_batch": 3}}
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no file \*\.toml"):
        read_sections(tmp_path / "empty")


def test_shared_names_are_settings_of_several_services_and_not_of_all() -> None:
    counts = Counter(name for kind in SETTINGS.values() for name in rows(kind))
    assert all(1 < counts[name] < len(SETTINGS) for name in SHARED_NAMES)
    assert not set(SHARED_NAMES) & set(rows(ServiceSettings))
    assert set(SETTINGS) < set(SECTIONS)


def test_nothing_is_asked_of_a_path_that_is_overridden(tmp_path: Path) -> None:
    """A file of another machine may name what this one lacks."""
    file = tmp_path / "c.toml"
    file.write_text('[common]\ncluster_secret_file = "/none/secret"\netcd_ca = "/none/ca"\n')

    def load(*flags: str, **environment: str) -> NodeSettings:
        return load_settings(
            NodeSettings,
            section="kvstore",
            program="p",
            description="",
            arguments=["--instance", "k", "--config", str(file), *flags],
            environment=environment,
        )

    secret = tmp_path / "secret"
    secret.touch()
    loaded = load("--etcd-ca", "", SLIPSTREAM_CLUSTER_SECRET_FILE=str(secret))
    assert (loaded.cluster_secret_file, loaded.etcd_ca) == (secret, None), "an empty flag is none"
    for flags, environment in (
        (("--etcd-ca", ""), {}),
        ((), {"SLIPSTREAM_CLUSTER_SECRET_FILE": str(secret)}),
    ):
        with pytest.raises(SystemExit):
            load(*flags, **environment)
