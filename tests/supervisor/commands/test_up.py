"""The flags of `slipstream up`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, get_args

import pytest
from typer.testing import CliRunner

from libs.common.cluster.worker_record import Role
from libs.common.runtime.loading import load_settings
from slipstream.cli.app import app
from slipstream.errors import InvalidArgument
from slipstream.rpc.tls import TlsFiles
from supervisor.configuration.cluster_file import SETTINGS
from supervisor.configuration.cluster_options import ClusterOptions, flags_of
from supervisor.configuration.plan import ClusterConfig, plan_services

PEMS = Path(__file__).parents[2] / "support" / "tls"


def test_keys_certificates_and_etcd_access_are_flags(tmp_path: Path, started: list[ClusterConfig]) -> None:
    files = [tmp_path / name for name in ("etcd-ca", "password", "keys", "prompt", "prices")]
    for file in files:
        file.touch()
    etcd_ca, password, keys, prompt, prices = files
    ca, pem, key = (PEMS / name for name in ("ca.pem", "peer.pem", "peer.key"))
    arguments = ["up", "--tls-ca", ca, "--tls-certificate", pem, "--tls-key", key]
    arguments += ["--etcd", "e:1", "--etcd-ca", etcd_ca, "--etcd-certificate", pem, "--etcd-key", key]
    arguments += ["--etcd-user", "u", "--etcd-password-file", password, "--api-keys", keys]
    arguments += ["--shared-prefix", prompt, "--served-model-name", "helper", "--disk-bytes", "0"]
    arguments += ["--prices", prices]
    # The shell's variables of a client's certificate do not become the services'.
    done = CliRunner().invoke(app, [str(part) for part in arguments], env={"SLIPSTREAM_TLS_CA": "/other"})
    assert done.exit_code == 0, done.output
    (config,) = started
    assert config.tls == TlsFiles(ca, pem, key)
    assert (config.etcd_ca, config.etcd_certificate, config.etcd_key) == (etcd_ca, pem, key)
    assert (config.etcd_user, config.etcd_password_file) == ("u", password)
    assert (config.api_keys, config.shared_prefix, config.prices) == (keys, prompt, prices)
    assert (config.served_model_name, config.disk_bytes) == ("helper", 0)


def test_a_shells_certificates_are_not_the_services(started: list[ClusterConfig]) -> None:
    names = {f"SLIPSTREAM_TLS_{name}": "/dev/null" for name in ("CA", "CERTIFICATE", "KEY")}
    assert CliRunner().invoke(app, ["up"], env=names).exit_code == 0
    assert started[0].tls is None


def test_a_name_without_certificates_is_refused(started: list[ClusterConfig]) -> None:
    done = CliRunner().invoke(app, ["up", "--tls-server-name", "peers.internal"])
    assert isinstance(done.exception, InvalidArgument) and done.exception.field == "--tls-server-name"
    assert not started


def test_two_of_three_certificates_are_refused(tmp_path: Path, started: list[ClusterConfig]) -> None:
    done = CliRunner().invoke(app, ["up", "--tls-ca", str(tmp_path)])
    assert isinstance(done.exception, InvalidArgument)
    assert not started


def test_a_missing_gpu_is_said_before_what_each_worker_may_take_of_it(
    started: list[ClusterConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.commands.up.has_cuda_driver", lambda: False)
    done = CliRunner().invoke(app, ["up", "--device", "cuda"])
    assert isinstance(done.exception, InvalidArgument) and done.exception.field == "--device"
    assert not started


@pytest.mark.parametrize("flag", ["--ready-timeout-s", "--drain-s", "--grace-s"])
@pytest.mark.parametrize("value", ["-1", "nan", "inf", "1e+10"])
def test_a_time_out_of_its_range_is_refused_as_in_a_file(
    started: list[ClusterConfig], tmp_path: Path, flag: str, value: str
) -> None:
    done = CliRunner().invoke(app, ["up", flag, value])
    assert done.exit_code == 2 and flag in done.output
    assert f" to 86,400 seconds, not {value}" in done.output.replace("\n", " ")
    file, section = tmp_path / "cluster.toml", "router" if flag == "--drain-s" else "up"
    file.write_text(f"[{section}]\n{flag[2:].replace('-', '_')} = {value}\n")
    assert isinstance(CliRunner().invoke(app, ["up", "--config", str(file)]).exception, InvalidArgument)
    assert not started


FLAGS_OF_TEXT = sorted(
    f"--{name.replace('_', '-')}"
    for name, (annotation, _) in {**flags_of(ClusterOptions), "config": (Annotated[Path, ""], None)}.items()
    if {str, Path} & {annotation.__origin__, *get_args(annotation.__origin__)}
)


@pytest.mark.parametrize("flag", FLAGS_OF_TEXT)
def test_a_flag_without_its_value_is_refused_by_name(started: list[ClusterConfig], flag: str) -> None:
    for value, given in (("--x", [flag, "--x"]), ("-x", [f"{flag}=-x"])):
        done = CliRunner().invoke(app, ["up", *given])
        assert done.exit_code == 2, done.exception
        said = f"'{flag}': needs a value, and '{value}' begins with - as a flag does"
        assert said in " ".join(done.output.split())
    assert not started


def test_a_path_may_begin_with_a_dash_below_a_directory(
    started: list[ClusterConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("-c").write_text("[up]\ndecode = 3\n")
    names = ("model", "draft_model", "api_keys")
    flags = [part for name in names for part in (f"--{name.replace('_', '-')}", f"./-{name}")]
    done = CliRunner().invoke(app, ["up", "--config", "./-c", *flags])
    assert done.exit_code == 0, done.output
    (config,) = started
    assert config.decode == 3
    assert [getattr(config, name) for name in names] == [Path(f"-{name}") for name in names]
    config = replace(config, model=config.model.resolve(), run_dir=tmp_path)  # as the supervisor has it
    for plan in plan_services(config, etcd="e:1", ports=list(range(7000, 7040))):
        values = dict(zip(plan.command, plan.command[1:], strict=False))
        assert values.get("--draft-model", str(tmp_path / "-draft_model")) == str(tmp_path / "-draft_model")
        assert not {"-model", "-draft_model", "-api_keys"} & {*plan.command}


def test_the_flags_of_text_are_those_of_names_and_files() -> None:
    assert {"--served-model-name", "--etcd-user", "--packed-dir", "--draft-model"} <= set(FLAGS_OF_TEXT)
    assert not {"--prefill", "--memory-bytes", "--grace-s", "--allow-requested-prefill"} & set(FLAGS_OF_TEXT)


SIZES = {
    "device": "cuda:1",
    "memory_bytes": 1 << 28,
    "kv_memory_bytes": 1 << 24,
    "weight_dtype": "float32",
    "kv_dtype": "bfloat16",
    "compute_dtype": "float32",
    "threads": 3,
    "max_batch": 5,
    "step_tokens": 96,
    "max_context_tokens": 1024,
    "packed_dir": "off",
}


def as_flags(sizes: dict[str, object]) -> list[str]:
    return [part for name, value in sizes.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def test_sizes_are_flags_that_reach_prefill_and_decode_workers(
    tmp_path: Path, started: list[ClusterConfig]
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("[prefill]\nmax_batch = 9\nstep_tokens = 64\n[decode]\nmax_batch = 9\n")
    sizes = {name: value for name, value in SIZES.items() if name != "step_tokens"}
    done = CliRunner().invoke(app, ["up", "--config", str(file), *as_flags(sizes)])
    assert done.exit_code == 0, done.output
    plans = plan_services(started[0], etcd="e:1", ports=list(range(7000, 7040)))
    for plan in plans:
        found = load_settings(
            SETTINGS[Role(plan.role)],
            section=plan.role,
            program="p",
            description="",
            arguments=plan.command[3:],
            environment={},
        )
        if plan.role not in (Role.PREFILL, Role.DECODE):
            assert not {"--max-batch", "--memory-bytes", "--device"} & set(plan.command)
            continue
        assert {name: getattr(found, name) for name in sizes} == sizes
        assert found.step_tokens == (64 if plan.role == Role.PREFILL else 512), "the file's, and the default"


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ({"weight_dtype": "int3"}, r"--weight-dtype: must be one of auto, float32, bfloat16, not 'int3'"),
        ({"compute_dtype": "bfloat16"}, r"--compute-dtype: must be one of"),
        ({"device": "gpu"}, r"--device: .*'gpu' is not cpu, cuda or cuda:N"),
        ({"threads": 100_000}, r"--threads: must be at most 1,024, not 100,000"),
        ({"step_tokens": 1 << 30}, r"--step-tokens: must be at most 1,048,576"),
        ({"memory_bytes": 1 << 60}, r"--memory-bytes: 4 prefill and decode workers .* GB are missing"),
    ],
)
def test_sizes_that_no_worker_can_have_are_refused_by_name(
    started: list[ClusterConfig], given: dict[str, object], refusal: str
) -> None:
    done = CliRunner().invoke(app, ["up", *as_flags(given)])
    assert isinstance(done.exception, InvalidArgument) and not started
    assert re.search(refusal, str(done.exception)), done.exception
