"""How an operator's command opens channels to a cluster: with a token, an API key, or certificates."""

from __future__ import annotations

import os
from pathlib import Path

from slipstream.cluster_record import read_record, secret_file
from slipstream.credentials.user_name import user_name
from slipstream.errors import InvalidArgument, NotFound
from slipstream.rpc.api_key import ApiKeyCredential
from slipstream.rpc.caller_class import CallerClass
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.dial import Credentials, Dial
from slipstream.rpc.peer_token import TokenMinter
from slipstream.rpc.tls import TlsFiles

SECRET_VARIABLE = "SLIPSTREAM_CLUSTER_SECRET"
SECRET_FILE_FLAG = "--cluster-secret-file"
API_KEY_VARIABLE = "SLIPSTREAM_API_KEY"


def operator_dial(
    run_dir: Path | None = None,
    *,
    given: Path | None = None,
    tls: TlsFiles | None = None,
    api_key: str | None = None,
    is_remote: bool = False,
) -> Dial:
    """Channels of an operator.

    The credential is `api_key`, or the secret of the `given` file, of SECRET_VARIABLE, or of the local
    cluster in `run_dir`. Without any of them calls carry none. A key in API_KEY_VARIABLE goes before the
    local cluster's secret where the cluster `is_remote`: elsewhere it is a tenant's, for chats.
    Certificates are those of `tls`, else of that local cluster. Raises InvalidArgument for a secret that
    cannot be read.
    """
    if tls is None and run_dir is not None:
        tls = _certificates_of(run_dir)
    return Dial(tls, _credentials(run_dir, given, api_key, is_remote=is_remote))


def _credentials(
    run_dir: Path | None, given: Path | None, api_key: str | None, *, is_remote: bool
) -> Credentials | None:
    if api_key:
        return ApiKeyCredential(api_key)
    text = os.environ.get(SECRET_VARIABLE, "").strip()
    key = os.environ.get(API_KEY_VARIABLE, "").strip()
    local = None if run_dir is None else secret_file(run_dir)
    name = SECRET_FILE_FLAG
    try:
        if given is not None:
            secret = ClusterSecret.from_file(given)
        elif text:
            name = SECRET_VARIABLE
            secret = ClusterSecret(text.encode())
        elif key and is_remote:
            return ApiKeyCredential(key)
        elif local is not None and local.exists():
            secret = ClusterSecret.from_file(local)
        else:
            return None
    except ValueError as error:
        raise InvalidArgument(name, str(error)) from None
    return TokenMinter(secret, user_name(), CallerClass.OPERATOR)


def _certificates_of(run_dir: Path) -> TlsFiles | None:
    try:
        return read_record(run_dir).tls_files()
    except NotFound:  # the command itself says so where it needs a running cluster
        return None
