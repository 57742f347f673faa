"""A pod of a manifest as one container under runc, on loopback: what a kubelet does, without a cluster.

Variables, arguments, mounts, memory, probes and the stop sequence are the manifest's. Each pod has an address
of 127.0.0.0/8, on which it listens instead of on all of them. Not as in a cluster: seccomp, CPU shares, DNS.
"""

from __future__ import annotations

import ipaddress
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.images.container import Container, ContainerLimits
from bench.images.image import Image
from tests.k8s.renders import Object, PodTemplate, config_maps

_UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}


def stored_name(image: str) -> str:
    """The name of an image in buildah's store, which has those without a registry under localhost."""
    registry, slash, _ = image.partition("/")
    has_registry = slash and ("." in registry or ":" in registry or registry == "localhost")
    return image if has_registry else f"localhost/{image}"


def quantity_bytes(text: str) -> int:
    """Bytes of 512Mi or 1Gi."""
    return int(text[:-2]) * _UNITS[text[-2:]]


def variables_of(pod: PodTemplate, objects: tuple[Object, ...], *, name: str, address: str) -> dict[str, str]:
    """The environment that a kubelet makes of envFrom and env."""
    found: dict[str, str] = {}
    data = config_maps(objects)
    for source in pod.main.get("envFrom", ()):
        found |= data[source["configMapRef"]["name"]]
    fields = {"metadata.name": name, "status.podIP": address}
    for entry in pod.main.get("env", ()):
        found[entry["name"]] = (
            fields[entry["valueFrom"]["fieldRef"]["fieldPath"]] if "valueFrom" in entry else entry["value"]
        )
    return found


def arguments_of(pod: PodTemplate, variables: Mapping[str, str], *, address: str) -> list[str]:
    """The arguments with $(NAME) replaced, and `address` where they say all addresses."""

    def value(found: re.Match[str]) -> str:
        return variables[found.group(1)]

    expanded = (re.sub(r"\$\((\w+)\)", value, text) for text in pod.main["args"])
    return [text.replace("0.0.0.0", address) for text in expanded]


def _files_of(
    volume: Mapping[str, Any],
    secrets: Mapping[str, Mapping[str, bytes]],
    data: Mapping[str, Mapping[str, str]],
) -> dict[str, tuple[bytes, int]] | None:
    """The content and mode of each file of a Secret or a ConfigMap; None for other volumes."""
    if "secret" in volume:
        source = volume["secret"]
        return {
            name: (content, source["defaultMode"]) for name, content in secrets[source["secretName"]].items()
        }
    if "configMap" in volume:
        source = volume["configMap"]
        mode = source.get("defaultMode", 0o644)
        return {name: (content.encode(), mode) for name, content in data[source["name"]].items()}
    return None


class PodContainer:
    """`with PodContainer(...)`: the container runs inside the block."""

    def __init__(
        self,
        pod: PodTemplate,
        objects: tuple[Object, ...],
        image: Image,
        work_dir: Path,
        *,
        address: ipaddress.IPv4Address,
        secrets: Mapping[str, Mapping[str, bytes]],
        hosts: Mapping[str, str],
    ) -> None:
        """`secrets`: the files of each Secret by name. `hosts`: addresses of names that DNS would know."""
        self.pod, self.name = pod, f"{pod.tier}-{str(address).replace('.', '-')}"
        self.address = str(address)
        self._folder = work_dir / self.name
        self._folder.mkdir(parents=True)
        self.group = pod.spec["securityContext"]["fsGroup"]
        variables = variables_of(pod, objects, name=self.name, address=self.address)
        writable, readable = self._mounts(objects, secrets, hosts)
        limits = ContainerLimits(
            quantity_bytes(pod.main["resources"]["limits"]["memory"]),
            writable,
            readable,
            environment=variables,
            groups=(self.group,),
        )
        command = [*image.config["Entrypoint"], *arguments_of(pod, variables, address=self.address)]
        self._container = Container(self.name, image, self._folder, limits, command=command)

    def _mounts(
        self,
        objects: tuple[Object, ...],
        secrets: Mapping[str, Mapping[str, bytes]],
        hosts: Mapping[str, str],
    ) -> tuple[tuple[tuple[Path, str], ...], tuple[tuple[Path, str], ...]]:
        """(writable, readable) folders by the path inside, with the owner and the modes of a kubelet."""
        volumes = {volume["name"]: volume for volume in self.pod.spec["volumes"]}
        data = config_maps(objects)
        writable, readable = [], []
        for mount in self.pod.main["volumeMounts"]:
            volume = volumes.get(mount["name"], {})  # a StatefulSet's claim is no volume of the template
            folder = self._folder / "volumes" / mount["name"]
            folder.mkdir(parents=True)
            os.chown(folder, 0, self.group)
            if (files := _files_of(volume, secrets, data)) is not None:
                for name, (content, mode) in files.items():
                    (folder / name).write_bytes(content)
                    os.chown(folder / name, 0, self.group)
                    (folder / name).chmod(mode)
                folder.chmod(0o755)
                readable.append((folder, mount["mountPath"]))
            else:
                folder.chmod(0o2775)
                writable.append((folder, mount["mountPath"]))
        for parent in (self._folder, self._folder / "volumes"):
            parent.chmod(0o755)
        names = self._folder / "hosts"
        names.write_text("".join(f"{address} {name}\n" for name, address in hosts.items()))
        readable.append((names, "/etc/hosts"))
        return tuple(writable), tuple(readable)

    def __enter__(self) -> PodContainer:
        self._container.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._container.__exit__(kind, error, trace)

    @property
    def log(self) -> str:
        """What it printed."""
        return self._container.log.read_text()

    def passes(self, probe: str) -> bool:
        """Whether a probe of the manifest passes, asked once as a kubelet asks."""
        asked = self.pod.main[probe]
        ports = {port["name"]: port["containerPort"] for port in self.pod.main["ports"]}
        url = f"http://{self.address}:{ports[asked['httpGet']['port']]}{asked['httpGet']['path']}"
        try:
            with urllib.request.urlopen(url, timeout=asked["timeoutSeconds"]) as answer:
                return bool(200 <= answer.status < 400)
        except (OSError, urllib.error.HTTPError):
            return False

    def wait_started(self) -> None:
        """Return when startup and readiness probe passed. Raises AssertionError where a kubelet gives up."""
        self._wait("startupProbe")
        self._wait("readinessProbe")
        assert self.passes("livenessProbe"), self.log

    def _wait(self, probe: str) -> None:
        asked = self.pod.main["startupProbe"]
        deadline_s = time.monotonic() + asked["periodSeconds"] * asked["failureThreshold"]
        while not self.passes(probe):
            assert self._container.runs, f"{self.name} ended: {self.log[-2000:]}"
            assert time.monotonic() < deadline_s, f"{self.name}, {probe}: {self.log[-2000:]}"
            time.sleep(0.2)

    def stop(self) -> int:
        """preStop, SIGTERM, and the exit status. Raises subprocess.TimeoutExpired at the end of the grace."""
        sleep_s = self.pod.main["lifecycle"]["preStop"]["sleep"]["seconds"]
        time.sleep(sleep_s)
        assert self._container.runs, f"{self.name} ended before SIGTERM: {self.log[-2000:]}"
        self._container.kill("TERM")
        return self._container.wait(self.pod.spec["terminationGracePeriodSeconds"] - sleep_s)
