"""Tests of deploy/k8s: the manifests by themselves; `cluster` has the end-to-end suite of `make test-k8s`."""
