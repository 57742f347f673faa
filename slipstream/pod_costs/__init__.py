"""Writes what each worker's removal costs to its pod, so that Kubernetes removes the cheapest one first.

`python -m slipstream.pod_costs` runs beside the cluster (deploy/k8s/components/pod-costs). Must not import
`cli`, `libs`, `services` or `supervisor`.
"""
