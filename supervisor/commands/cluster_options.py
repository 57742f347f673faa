"""The flags of `slipstream up`: each a type with its help and its limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ANY_PORT = "any"

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="TOML file of the cluster or directory of them (docs/configuration.md); flags go before it.",
    ),
]
Model = Annotated[Path | None, typer.Option(help="Checkpoint directory; default: the shipped one.")]
DraftModel = Annotated[
    Path | None, typer.Option(help="EAGLE-3 head; default: the shipped one with the shipped model.")
]
Routers = Annotated[
    int, typer.Option("--router", min=1, help="Number of routers; --http and --grpc are of the first.")
]
PrefillWorkers = Annotated[int, typer.Option(min=0, help="Number of prefill workers.")]
DecodeWorkers = Annotated[int, typer.Option(min=0, help="Number of decode workers.")]
Kvstores = Annotated[int, typer.Option("--kvstore", min=0, help="Number of KV stores.")]
Drafters = Annotated[
    int | None,
    typer.Option(
        "--drafter",
        min=0,
        help="Number of drafters; default: 1 where they draft, else 0. A stated 0: no drafts with auto.",
    ),
]
Drafts = Annotated[
    str, typer.Option(help="on, off, or auto: use drafts where they are measured to save time.")
]
DraftsFrom = Annotated[
    str,
    typer.Option(
        help="remote: drafters run the draft head; local: each decode worker runs it; auto: local, unless "
        "--drafter asks for drafters, or decode workers have devices or several ranks."
    ),
]
PrefillParallel = Annotated[
    str | None, typer.Option(help="Ranks of each prefill worker: tp=2,pp=2 (docs/parallelism.md).")
]
DecodeParallel = Annotated[str | None, typer.Option(help="The same of each decode worker: tp=2,kv=2.")]
Device = Annotated[
    str | None,
    typer.Option(
        help="Where prefill and decode workers run: cpu, cuda or cuda:N (docs/gpu.md); default: cpu. The ten "
        "below are of these workers, too (docs/planner.md)."
    ),
]
MemoryBytes = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="What each worker may take of the host, or of its device; default: equal parts of three "
        "quarters of the host, or what is free on the device.",
    ),
]
KvMemoryBytes = Annotated[
    int | None, typer.Option(min=1, help="Size of the KV cache; default: what --memory-bytes leaves.")
]
WeightDtype = Annotated[
    str | None, typer.Option(help="Weights in memory: auto, float32 or bfloat16; default: the checkpoint's.")
]
KvDtype = Annotated[
    str | None, typer.Option(help="KV cache: auto, float32 or bfloat16; default: the weights'.")
]
ComputeDtype = Annotated[
    str | None,
    typer.Option(help="Activations in products: auto or float32; default: bf16 where the CPU has it."),
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; default: half of the cores.")]
MaxBatch = Annotated[int | None, typer.Option(min=1, help="Sequences in one step; default: 64.")]
StepTokens = Annotated[
    int | None, typer.Option(min=1, help="Rows of one step, prefill chunks included; default: 512.")
]
MaxContextTokens = Annotated[
    int | None, typer.Option(min=1, help="Longest prompt and answer; default: what the KV cache holds.")
]
PackedDir = Annotated[
    str | None,
    typer.Option(help="Where workers share packed weights; off = nowhere; default: packed in --run-dir."),
]
Etcd = Annotated[
    str | None,
    typer.Option(help="host:port[,host:port] of an etcd that runs already; default: `up` starts one."),
]
EtcdCa = Annotated[Path | None, typer.Option(help="PEM of the CA of that etcd: TLS to it.")]
EtcdCertificate = Annotated[Path | None, typer.Option(help="PEM of a certificate, where it asks for one.")]
EtcdKey = Annotated[Path | None, typer.Option(help="PEM of its key.")]
EtcdUser = Annotated[str, typer.Option(help="User of that etcd.")]
EtcdPasswordFile = Annotated[Path | None, typer.Option(help="File with the password of that user.")]
Http = Annotated[str, typer.Option(help=f"host:port of the HTTP API, or '{ANY_PORT}' for a free port.")]
Grpc = Annotated[str, typer.Option(help=f"host:port of the gRPC API, or '{ANY_PORT}' for a free port.")]
# Without variables: those of a shell are for its clients, and must not reach the services.
ServiceTlsCa = Annotated[
    Path | None, typer.Option("--tls-ca", help="PEM of the CA; with the two below: mTLS of all services.")
]
ServiceTlsCertificate = Annotated[
    Path | None, typer.Option("--tls-certificate", help="PEM of the services' certificate.")
]
ServiceTlsKey = Annotated[Path | None, typer.Option("--tls-key", help="PEM of its key.")]
ServiceTlsServerName = Annotated[
    str,
    typer.Option(
        "--tls-server-name",
        help="Name in that certificate, by which services dial each other; default: the host dialled. HTTPS "
        "clients that dial it need --allowed-hosts.",
    ),
]
ServiceTlsClientCa = Annotated[
    Path | None,
    typer.Option("--tls-client-ca", help="PEM of the CA of clients, for the routers' public gRPC port only."),
]
ServedModelName = Annotated[
    str | None, typer.Option(help="Name that clients use; default: the model directory's.")
]
ApiKeyFile = Annotated[
    Path | None, typer.Option("--api-keys", help="File of API keys (`slipstream keys`); default: no keys.")
]
PriceFile = Annotated[
    Path | None, typer.Option("--prices", help="File of prices (docs/metering.md); default: no costs.")
]
SharedPrefix = Annotated[
    Path | None, typer.Option(help="File with a system prompt whose KV all tenants share.")
]
AllowedHosts = Annotated[
    str | None,
    typer.Option(help="NAME[,NAME..] that HTTP's Host header may have beside addresses and localhost."),
]
CorsOrigins = Annotated[
    str | None, typer.Option(help="ORIGIN[,ORIGIN..] of web pages that may call over HTTP; * = any.")
]
AccessLogSwitch = Annotated[
    str | None, typer.Option("--access-log", help="Whether each call has a line in the log: on or off.")
]
AllowPinning = Annotated[
    bool, typer.Option("--allow-pinning", help="A request may name its prefill worker: x-slipstream-prefill.")
]
DiskBytes = Annotated[
    int | None, typer.Option(min=0, help="Bytes on disk of each KV store; 0 = memory only; default: 1 GiB.")
]
Transport = Annotated[str, typer.Option(help="KV transport: auto, mooncake, socket, rdma[:DEVICE,..].")]
Pool = Annotated[
    str | None, typer.Option(help="mooncake: the KV stores share memory through Mooncake Store.")
]
PoolMasters = Annotated[
    int, typer.Option("--pool-masters", min=1, help="Masters of --pool; one leads, the others stand by.")
]
Start = Annotated[
    str,
    typer.Option(help="How services begin: fork of a process that has imported them, or spawn of a new one."),
]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]
LogFormat = Annotated[str, typer.Option(help="Form of log lines: text or json.")]
ReadyTimeoutS = Annotated[float, typer.Option(min=0.1, help="Seconds until the start fails.")]
LogMaxBytes = Annotated[int, typer.Option(min=4096, help="Size at which a log file is rotated.")]
LogFiles = Annotated[int, typer.Option(min=1, help="Files kept of each log, the current one included.")]
DrainS = Annotated[
    float, typer.Option(min=0, help="Seconds that a router which stops has for running requests.")
]
GraceS = Annotated[
    float,
    typer.Option(min=0, help="Seconds from SIGTERM to SIGKILL; for routers after --drain-s."),
]
