"""Writes what each worker's removal costs to its pod, so that Kubernetes removes the cheapest one first.

`python -m slipstream.pod_costs` runs beside the cluster (deploy/k8s/components/pod-costs). Must not import
`cli`, `libs`, `services` or `supervisor`.
"""

import os

# As in `services`: gRPC's lines would be in another form among those of the log.
if os.environ.get("GRPC_VERBOSITY", "ERROR").upper() == "ERROR":
    os.environ["GRPC_VERBOSITY"] = "NONE"
