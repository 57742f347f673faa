"""Tests of deploy/k8s: the manifests by themselves, and the end-to-end suite that `make test-k8s` runs on a cluster."""
